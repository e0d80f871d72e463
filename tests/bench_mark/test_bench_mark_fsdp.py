"""The peak memory and bytes predicted of bench_mark_fsdp's contestants, against live tensors and logs of gloo ranks."""

import pytest

from bench_mark.bench_mark_ddp_measure import prepare
from bench_mark.bench_mark_fsdp_contestants import Setup, build
from bench_mark.bench_mark_fsdp_predictions import share_of
from llm.args import KernelsConfig, ModelConfig
from llm.cost_model import Workload
from llm.plan_memory import rank_memory
from parallel.cost_model_traffic import step_messages
from parallel.mesh_degrees import Degrees
from tests.parallel.pool import pool_of
from tests.tolerances import MEMORY_RATIO

MODEL = ModelConfig(vocab_size=64, max_seq_len=16, d_model=64, num_layers=16, num_heads=4, d_ff=256, attention="eager")
DEGREES = Degrees(dp_shard=None).resolve(2)


def predicted_and_measured(mesh, names, rows, dtype):
    """Peak bytes and bytes sent, predicted and measured, of each contestant on this rank."""
    work = Workload(MODEL, rows, 16, dtype=dtype, optimizer="sgd")
    setup, found = Setup(work, mesh, KernelsConfig(), optimizer="sgd"), {}
    for name in names:
        contestant = prepare(lambda name=name: build(name, setup), mesh, warmup=1)
        mesh.log.drain(0)
        contestant.step()
        sent = sum(line["bytes"] for line in mesh.log.drain(0))
        share = share_of(contestant, setup)
        said = sum(message.nbytes for message in step_messages(share[1], share[2]))
        found[name] = (rank_memory(*share).peak_bytes, contestant.peak_bytes), (said, sent)
    return found


def check(names, rows, dtype):
    ranks = pool_of(2).run(predicted_and_measured, names, rows, dtype, degrees=DEGREES)
    for found in ranks:
        for name, (peak, sent) in found.items():
            assert peak[1] == pytest.approx(peak[0], rel=MEMORY_RATIO), name
            assert sent[1] == sent[0], name
    return ranks[0]


@pytest.mark.dist
def test_zero1_at_its_last_message_and_with_buckets_that_others_read():
    """One message of three quarters of the gradients: beside it lie what it was made from and the one before."""
    found = check(("zero1", "zero1-peer"), 2, "float32")
    assert found["zero1-peer"][0][1] > 1.1 * found["zero1"][0][1]


@pytest.mark.dist
def test_a_norm_gathered_in_bfloat16_spares_the_casts_of_what_reads_it():
    (whole, _), (cast, _) = check(("zero3", "zero3-all"), 32, "bfloat16").values()
    predicted, measured = whole[0] - cast[0], whole[1] - cast[1]
    assert measured == pytest.approx(predicted, rel=MEMORY_RATIO)
    assert predicted > 3 * MODEL.num_layers * 32 * 16 * MODEL.d_model * 2  # three copies of each block's inputs
