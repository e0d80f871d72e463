"""The paired bootstrap: against a formula, against the truth over many draws, and on two trained runs."""

import json
import math

import numpy as np
import pytest

from configs.errors import UserError
from configs.loader import compose_config
from llm.args import TrainConfig
from llm.evaluating_compare import CompareConfig, run_comparison
from llm.evaluation_compare import BootstrapConfig, Units, compare, draw_sums, make_units, pair_units
from llm.evaluation_text import Text
from llm.evaluation_windows import ScoredText
from llm.training import train
from tests.tolerances import BOOTSTRAP_COVERAGE, BOOTSTRAP_SPREAD

LN2 = math.log(2)


def scored(source: str, name: str, nats: float, num_bytes: int = 8) -> ScoredText:
    text = Text(source, name, "x" * num_bytes)
    return ScoredText(text, np.zeros(1), np.array([nats]), np.array([nats / 2, nats / 2]), np.array([4, num_bytes - 4]))


def noisy_units(generator, n: int, gap: float) -> Units:
    """Units whose difficulty varies much more between units than between the two models."""
    num_bytes = generator.integers(100, 1000, n).astype(float)
    hard = num_bytes * generator.uniform(0.5, 3.0, n)
    return Units(hard, hard + num_bytes * (gap + generator.normal(0, 0.05, n)) * LN2, num_bytes, "document")


def test_the_spread_of_the_draws_is_that_of_a_ratio_estimate():
    """The linearised variance of sum(d) / sum(b) over n independent units, Cochran 1977, section 6.4."""
    units = noisy_units(np.random.default_rng(0), 400, gap=0.01)
    draws = draw_sums(units, 4000, np.random.default_rng(1))
    ratios = draws[:, 0] / draws[:, 1]
    ratio = units.difference_bits.sum() / units.num_bytes.sum()
    residuals = units.difference_bits - ratio * units.num_bytes
    expected = math.sqrt((residuals**2).sum()) / units.num_bytes.sum()
    assert ratios.std() == pytest.approx(expected, rel=BOOTSTRAP_SPREAD)
    assert ratios.mean() == pytest.approx(ratio, abs=expected)


def test_the_interval_holds_the_true_gap_as_often_as_it_says():
    generator = np.random.default_rng(2)
    held = 0
    for seed in range(200):
        (line,) = compare({"a": noisy_units(generator, 100, gap=-0.02)}, BootstrapConfig(samples=400, seed=seed))
        held += line.low <= 0.02 <= line.high
    assert held / 200 == pytest.approx(0.95, abs=BOOTSTRAP_COVERAGE)


@pytest.mark.parametrize("confidence", [0.5, 0.95])
def test_as_many_draws_lie_outside_the_interval_on_either_side(confidence):
    units = noisy_units(np.random.default_rng(4), 100, gap=0.0)
    (line,) = compare({"a": units}, BootstrapConfig(samples=2000, confidence=confidence, seed=5))
    draws = draw_sums(units, 2000, np.random.default_rng(5))
    ratios = draws[:, 0] / draws[:, 1]
    outside = (1 - confidence) / 2
    assert (ratios < line.low).mean() == pytest.approx(outside, abs=1 / 2000)
    assert (ratios > line.high).mean() == pytest.approx(outside, abs=1 / 2000)


def test_pairing_sees_a_gap_that_is_small_beside_the_spread_of_the_units():
    units = noisy_units(np.random.default_rng(3), 100, gap=0.05)
    (line,) = compare({"a": units}, BootstrapConfig(samples=2000))
    alone = units.first / LN2 / units.num_bytes
    assert alone.std() / math.sqrt(100) > line.high - line.low, "unpaired, the spread of one model alone is larger"
    assert line.better == "first" and line.difference == pytest.approx(-0.05, abs=0.02)
    swapped = Units(units.second, units.first, units.num_bytes, "document")
    assert compare({"a": swapped}, BootstrapConfig(samples=2000))[0].better == "second"
    same = Units(units.first, units.first, units.num_bytes, "document")
    assert compare({"a": same}, BootstrapConfig(samples=100))[0].better == "undecided"


def test_all_sources_together_weigh_by_bytes():
    units = {
        "a": Units(np.array([8.0]) * LN2, np.array([16.0]) * LN2, np.array([8.0]), "block"),
        "b": Units(np.full(8, 4.0) * LN2, np.full(8, 2.0) * LN2, np.full(8, 2.0), "document"),
    }
    a, b, total = compare(units, BootstrapConfig(samples=50))
    assert (a.first, a.second, a.difference, a.low, a.high) == (1.0, 2.0, -1.0, None, None) and a.better == "undecided"
    assert (b.first, b.second, b.low, b.high, b.better) == (2.0, 1.0, 1.0, 1.0, "second")
    assert total.source == "all" and total.num_bytes == 24 and total.first == pytest.approx(40 / 24)
    assert total.difference == pytest.approx((-8 + 16) / 24) and total.low == total.high == pytest.approx(8 / 24)


def test_units_are_documents_or_blocks():
    few = [(scored("a", str(i), 4.0), scored("a", str(i), 6.0)) for i in range(3)]
    blocks = make_units(few, "auto")
    assert blocks.kind == "block" and blocks.first.tolist() == [2.0] * 6 and blocks.second.tolist() == [3.0] * 6
    assert make_units(few, "document").first.tolist() == [4.0] * 3
    assert make_units(few * 7, "auto").kind == "document"
    assert make_units(few, "block").num_bytes.sum() == make_units(few, "document").num_bytes.sum() == 24
    with pytest.raises(AssertionError, match="is paired with"):
        pair_units([scored("a", "1", 1.0)], [scored("a", "2", 1.0)], "auto")


@pytest.fixture(scope="module")
def runs(tiny_corpus, tmp_path_factory):
    """A run of 30 steps, its checkpoint after one step beside it."""
    root = tmp_path_factory.mktemp("runs")
    for name, steps in (("early", 1), ("late", 30)):
        overrides = [*tiny_corpus.overrides(root), f"name={name}", f"max_steps={steps}", "log_every=10"]
        train(compose_config(TrainConfig, "training", overrides))
    return root


def test_a_trained_model_beats_an_untrained_one_by_the_script(runs, tmp_path, capsys):
    sentences = [{"source": f"s{i % 2}", "text": f"The cat number {i} ran home and ate."} for i in range(60)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in sentences))
    config = dict(second=str(runs / "early"), text=str(tmp_path / "t.jsonl"), device="cpu", samples=500)
    lines = run_comparison(CompareConfig(str(runs / "late"), **config, output=str(tmp_path / "out.json")))
    assert [line.source for line in lines] == ["s0", "s1", "all"] and {line.better for line in lines} == {"first"}
    assert all(line.unit == "document" and line.low < line.difference < line.high < 0 for line in lines)
    written = json.loads((tmp_path / "out.json").read_text())["sources"]
    assert written[0]["difference"] == lines[0].difference and f"{lines[0].difference:+.4f}" in capsys.readouterr().out
    with pytest.raises(UserError, match="name two checkpoints"):
        CompareConfig("runs/a", "runs/a", "x")
    with pytest.raises(UserError, match="must lie between 0 and 1"):
        CompareConfig("runs/a", "runs/b", "x", confidence=1.5)
