"""The peak memory that bench_mark_tp predicts of its contestants, against live tensors of gloo ranks."""

import pytest

from bench_mark.bench_mark_tp import look_at_memory
from bench_mark.bench_mark_tp_contestants import Setup, build
from bench_mark.bench_mark_tp_predictions import peak_bytes, work_of
from llm.args import ModelConfig
from llm.plan_shapes import meta_params
from parallel.mesh_degrees import Degrees
from tests.parallel.pool import pool_of
from tests.tolerances import MEMORY_RATIO

MODEL = ModelConfig(
    vocab_size=64, max_seq_len=64, d_model=96, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=160, attention="eager"
)
NAMES = ("alone", "bare", "tp", "tp+sp", "tp+sp 2 chunks")


def predicted_and_measured(mesh, dtype):
    """Of each contestant on this rank."""
    setup, found = Setup(MODEL, 128, 16, mesh, dtype, compile=False), {}
    for name in NAMES:
        contestant = build(name, setup)
        look_at_memory(contestant, mesh)
        work = work_of(name, setup, meta_params(MODEL), mesh.device.type)
        found[name] = peak_bytes(work, setup), contestant.peak_bytes
    return found


@pytest.mark.dist
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_contestants_peak_matches_live_tensors(dtype):
    for found in pool_of(2).run(predicted_and_measured, dtype, degrees=Degrees(dp=1, tp=2)):
        for name, (predicted, measured) in found.items():
            assert measured == pytest.approx(predicted, rel=MEMORY_RATIO), name
