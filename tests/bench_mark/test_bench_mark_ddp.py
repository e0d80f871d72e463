"""The peak memory predicted of bench_mark_ddp's contestants, against live tensors of gloo ranks."""

import pytest

from bench_mark.bench_mark_ddp_contestants import build
from bench_mark.bench_mark_ddp_measure import prepare
from bench_mark.bench_mark_ddp_prediction import peak_bytes
from bench_mark.bench_mark_fsdp_contestants import Setup
from llm.args import KernelsConfig, ModelConfig
from llm.cost_model import Workload
from tests.parallel.pool import pool_of
from tests.tolerances import MEMORY_RATIO

MODEL = ModelConfig(vocab_size=64, max_seq_len=16, d_model=64, num_layers=16, num_heads=4, d_ff=256, attention="eager")


def predicted_and_measured(mesh, names):
    """Of each contestant on this rank; few tokens and no moments, so that buckets are the peak."""
    setup, found = Setup(Workload(MODEL, 2, 16, optimizer="sgd"), mesh, KernelsConfig(), optimizer="sgd"), {}
    for name in names:
        contestant = prepare(lambda name=name: build(name, setup), mesh, warmup=1)
        found[name] = peak_bytes(contestant, setup), contestant.peak_bytes
    return found


@pytest.mark.dist
def test_every_contestants_peak_matches_live_tensors():
    names = ("bare", "naive", "bucketed-1", "bucketed-100", "bucketed-1-bf16", "peer-1", "peer-100", "peer-1-bf16")
    for found in pool_of(2).run(predicted_and_measured, (*names, "torch-25")):
        assert found.pop("torch-25")[0] is None
        for name, (predicted, measured) in found.items():
            assert measured == pytest.approx(predicted, rel=MEMORY_RATIO), name
        assert found["bucketed-100"][1] > 1.1 * found["bare"][1]
