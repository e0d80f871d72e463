"""Runs on two ranks under torchrun, as a user starts them: every ZeRO stage trains as one device, a death is told."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from configs.loader import compose_config
from configs.run_dir import read_jsonl
from llm.args import TrainConfig
from llm.training import train
from tests.conftest import ROOT
from tests.tolerances import FP32_GRADIENT

pytestmark = [pytest.mark.dist, pytest.mark.slow]
TORCHRUN = ["-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]


def start(overrides: list[str], *changes: str, ranks: int = 2) -> subprocess.Popen:
    command = [sys.executable, *TORCHRUN, f"--nproc-per-node={ranks}", "-m", "llm.training", *overrides, *changes]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_jsonl(run / "metrics.jsonl") if "loss" in line}


LAYOUTS = [["zero=0"], ["zero=1"], ["zero=2"], ["zero=3"], ["transport=peer"], ["zero=1", "transport=peer"]]


@pytest.mark.parametrize("layout", LAYOUTS, ids=",".join)
def test_every_stage_trains_as_one_device(tiny_corpus, tmp_path, layout):
    overrides = tiny_corpus.overrides(tmp_path)
    train(compose_config(TrainConfig, "training", [*overrides, "name=one"]))
    changes = [f"parallel.{setting}" for setting in layout]
    process = start(overrides, "name=two", *changes, "validation_tokens=96")  # three windows: uneven
    _, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(one) == 6 and two == pytest.approx(one, rel=10 * FP32_GRADIENT)
    assert (tmp_path / "two" / "samples.txt").exists()


def ranks_of(process: subprocess.Popen) -> list[int]:
    """Process ids of the ranks that a torchrun started, by LOCAL_RANK."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == process.pid:
                variables = dict(v.split("=", 1) for v in (entry / "environ").read_text().split("\0") if "=" in v)
                found[int(variables["LOCAL_RANK"])] = int(entry.name)
        except (OSError, ValueError, KeyError, IndexError):
            continue  # no process, or one that has just gone
    return [found[rank] for rank in sorted(found)]


def test_a_killed_rank_ends_the_run_and_is_named(tiny_corpus, tmp_path):
    process = start(tiny_corpus.overrides(tmp_path), "max_steps=1000000", "checkpoint.every_steps=1000000")
    metrics = tmp_path / "tiny" / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not metrics.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    _, err = process.communicate(timeout=90)
    assert process.returncode != 0
    assert "missing: rank 1 (no answer: it is dead, or cut off)" in err
