"""A law is found again in points made from it; runs are read as they are; what cannot be fitted is refused."""

import json

import numpy as np
import pytest
import yaml

from configs.errors import UserError
from configs.loader import compose_config, config_to_yaml
from llm.args import ModelConfig, TrainConfig
from llm.scaling_laws import ScalingConfig, fit_runs
from llm.scaling_laws_fit import Point, ScalingLaw, fit, fit_law, held_out
from llm.scaling_laws_points import counted_parameters, expand_runs, read_points
from tests.tolerances import SCALING_FIT, SCALING_FIT_NOISY

LAW = ScalingLaw(E=1.8, A=210.0, alpha=0.45, B=560.0, beta=0.40)
SIZES = (1e5, 3e5, 1e6, 3e6, 1e7)


def points_of(law: ScalingLaw, noise: float = 0.0, seed: int = 0) -> list[Point]:
    generator = np.random.default_rng(seed)
    tokens = np.geomspace(1e6, 2e7, 8)
    return [
        Point(f"n{size:.0e}", size, t, float(law.loss(size, t) * np.exp(generator.normal(0, noise))))
        for size in SIZES
        for t in tokens
    ]


@pytest.mark.parametrize("law", [LAW, ScalingLaw(1.69, 406.4, 0.34, 410.7, 0.28)])
def test_the_law_is_found_again_in_its_own_points(law):
    found = fit_law(points_of(law))
    for name in ("E", "A", "alpha", "B", "beta"):
        assert getattr(found, name) == pytest.approx(getattr(law, name), rel=SCALING_FIT), name


def test_noise_and_an_outlier_move_it_little_and_the_largest_run_is_predicted():
    points = points_of(LAW, noise=0.002)
    points[3] = Point(points[3].run, points[3].parameters, points[3].tokens, points[3].loss * 1.3)
    found = fit(points)
    assert found.law.alpha == pytest.approx(LAW.alpha, abs=SCALING_FIT_NOISY)
    assert found.law.beta == pytest.approx(LAW.beta, abs=SCALING_FIT_NOISY)
    assert np.abs(found.errors).argmax() == 3 and len(found.without) == len(SIZES)
    low, high = found.spread("alpha")
    assert low <= found.law.alpha <= high
    told = held_out(found)
    assert told.point.parameters == max(SIZES) and told.point.tokens == 2e7
    assert told.ratio == pytest.approx(1.0, abs=0.01) and told.predicted != found.law.loss(1e7, 2e7)


def test_the_best_size_has_the_least_loss_of_its_budget():
    for budget in (1e14, 1e17):
        sizes = np.geomspace(1e4, 1e9, 20_001)
        losses = LAW.loss(sizes, budget / 6 / sizes)
        assert LAW.best_parameters(budget) == pytest.approx(sizes[losses.argmin()], rel=1e-3)


def test_counted_parameters_leave_out_an_input_table_of_its_own():
    shape = dict(vocab_size=100, d_model=16, num_layers=1, num_heads=2, d_ff=24)
    tied, untied = (counted_parameters(ModelConfig(**shape, tie_embeddings=tie)) for tie in (True, False))
    blocks = 4 * 16 * 16 + 3 * 16 * 24 + 2 * 16 + 16
    assert tied == untied == blocks + 100 * 16


def write_run(directory, d_model: int, law: ScalingLaw, **overrides):
    config = compose_config(
        TrainConfig, "training", [f"name={directory.name}", "data.tokens=t", "data.tokenizer=k", "data.seq_len=32",
                                  "model.vocab_size=64", "model.num_heads=2", f"model.d_model={d_model}"]
    )  # fmt: skip
    directory.mkdir(parents=True)
    content = yaml.safe_load(config_to_yaml(config)) | overrides
    (directory / "config.yaml").write_text(yaml.safe_dump(content))
    parameters = counted_parameters(config.model)
    lines = [{"step": 5, "loss": 9.0}]
    for step in range(100, 700, 100):
        loss = float(law.loss(parameters, step * config.global_batch_tokens))
        lines.append({"step": step, "val_loss": loss, "val_bits_per_byte": loss / 2})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_script_reads_runs_fits_and_draws(tmp_path, capsys):
    for d_model in (16, 32, 64, 128):
        write_run(tmp_path / f"s-{d_model}", d_model, LAW)
    (tmp_path / "s-empty").mkdir()
    config = ScalingConfig([str(tmp_path / "s-*")], min_tokens=1_000_000, budgets=[1e15], output=str(tmp_path / "out"))
    document = fit_runs(config)
    assert document["law"]["alpha"] == pytest.approx(LAW.alpha, rel=0.01)
    assert len(document["points"]) == 4 * 5, "100 steps are 819,200 tokens, below min_tokens"
    assert document["held_out"]["ratio"] == pytest.approx(1.0, abs=1e-3)
    assert json.loads((tmp_path / "out" / "scaling_laws.json").read_text())["law"] == document["law"]
    for suffix, magic in (("png", b"\x89PNG"), ("pdf", b"%PDF")):
        assert (tmp_path / "out" / f"scaling_laws.{suffix}").read_bytes()[:4] == magic
    assert "1.00e+15 FLOPs" in capsys.readouterr().out


def test_runs_that_cannot_be_compared_are_refused(tmp_path):
    write_run(tmp_path / "a", 16, LAW)
    write_run(tmp_path / "b", 32, LAW, validation_tokens=5)
    with pytest.raises(UserError, match="give runs that share them"):
        read_points(expand_runs([str(tmp_path / "*")]), 1)
    with pytest.raises(UserError, match="cannot settle five numbers"):
        fit_runs(ScalingConfig([str(tmp_path / "a")]))
    with pytest.raises(UserError, match="holds no run"):
        expand_runs([str(tmp_path / "z*")])
    with pytest.raises(UserError, match="leaves nothing to fit"):
        ScalingConfig([])
