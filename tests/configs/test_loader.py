"""A config is typed: unknown keys, wrong types and missing values fail at start, in one line."""

import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from configs.errors import UserError
from configs.loader import load_config
from tests.conftest import ROOT


@dataclass
class Inner:
    rate: float = 0.5


@dataclass
class Outer:
    name: str = "???"
    steps: int = 3
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self):
        if self.steps < 1:
            raise UserError(f"steps={self.steps} must be positive; use 1 or more")


def test_values_are_merged_and_typed():
    config = load_config(Outer, {"name": "x", "inner": {"rate": 2}})
    assert config == Outer("x", 3, Inner(2.0)) and isinstance(config.inner.rate, float)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"name": "x", "stepz": 1}, "stepz"),
        ({"name": "x", "inner": {"rat": 1}}, "rat"),
        ({"name": "x", "steps": "many"}, "steps"),
        ({"name": "x", "inner": 3}, "not a subclass of Inner"),
        ({}, "name"),
        ({"name": "x", "steps": 0}, "must be positive"),
    ],
)
def test_what_does_not_fit_is_one_line(values, words):
    with pytest.raises(UserError, match=words) as caught:
        load_config(Outer, values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("script", ["data_processing.build_corpus", "llm.bpe_training", "llm.generating"])
def test_each_script_turns_a_mistake_into_an_error_and_a_code(script):
    done = subprocess.run([sys.executable, "-m", script, "+nonsense=1"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "nonsense" in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
