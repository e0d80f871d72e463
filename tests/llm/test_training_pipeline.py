"""Pipeline-parallel runs under torchrun: trained as one device, validated, sampled, continued on another layout."""

import json

import pytest

from configs.loader import compose_config
from configs.run_dir import read_jsonl
from llm.args import TrainConfig
from llm.training import train
from tests.llm.test_training_ranks import losses, start
from tests.tolerances import FP32_GRADIENT, MEMORY_RATIO

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def validation(run):
    return [line["val_loss"] for line in read_jsonl(run / "metrics.jsonl") if "val_loss" in line]


@pytest.mark.parametrize("settings", [(), ("parallel.pp_schedule=zero_bubble", "model.tie_embeddings=true")])
def test_two_ranks_that_hold_half_the_layers_each_train_as_one_device(tiny_corpus, tmp_path, settings):
    overrides = [*tiny_corpus.overrides(tmp_path), *(s for s in settings if s.startswith("model"))]
    train(compose_config(TrainConfig, "training", [*overrides, "name=one"]))
    process = start(overrides, "name=two", "parallel.pp=2", *settings)
    _, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(one) == 6 and two == pytest.approx(one, rel=10 * FP32_GRADIENT)
    assert validation(tmp_path / "two") == pytest.approx(validation(tmp_path / "one"), rel=10 * FP32_GRADIENT)
    one, two = ((tmp_path / name / "samples.txt").read_bytes().split(b"\n", 1)[1] for name in ("one", "two"))
    assert one == two  # but for the time of day in their first line
    report = json.loads((tmp_path / "two" / "report.json").read_text())
    predicted, measured = (report[kind]["communication"] for kind in ("predicted", "measured"))
    assert predicted.keys() == {"pp"} and measured["pp"]["bytes"] == predicted["pp"]["bytes"]
    rows = {row["quantity"]: row for row in report["rows"]}
    assert rows["parameters"]["ratio"] == 1 and rows["peak memory"]["ratio"] == pytest.approx(1, rel=MEMORY_RATIO)
    assert (
        0 < rows["waiting for other stages"]["predicted"] < 1 and 0 < rows["waiting for other stages"]["measured"] < 1
    )
    assert report["predicted"]["step_s"] > 0 and "<h2>Pipeline</h2>" in (tmp_path / "two" / "report.html").read_text()
    # Its checkpoint continues on another layout.
    process = start(overrides, "name=two", "max_steps=8", "parallel.dp=2")
    _, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    assert len(losses(tmp_path / "two")) == 8


def test_stages_whose_blocks_are_sharded_train_as_one_device_and_go_on_elsewhere(tiny_corpus, tmp_path):
    overrides = [*tiny_corpus.overrides(tmp_path), "model.num_layers=4", "model.tie_embeddings=true"]
    overrides += ["micro_batch_size=2"]
    train(compose_config(TrainConfig, "training", [*overrides, "name=one"]))
    process = start(overrides, "name=four", "parallel.pp=2", "parallel.zero=3", ranks=4)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    one, four = losses(tmp_path / "one"), losses(tmp_path / "four")
    assert len(one) == 6 and four == pytest.approx(one, rel=10 * FP32_GRADIENT)
    assert validation(tmp_path / "four") == pytest.approx(validation(tmp_path / "one"), rel=10 * FP32_GRADIENT)
    report = json.loads((tmp_path / "four" / "report.json").read_text())
    rows = {row["quantity"]: row for row in report["rows"]}
    assert rows["sent over dp_shard_cp"]["ratio"] == 1 and rows["sent over pp"]["ratio"] == 1
    assert rows["peak memory"]["ratio"] == pytest.approx(1, rel=MEMORY_RATIO)
    process = start(overrides, "name=four", "max_steps=8", "parallel.zero=2")
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert len(losses(tmp_path / "four")) == 8
