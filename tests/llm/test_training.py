"""The main job: exact resume, any number of ranks, signals, and what a user can get wrong."""

import json
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from configs.errors import UserError
from configs.loader import compose_config
from configs.run_dir import read_jsonl
from llm.args import TrainConfig
from llm.checkpoint import load_checkpoint
from llm.training import train
from llm.training_setup import set_up
from parallel.mesh import init_mesh
from tests.conftest import ROOT
from tests.tolerances import FP32_GRADIENT, INITIAL_LOSS


@pytest.fixture
def overrides(tiny_corpus, tmp_path):
    return tiny_corpus.overrides(tmp_path)


def configure(overrides: list[str], *more: str) -> TrainConfig:
    return compose_config(TrainConfig, "training", [*overrides, *more])


def losses(run: Path) -> dict[int, tuple[float, float]]:
    """Step -> (loss, gradient norm), as logged."""
    lines = [line for line in read_jsonl(run / "metrics.jsonl") if "loss" in line]
    assert len({line["step"] for line in lines}) == len(lines), "a step stands in metrics.jsonl twice"
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines}


def run_script(overrides: list[str], *more: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen:
    command = [sys.executable, *launcher, "-m", "llm.training", *overrides, *more]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_a_run_learns_and_leaves_its_record(overrides, tmp_path):
    report = train(configure(overrides, "max_steps=30", "log_every=10", "validate_every=15"))
    run = tmp_path / "tiny"
    first = losses(run)[10][0]
    assert losses(run)[30][0] < first < math.log(320)
    assert report == json.loads((run / "report.json").read_text())
    assert report["state"] == "finished" and report["validation"]["step"] == 30
    rows = {row["quantity"]: row for row in report["rows"]}
    assert rows["parameters"]["ratio"] == 1.0
    assert rows["peak memory"]["measured"] > 0 and rows["step time"]["measured"] > 0
    assert {p.name for p in run.iterdir()} >= {"config.yaml", "metrics.jsonl", "report.html", "samples.txt"}
    state = load_checkpoint(run / "checkpoints" / "step_00000030")[1]
    assert state["step"] == 30 and state["tokens_seen"] == 30 * 256 and state["data"]["next_batch"] == 30


def test_the_prediction_is_written_before_the_first_step(overrides, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("llm.training_loop.run_steps", stop)
    with pytest.raises(KeyboardInterrupt):
        train(configure(overrides))
    report = json.loads((tmp_path / "tiny" / "report.json").read_text())
    assert report["predicted"]["memory_peak_bytes"] > 0 and report["predicted"]["step_s"] > 0
    assert report["measured"] == {} and report["state"] == "running"


def test_the_first_loss_is_that_of_a_fresh_model(overrides, tmp_path):
    train(configure(overrides, "max_steps=1"))
    assert losses(tmp_path / "tiny")[1][0] == pytest.approx(math.log(320) + 0.0002 * 32, rel=INITIAL_LOSS)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_three_steps_save_load_three_are_six_bit_for_bit(overrides, tmp_path, optimizer):
    changes = [f"optimizer={optimizer}", "optimizer.lr=0.01", "data.order=epoch"]
    train(configure(overrides, *changes, "name=whole"))
    whole = losses(tmp_path / "whole")
    first = configure(overrides, *changes, "name=parts", "checkpoint.every_steps=3")
    trainer = stopped_after(first, steps=3)
    train(first)
    assert losses(tmp_path / "parts") == whole and len(whole) == 6
    ends = [load_checkpoint(tmp_path / name / "checkpoints" / "step_00000006")[0] for name in ("whole", "parts")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0]) and len(ends[0]) > 40
    resumed = set_up(first, init_mesh("cpu"))
    assert resumed.step == 6
    resumed.step = 3  # the next three batches of the resumed run are those of the stopped one
    for _ in range(3):
        ids = [torch.cat([batch.token_ids for batch in t.micro_batches()]) for t in (trainer, resumed)]
        assert torch.equal(*ids)
        trainer.step, resumed.step = trainer.step + 1, resumed.step + 1


def stopped_after(config: TrainConfig, steps: int):
    """Run a config until a stop signal arrives after `steps` steps; returns the trainer as it was then."""
    from llm import training_loop

    class Stop:
        def __init__(self):
            self.trainer = None

        @property
        def requested(self):
            return signal.SIGTERM if self.trainer.step == steps else None

    stop = Stop()
    stop.trainer = set_up(config, init_mesh("cpu"))
    stop.trainer.record.open(0, *training_loop.predict(stop.trainer))
    assert training_loop.run_steps(stop.trainer, stop) == "stopped"
    return stop.trainer


def test_micro_batches_do_not_change_the_step(overrides, tmp_path):
    train(configure(overrides, "name=one", "micro_batch_size=8"))
    train(configure(overrides, "name=four", "micro_batch_size=2"))
    one, four = losses(tmp_path / "one"), losses(tmp_path / "four")
    for step in one:
        assert four[step] == pytest.approx(one[step], rel=FP32_GRADIENT)


@pytest.mark.dist
def test_two_ranks_under_torchrun_train_as_one(overrides, tmp_path):
    train(configure(overrides, "name=one", "data.document_masking=true"))
    launcher = (
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
    )
    process = run_script(overrides, "name=two", "data.document_masking=true", launcher=launcher)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    for step in one:
        assert two[step] == pytest.approx(one[step], rel=10 * FP32_GRADIENT)
    assert out.count("predicted and measured") == 1, "rank 0 alone speaks"
    validations = [json.loads((tmp_path / name / "report.json").read_text())["validation"] for name in ("one", "two")]
    assert validations[1]["loss"] == pytest.approx(validations[0]["loss"], rel=10 * FP32_GRADIENT)
    lines = read_jsonl(tmp_path / "two" / "comm.jsonl")
    gradients = sum(line["bytes"] for line in lines if line["step"] == 3 and line["dtype"] == "float32")
    parameters = json.loads((tmp_path / "two" / "report.json").read_text())["predicted"]["parameters"]
    tensors = 2 + 2 * 9  # embedding (tied) and last norm; two norms and seven matrices a block
    assert gradients == 4 * (parameters + tensors) + 2 * 4, "buckets with their flags, and the two logged loss sums"
    report = json.loads((tmp_path / "two" / "report.json").read_text())
    (row,) = [row for row in report["rows"] if row["quantity"] == "sent over dp_cp"]
    assert row["ratio"] == 1.0 and row["measured"] == 4 * (parameters + tensors) + 2 * 3 * 8
    seen = report["measured"]["communication"]["dp_cp"]
    assert 0 < seen["exposed_seconds"] <= seen["seconds"]
    assert {line["phase"] for line in lines} == {"step", "other"}


def test_sigterm_saves_and_exits_with_zero(overrides, tmp_path):
    process = run_script(overrides, "max_steps=100000", "checkpoint.every_steps=100000", "log_every=5")
    metrics = tmp_path / "tiny" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    (checkpoint,) = (tmp_path / "tiny" / "checkpoints").glob("step_*")
    assert f"saved at step {int(checkpoint.name[5:])}" in out
    assert json.loads((tmp_path / "tiny" / "report.json").read_text())["state"] == "stopped"


def test_a_time_limit_stops_whole_and_the_same_command_goes_on(overrides, tmp_path):
    report = train(configure(overrides, "max_time_s=0"))
    assert report["state"] == "stopped" and not losses(tmp_path / "tiny")
    report = train(configure(overrides))
    assert report["state"] == "finished" and len(losses(tmp_path / "tiny")) == 6


def test_a_damaged_newest_checkpoint_is_passed_over(overrides, tmp_path, capsys):
    train(configure(overrides, "checkpoint.every_steps=3"))
    whole = losses(tmp_path / "tiny")
    newest = tmp_path / "tiny" / "checkpoints" / "step_00000006" / "model_00000.safetensors"
    newest.write_bytes(newest.read_bytes()[:-7])
    train(configure(overrides, "checkpoint.every_steps=3"))
    output = capsys.readouterr()
    assert "step_00000006 is damaged" in output.err and "step_00000003" in output.out
    assert losses(tmp_path / "tiny") == whole


def test_a_gradient_that_is_not_finite_updates_nothing(overrides, tmp_path):
    trainer = set_up(configure(overrides), init_mesh("cpu"))
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    step = trainer.training_step
    real, step.forward_loss = step.forward_loss, lambda batch: type(s := real(batch))(s.loss_sum * math.nan, *s[1:])
    result = step.run(0, trainer.micro_batches())
    assert result.skipped and not trainer.optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    with pytest.raises(UserError, match="not finite for 10 steps"):
        for number in range(1, 10):
            step.run(number, trainer.micro_batches())
    step.bad_steps, step.forward_loss = 0, real
    assert not step.run(0, trainer.micro_batches()).skipped
    trainer.loader.close()


def test_clipping_bounds_the_update_and_logs_the_norm_before(overrides, tmp_path):
    train(configure(overrides, "name=clipped", "optimizer=sgd", "optimizer.lr=1.0", "optimizer.clip_norm=0.01"))
    train(configure(overrides, "name=free", "optimizer=sgd", "optimizer.lr=1.0", "optimizer.clip_norm=null"))
    clipped, free = losses(tmp_path / "clipped"), losses(tmp_path / "free")
    assert clipped[1] == free[1] and clipped[1][1] > 0.1
    assert abs(clipped[6][0] - clipped[1][0]) < 0.1 * abs(free[6][0] - free[1][0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("global_batch_tokens=300", "must be a multiple of"),
        ("data.seq_len=64", "must not exceed model.max_seq_len=32"),
        ("model.num_kv_heads=3", "must divide num_heads=4"),
        ("model.vocab_size=100", "smaller than the tokenizer"),
        ("optimizer.lr=fast", "optimizer.lr"),
        ("+model.depth=3", "model.depth"),
        ("parallel.dp=2", "must equal the world size 1"),
        ("hardware=h200", "is a GPU"),
        ("+data.weights.stories=-1", "the sources are"),
        ("checkpoint.keep_last=0", "must be positive"),
    ],
)
def test_a_wrong_value_is_one_clear_error(overrides, change, words):
    with pytest.raises(UserError, match=words) as caught:
        set_up(configure(overrides, change), init_mesh("cpu"))
    assert "\n" not in str(caught.value)


def test_a_user_error_is_one_line_and_exit_code_2(overrides, tmp_path):
    process = run_script(overrides, "data.tokens=/nowhere")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.startswith("error: data.tokens=/nowhere holds no meta.json") and err.count("\n") == 1
    assert not (tmp_path / "tiny").exists()


def test_an_unknown_key_on_the_command_line_is_refused(overrides):
    process = run_script(overrides, "model.d_modell=64")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and err.count("\n") == 1
    assert err.startswith("error: model.d_modell=64: ") and "did you mean model.d_model?" in err


def test_resume_none_does_not_touch_a_run_that_has_checkpoints(overrides, tmp_path):
    train(configure(overrides))
    record = (tmp_path / "tiny" / "metrics.jsonl").read_text()
    with pytest.raises(UserError, match="use another name"):
        train(configure(overrides, "resume=none"))
    assert (tmp_path / "tiny" / "metrics.jsonl").read_text() == record


def test_another_model_shape_does_not_resume(overrides):
    train(configure(overrides))
    with pytest.raises(UserError, match="does not fit the model"):
        train(configure(overrides, "model.d_ff=64"))


EXPERIMENTS = sorted(path.stem for path in (ROOT / "configs/experiment").glob("*.yaml"))


@pytest.mark.parametrize("experiment", [name for name in EXPERIMENTS if not re.search("(^|_)(sft|rl)(_|$)", name)])
def test_every_experiment_composes_and_fills_its_batch(experiment):
    config = compose_config(TrainConfig, "training", [f"experiment={experiment}"])
    assert config.name == experiment, "_self_ must stand before experiment, or its scalars are lost"
    assert config.grad_accum_steps(1) >= 1
