"""A config is typed: unknown keys, wrong types and missing values fail at start, in one line."""

import runpy
import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from configs.errors import UserError
from configs.loader import compose_config, load_config, run_script
from llm.args import TrainConfig
from tests.conftest import ROOT

FOLDERS = ("llm", "alignment", "data_processing", "bench_mark")
SCRIPTS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in FOLDERS
    for path in (ROOT / folder).glob("*.py")
    if "@hydra.main(" in path.read_text(encoding="utf-8")
)


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


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.num_layerz=3", "model.num_layerz=3: TrainConfig has no such key; did you mean model.num_layers?"),
        ("lr=3", "did you mean optimizer.lr?"),
        ("optimiser.lr=3", "did you mean optimizer.lr?"),
        ("zzzzzz=3", "has no such key; --cfg job prints every key"),
        ("+foo=1", "TrainConfig has no such key"),
        ("model.num_layers=abc", "could not be converted to Integer; give model.num_layers a value of type int"),
        ("checkpoint=3", "checkpoint=3: "),
        ("model=7x", "there is no configs/model/7x.yaml; did you mean 7b?"),
        ("experiment=nothing", "the choices are figures,"),
        ("+model=7b", "model: it has one already; write the choice without a +"),
        ("dtype=1,2", "Ambiguous value for argument 'dtype=1,2'"),
        ("micro_batch_size", "'micro_batch_size' is no override; write key=value"),
        ("a=[1", "'a=\\[1' is no override"),
        ("~bar", "'bar' does not exist"),
        ("name=???", "name must be given; add name=..."),
    ],
)
def test_what_hydra_refuses_is_one_line_with_the_nearest_key(override, words):
    with pytest.raises(UserError, match=words.replace("?", r"\?").replace("+", r"\+")) as caught:
        compose_config(TrainConfig, "training", ["name=x", override])
    assert "\n" not in str(caught.value)


def run_as_main(script: str) -> None:
    runpy.run_path(str(ROOT / f"{script.replace('.', '/')}.py"), run_name="__main__")


def assert_one_line(code: int, err: str) -> None:
    assert code == 2 and err.startswith("error: nonsense=1: "), err
    assert err.count("\n") == 1


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_script_turns_a_wrong_override_into_one_line_and_exit_code_2(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script, "nonsense=1"])
    with pytest.raises(SystemExit) as caught:
        run_as_main(script)
    assert_one_line(caught.value.code, capsys.readouterr().err)


def test_a_process_ends_with_one_line_and_exit_code_2():
    command = [sys.executable, "-m", "data_processing.build_corpus", "nonsense=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert_one_line(done.returncode, done.stderr)


def test_ctrl_c_ends_a_script_in_one_line_and_exit_code_130(capsys):
    def body(config):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as caught:
        run_script(body, Outer, {"name": "x"})
    assert caught.value.code == 130
    assert capsys.readouterr().err == "stopped by Ctrl-C; what was saved until here stays\n"


def test_options_are_left_to_hydra(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["generating", "--cfg", "job", "temperature=0.25"])
    run_as_main("llm.generating")
    assert "temperature: 0.25" in capsys.readouterr().out
