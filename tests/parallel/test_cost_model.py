"""The cost model against sums written out by hand: collectives, messages, memory and the timeline of their overlap."""

from dataclasses import replace

import pytest

from parallel.cost_model import Cluster, Link, Ring, bandwidth, collective_seconds, kind_of, lost_seconds, moved_bytes
from parallel.cost_model_matrices import matrix_messages, owners_of
from parallel.cost_model_memory import rank_state
from parallel.cost_model_timeline import Compute, step_time, with_packing
from parallel.cost_model_traffic import DataLayout, Param, step_messages, step_traffic

NODE = Cluster(8, Link(100e9, 2e-6), None, 1e-5)
NODES = Cluster(8, Link(100e9, 2e-6), Link(10e9, 1e-5), 1e-5)
# 1,000 elements of embedding, two blocks of 50 x 20 and a vector, an output layer: rows that 3 and 4 do not divide.
PARAMS = [
    Param("embedding.weight", (50, 20), 0, False),
    *(Param(f"blocks.{n}.matrix", (50, 20), n + 1, True) for n in range(2)),
    Param("blocks.1.vector", (20,), 2, True),
    Param("output.weight", (50, 20), 3, False),
]
NUMEL = 4 * 1000 + 20


@pytest.mark.parametrize(
    ("op", "ranks", "share"),
    [
        ("all_reduce_sum", 2, 1.0),
        ("all_reduce_max", 8, 14 / 8),
        ("reduce_scatter_sum", 8, 7 / 8),
        ("all_gather", 4, 3 / 4),
        ("all_to_all", 4, 3 / 4),
        ("broadcast", 4, 1.0),
        ("all_reduce_sum", 1, 0.0),
    ],
)
def test_a_rank_sends_the_ring_s_share_of_the_bytes(op, ranks, share):
    assert moved_bytes(op, 1000.0, ranks) == pytest.approx(1000 * share)


def test_an_operation_without_a_cost_is_refused():
    with pytest.raises(AssertionError, match="no cost is known for the operation 'teleport'"):
        kind_of("teleport")


def test_a_large_collective_takes_its_bytes_over_the_bandwidth_and_a_small_one_its_hops():
    large = collective_seconds("reduce_scatter_sum", 8e9, Ring(8), NODE)
    assert large == pytest.approx(1e-5 + 7 * 2e-6 + 7e9 / 100e9)
    assert collective_seconds("all_gather", 8, Ring(8), NODE) == pytest.approx(1e-5 + 7 * 2e-6, rel=1e-3)
    assert collective_seconds("all_gather", 8e9, Ring(1), NODE) == 0.0
    # An all-reduce of a few bytes goes up and down a tree of three levels instead of 14 hops round the ring.
    assert collective_seconds("all_reduce_sum", 8, Ring(8), NODE) == pytest.approx(1e-5 + 6 * 2e-6, rel=1e-3)
    assert collective_seconds("all_reduce_sum", 8e9, Ring(8), NODE) == pytest.approx(1e-5 + 14 * 2e-6 + 14e9 / 100e9)


def test_between_nodes_every_gpu_of_a_group_brings_its_own_port():
    assert bandwidth(Ring(8), NODES) == 100e9  # within a node
    assert bandwidth(Ring(16), NODES) == 80e9  # eight ports
    assert bandwidth(Ring(64, stride=8), NODES) == 10e9  # one rank a node: nothing passes NVLink
    assert bandwidth(Ring(4, stride=4), NODES) == 20e9  # ranks 0, 4, 8, 12: two a node
    assert bandwidth(Ring(4, stride=2), NODES) == 100e9
    with pytest.raises(AssertionError, match="spans nodes"):
        bandwidth(Ring(16), NODE)


def lines(layout, params=PARAMS):
    return {(t.op, t.axis, t.dtype): (t.ranks, t.calls, t.bytes) for t in step_traffic(params, layout)}


AGREEMENT = {("all_gather", "dp_cp", "int64"): (4, 1, 4 * 3 * 8)}


def test_ddp_sends_each_gradient_once_and_a_flag_a_parameter():
    layout = DataLayout(replicate=4, bucket_bytes=8000, first_bucket_bytes=1)
    # In reverse: the output alone (its 4,000 bytes close the small first bucket), then the vector and two matrices
    # until 8,000 bytes are reached, then the embedding: never full, sent last.
    assert lines(layout) == AGREEMENT | {("all_reduce_sum", "dp_cp", "float32"): (4, 3, 4 * (NUMEL + 5))}
    half = lines(replace(layout, reduce_dtype="bfloat16"))
    assert half[("all_reduce_sum", "dp_cp", "bfloat16")] == (4, 3, 2 * (NUMEL + 5))
    naive = lines(replace(layout, bucketed=False))
    assert naive[("all_reduce_sum", "dp_cp", "float32")] == (4, 5, 4 * NUMEL)
    assert naive[("all_reduce_sum", "dp_cp", "int32")] == (4, 1, 4 * 5)
    assert lines(DataLayout()) == {}


def test_accumulation_sends_nothing_more_but_under_fsdp():
    for zero in (0, 1):
        one = DataLayout(replicate=4 if zero == 0 else 1, shard=4 if zero else 1, zero=zero)
        assert lines(one) == lines(replace(one, micro_batches=3))
    # Three units. ZeRO-2 gathers each once a step; ZeRO-3 blocks twice a micro-batch, the root and the last block once.
    for zero, gathers in ((2, 3), (3, 3 * 4)):
        layout = DataLayout(shard=4, zero=zero, micro_batches=3)
        assert lines(layout)[("all_gather", "dp_shard_cp", "float32")][1] == gathers
        assert lines(layout)[("reduce_scatter_sum", "dp_shard_cp", "float32")][1] == 9
        once = replace(layout, reduce_each_micro_batch=False)
        assert lines(once)[("reduce_scatter_sum", "dp_shard_cp", "float32")][1] == 3


def test_zero_one_pads_its_buckets_and_fsdp_its_rows():
    flat = lines(DataLayout(shard=4, zero=1, bucket_bytes=1, first_bucket_bytes=1))
    # Every parameter its own bucket: 1,000 elements to 1,024 (64 a rank), 20 to 256.
    assert flat[("reduce_scatter_sum", "dp_shard_cp", "float32")] == (4, 5, 4 * (4 * 1024 + 256))
    assert flat[("all_gather", "dp_shard_cp", "float32")] == (4, 5, 4 * (4 * 1024 + 256))
    rows = lines(DataLayout(shard=4, zero=2))
    # 50 rows are 13 a rank: 260 elements of each matrix; the vector's 20 are 5. A rank's part is padded to 16 bytes.
    parts = (4 * 2 * 260, 4 * 260, 4 * 265 + 12)  # root, block 0, block 1
    assert rows[("all_gather", "dp_shard_cp", "float32")] == (4, 3, 4 * sum(parts))
    assert rows[("reduce_scatter_sum", "dp_shard_cp", "float32")] == (4, 3, 4 * 4 * (4 * 260 + 5))


def test_copies_of_a_shard_are_summed_on_their_own_axis():
    for zero in (1, 2, 3):
        hybrid = lines(DataLayout(replicate=3, shard=4, zero=zero))
        own = [key for key in hybrid if key[1] == "dp_replicate"]
        assert ("all_reduce_sum", "dp_replicate", "float32") in own and hybrid[own[0]][0] == 3
        ranks = {key[1]: value[0] for key, value in hybrid.items()}
        assert ranks == {"dp_cp": 12, "dp_shard_cp": 4, "dp_replicate": 3}


def test_gathering_in_bfloat16_keeps_vectors_and_the_embedding():
    layout = DataLayout(shard=2, zero=2, param_dtype="bfloat16")
    found = lines(layout)
    # Root: embedding in 4 bytes, output in 2. Block 0 a matrix in 2. Block 1 a matrix in 2 and a vector in 4.
    root, first, second = 2 * (4 * 500 + 2 * 500), 2 * 2 * 500, 2 * (2 * 500 + 4 * 10)
    padded = [2 * -(-size // 2 // 16) * 16 for size in (root, first, second)]
    assert found[("all_gather", "dp_shard_cp", "bfloat16")] == (2, 1, padded[1])
    assert found[("all_gather", "dp_shard_cp", "uint8")] == (2, 2, padded[0] + padded[2])


def test_matrices_go_to_their_owners_and_back():
    params = [replace(param, matrix=param.in_block and len(param.shape) == 2) for param in PARAMS]
    layout = DataLayout(shard=4, zero=3)
    sent = [[m.nbytes for m in matrix_messages(params, layout, rank)] for rank in range(4)]
    # Two matrices, owners 0 and 1. Rows 13, 13, 13, 11: each rank sends its parts of both, an owner the whole result.
    assert [held for held, _ in sent] == [2 * 2 * 260] * 3 + [2 * 2 * 220]
    assert [owned for _, owned in sent] == [2000, 2000, 0, 0]
    assert list(matrix_messages(PARAMS, layout, 0)) == [] and list(matrix_messages(params, DataLayout(), 0)) == []
    assert owners_of([5, 4, 3, 3, 1], 2) == [0, 1, 1, 0, 1]


def test_states_follow_the_whiteboard():
    n, ranks = 1 << 20, 8
    params = [Param(f"blocks.{k}.w", (1024, 1024), k + 1, True) for k in range(4)]
    total, moments = 4 * n, {param.name: 8 for param in params}

    def state(zero):
        return rank_state(
            params, DataLayout(shard=ranks if zero else 1, replicate=1 if zero else ranks, zero=zero), moments
        )

    assert (state(0).weights, state(0).gradients, state(0).optimizer) == (4 * total, 4 * total, 8 * total)
    assert (state(1).weights, state(1).gradients, state(1).optimizer) == (4 * total, total // 2, total)
    for zero in (2, 3):
        assert (state(zero).weights, state(zero).gradients, state(zero).optimizer) == (total // 2, total // 2, total)
        assert state(zero).gathered_blocks == (4 * n,) * 4


def ddp_time(seconds, lost_of=None):
    """Two stages of 2 and 4 s backward, one bucket of gradients after each, messages of `seconds`."""
    params = [Param("a", (250,), 0, False), Param("b", (250,), 1, True)]
    layout = DataLayout(replicate=2, bucket_bytes=1, first_bucket_bytes=1)
    compute = Compute((1.0, 2.0), (2.0, 4.0), 1.0)
    return step_time(step_messages(params, layout), compute, layout, lambda message: seconds, lost_of)


def test_a_computation_loses_to_the_messages_beside_it_and_to_no_other():
    # The first bucket travels from 7 to 7.5 beside 2 s of work, of which it takes a fifth of a second; the second one
    # is waited for.
    lossy = ddp_time(0.5, lambda message: 0.2)
    assert lossy.step_s == pytest.approx(9.2 + 0.5 + 1)
    assert (lossy.compute_s, lossy.exposed_s) == (pytest.approx(10.2), pytest.approx(0.5))
    # From 7 to 10 work goes on at a third of its speed: 1 s of it, and the other by 11, when the second bucket starts.
    slow = ddp_time(3.0, lambda message: 2.0)
    assert slow.compute_s == pytest.approx(10.0 + 2.0) and slow.step_s == pytest.approx(11 + 3.0 + 1)
    # However much a message takes, work does not stand still.
    assert ddp_time(3.0, lambda message: 100.0).compute_s == pytest.approx(10.0 + 3.0 * 0.9)


def test_gradients_are_copied_into_their_messages_beside_backward():
    params = [Param("a", (250,), 0, False), Param("b", (250,), 1, True)]
    compute = Compute((1.0, 2.0), (2.0, 4.0), 1.0)
    for layout, copied in ((DataLayout(replicate=2), 2 * 1004), (DataLayout(shard=2, zero=1), 2 * 1024)):
        # A flag a parameter; or padding to 64 elements of each, and both in one bucket, behind the last gradient.
        packed = with_packing(compute, step_messages(params, layout), copy_bytes_per_s=1000.0)
        assert sum(packed.backward_s) == pytest.approx(6.0 + 2 * copied / 1000)
        assert (packed.forward_s, packed.optimizer_s) == (compute.forward_s, 1.0)


def test_what_a_message_takes_follows_the_bytes_that_a_rank_sends():
    machine = Cluster(8, Link(1e9, 0.0), None, 0.0, beside_s_per_byte=1e-9, beside_peer_s_per_byte=1e-10)
    assert lost_seconds("all_reduce_sum", 1e9, 4, machine, peer=True) == pytest.approx(0.15)
    assert lost_seconds("all_reduce_sum", 1e9, 4, machine) == pytest.approx(1.5)
    assert lost_seconds("all_gather", 1e9, 4, machine) == pytest.approx(0.75)
    assert lost_seconds("all_reduce_sum", 1e9, 1, machine) == 0.0


def test_communication_hides_behind_backward_and_what_is_left_is_exposed():
    # Forward 3, stage 1 backward 4, then its bucket travels while stage 0 computes 2; its bucket starts at 9.
    quick = ddp_time(0.5)
    assert (quick.step_s, quick.compute_s, quick.communication_s) == (9.5 + 1, 10.0, 1.0)
    assert quick.exposed_s == pytest.approx(0.5)
    slow = ddp_time(3.0)  # the first from 7 to 10, the second from 10 to 13
    assert slow.step_s == 13.0 + 1 and slow.exposed_s == 4.0


def test_naive_mode_hides_nothing():
    params = [Param("a", (250,), 0, False), Param("b", (250,), 1, True)]
    layout = DataLayout(replicate=2, bucketed=False)
    compute = Compute((1.0, 2.0), (2.0, 4.0), 1.0)
    time = step_time(step_messages(params, layout), compute, layout, lambda message: 3.0)
    assert time.exposed_s == time.communication_s == 6.0


def test_updated_parameters_of_zero_one_arrive_beside_the_next_forward_pass():
    """Updates of 1 s and gathers of 3 behind each other, to 4, 7, 10 and 13; forward begins at 4."""
    params = [Param("table", (64,), 0, False), *(Param(f"b{k}", (64,), k, True) for k in (1, 2))]
    params.append(Param("output", (64,), 3, False))
    layout = DataLayout(shard=2, zero=1, bucket_bytes=1, first_bucket_bytes=1)
    compute = Compute((0.0, 5.0, 5.0, 0.0), (0.0, 10.0, 10.0, 0.0), 4.0)
    messages = step_messages(params, layout)

    def seconds_of(message):
        return 3.0 if message.op == "all_gather" else 0.0

    time = step_time(messages, compute, layout, seconds_of)
    # The first block waits from 4 to 7, the second, which waits for the output's too, from 12 to 13.
    assert time.exposed_s == pytest.approx(3.0 + 1.0) and time.compute_s == 34.0
    slower = step_time(messages, compute, layout, lambda message: 2 * seconds_of(message))
    assert slower.exposed_s == pytest.approx((7 - 4) + (13 - 7) + (25 - 18))


def test_fsdp_gathers_one_unit_ahead():
    params = [Param("root", (64,), 0, False), *(Param(f"b{k}", (64,), k, True) for k in (1, 2, 3))]
    layout = DataLayout(shard=2, zero=3)
    compute = Compute((0.0, 5.0, 5.0, 5.0, 0.0), (0.0, 10.0, 10.0, 10.0, 0.0), 1.0)
    messages = step_messages(params, layout)
    time = step_time(messages, compute, layout, lambda message: 1.0)
    # Exposed: the root's and the first block's gathers, and the root's reduction at the end behind the first block's.
    assert time.exposed_s == pytest.approx(1 + 1 + 2)
    assert time.communication_s == 4 + 2 + 4
    nothing = step_time(messages, compute, layout, lambda message: 0.0)
    assert nothing.step_s == nothing.compute_s == 46.0
    # Messages slower than a block's forward: computation waits for each of them.
    assert step_time(messages, compute, layout, lambda message: 100.0).step_s >= 10 * 100.0
