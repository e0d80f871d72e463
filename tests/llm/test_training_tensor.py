"""Tensor-parallel runs under torchrun, as a user starts them: trained as one device, validated, sampled, predicted."""

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


@pytest.mark.parametrize("settings", [("parallel.tp_chunks=2",), ("parallel.sequence_parallel=false",)])
def test_two_ranks_that_share_each_layer_train_as_one_device(tiny_corpus, tmp_path, settings):
    overrides = tiny_corpus.overrides(tmp_path)
    train(compose_config(TrainConfig, "training", [*overrides, "name=one"]))
    process = start(overrides, "name=two", "parallel.tp=2", *settings)
    _, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(one) == 6 and two == pytest.approx(one, rel=10 * FP32_GRADIENT)
    assert validation(tmp_path / "two") == pytest.approx(validation(tmp_path / "one"), rel=10 * FP32_GRADIENT)
    one, two = ((tmp_path / name / "samples.txt").read_bytes().split(b"\n", 1)[1] for name in ("one", "two"))
    assert one == two  # but for the time of day in their first line
    report = json.loads((tmp_path / "two" / "report.json").read_text())
    predicted, measured = (report[kind]["communication"] for kind in ("predicted", "measured"))
    assert predicted.keys() == {"tp"} and measured["tp"]["bytes"] == predicted["tp"]["bytes"]
    rows = {row["quantity"]: row for row in report["rows"]}
    assert rows["parameters"]["ratio"] == 1 and rows["peak memory"]["ratio"] == pytest.approx(1, rel=MEMORY_RATIO)
    assert report["predicted"]["step_s"] > rows["exposed (tp)"]["predicted"] > 0
    process = start(
        overrides, "name=two", "max_steps=8", "parallel.tp=1", "parallel.dp=2"
    )  # continues on another layout
    _, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    assert len(losses(tmp_path / "two")) == 8
