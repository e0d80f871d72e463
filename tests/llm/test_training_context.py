"""Context-parallel runs under torchrun, as a user starts them: trained as one device, validated, sampled, predicted."""

import json

import pytest

from configs.loader import compose_config
from llm.args import TrainConfig
from llm.training import train
from tests.llm.test_training_ranks import losses, start
from tests.llm.test_training_tensor import validation
from tests.tolerances import FP32_GRADIENT

pytestmark = [pytest.mark.dist, pytest.mark.slow]
RING = ("parallel.cp_mode=ring", "model.attention=eager")


@pytest.mark.parametrize("settings", [RING, ("parallel.cp_mode=ulysses", "compile=block"), (*RING, "compile=block")])
def test_two_ranks_that_share_each_sequence_train_as_one_device(tiny_corpus, tmp_path, settings):
    overrides = [*tiny_corpus.overrides(tmp_path), "data.document_masking=true"]
    train(compose_config(TrainConfig, "training", [*overrides, "name=one"]))
    process = start(overrides, "name=two", "parallel.cp=2", *settings)
    _, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(one) == 6 and two == pytest.approx(one, rel=10 * FP32_GRADIENT)
    assert validation(tmp_path / "two") == pytest.approx(validation(tmp_path / "one"), rel=10 * FP32_GRADIENT)
    samples = [(tmp_path / name / "samples.txt").read_text().splitlines()[1:] for name in ("one", "two")]
    assert samples[0] == samples[1]  # but for the first line, which has the time
    report = json.loads((tmp_path / "two" / "report.json").read_text())
    predicted, measured = (report[kind]["communication"] for kind in ("predicted", "measured"))
    assert predicted.keys() == {"cp", "dp_cp"}
    assert {axis: measured[axis]["bytes"] for axis in measured} == {
        axis: predicted[axis]["bytes"] for axis in predicted
    }
    # The checkpoint goes on as data parallel.
    process = start(overrides, "name=two", "max_steps=8", "parallel.cp=1", "parallel.dp=2")
    _, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    assert len(losses(tmp_path / "two")) == 8
