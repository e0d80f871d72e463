"""Collectives over memory that the ranks of one machine read: against sums made here, and what they refuse."""

import gc
import time
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from configs.errors import UserError
from llm.args import ParallelConfig
from parallel import collectives_peer
from parallel.collectives_peer import (
    PeerMemory,
    peer_bytes,
    start_peer_all_gather,
    start_peer_all_reduce,
    start_peer_reduce_scatter,
)
from parallel.ddp import DataParallel, DdpSettings
from parallel.mesh_degrees import Degrees
from parallel.sharded_optimizer import Zero1, Zero1Settings
from tests.parallel.pool import pool_of, run_ranks
from tests.tolerances import BF16_ROUNDING, FP64

pytestmark = pytest.mark.dist
DTYPES = {torch.float64: FP64, torch.float32: 1e-6, torch.bfloat16: 3 * BF16_ROUNDING}


def values(rank, numel, dtype):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def summed(mesh, numel, dtype):
    """Two buffers in one memory, twice each: a collective must leave its neighbour alone and be repeatable."""
    memory = PeerMemory(peer_bytes([(numel, dtype)] * 2), mesh, "dp")
    first, second = memory.take(numel, dtype), memory.take(numel, dtype)
    mesh.log.drain(0)
    results = []
    for _ in range(2):
        first.tensor.copy_(values(mesh.rank, numel, dtype))
        second.tensor.fill_(mesh.rank)
        pending = [start_peer_all_reduce(first), start_peer_all_reduce(second)]
        results.append([one.wait().clone() for one in pending])
    return results, mesh.log.drain(0)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 130, 1000])  # fewer than ranks, a last share that is empty or short
def test_a_sum_matches_the_sum_of_all_ranks(numel, dtype, world_size):
    expected = sum(values(rank, numel, dtype).double() for rank in range(world_size))
    ranks = run_ranks(summed, world_size, numel, dtype)
    for results, (line,) in ranks:
        for first, second in results:
            error = (first.double() - expected).abs().max() / expected.abs().max()
            assert error <= DTYPES[dtype] * world_size and torch.equal(first, ranks[0][0][0][0])
            assert second.eq(sum(range(world_size))).all()
        assert (line["op"], line["calls"], line["bytes"]) == ("all_reduce_sum", 4, 4 * numel * dtype.itemsize)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("numel", [1, 130, 1 << 22])
def test_a_sum_on_gpus_matches_the_sum_of_all_ranks(numel):
    expected = sum(values(rank, numel, torch.float32).double() for rank in range(2))
    for results, _ in pool_of(2, "cuda").run(summed, numel, torch.float32):
        for first, second in results:
            assert (first.double().cpu() - expected).abs().max() <= 1e-6 * expected.abs().max()
            assert second.eq(1).all()


def scattered_and_gathered(mesh, share):
    memory = PeerMemory(peer_bytes([(share * mesh.world_size, torch.float32)]), mesh, "dp")
    buffer = memory.take(share * mesh.world_size, torch.float32).use_equal_shares()
    buffer.tensor.copy_(torch.arange(buffer.tensor.numel()) + 100.0 * mesh.rank)
    own = start_peer_reduce_scatter(buffer).wait()
    kept = buffer.tensor.clone()
    buffer.tensor[buffer.own_share] = own
    return own, kept, start_peer_all_gather(buffer).wait().clone(), [line["op"] for line in mesh.log.drain(0)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_scatter_leaves_its_buffer_and_a_gather_fills_it(world_size):
    numel = 5 * world_size
    total = world_size * torch.arange(float(numel)) + 100.0 * sum(range(world_size))
    for rank, (own, kept, gathered, ops) in enumerate(run_ranks(scattered_and_gathered, world_size, 5)):
        assert torch.equal(own, total[5 * rank : 5 * (rank + 1)]) and torch.equal(gathered, total)
        assert torch.equal(kept, torch.arange(float(numel)) + 100.0 * rank)
        assert ops[-2:] == ["reduce_scatter_sum", "all_gather"]


def alone(mesh):
    buffer = PeerMemory(4096, mesh, "dp").take(7, torch.float32)
    buffer.tensor.fill_(3.0)
    starts = (start_peer_all_reduce, start_peer_reduce_scatter, start_peer_all_gather)
    return [start(buffer).wait() for start in starts]


def test_one_rank_has_what_it_gave():
    (results,) = run_ranks(alone, 1)
    assert all(torch.equal(result, torch.full((7,), 3.0)) for result in results)


def beside_a_slow_rank(mesh):
    """Each buffer is filled late on rank 1, which then lags behind every meeting, and is overwritten at once by rank 0.

    Every meeting keeps rank 0 from something that would be wrong: without any one of them a result is.
    """
    memory = PeerMemory(8192, mesh, "dp")
    meet, pause_s = memory.meet, 0.05 * mesh.rank
    memory.meet = lambda: (meet(), time.sleep(pause_s))
    buffers = [memory.take(256, torch.float32).use_equal_shares() for _ in range(3)]
    results = []
    for start, buffer in zip(
        (start_peer_all_reduce, start_peer_reduce_scatter, start_peer_all_gather), buffers, strict=True
    ):
        for number in (1.0, 10.0):
            time.sleep(pause_s)
            buffer.tensor.fill_(number + mesh.rank)
            results.append(start(buffer).wait().clone())
            buffer.tensor.fill_(-1.0)
    dist.barrier(group=mesh.group("dp"))
    return results


def test_a_slow_rank_is_waited_for():
    for rank, results in enumerate(run_ranks(beside_a_slow_rank, 2)):
        summed, again, scattered, scattered_again, *gathered = results
        assert summed.eq(3.0).all() and again.eq(21.0).all()
        assert scattered.eq(3.0).all() and scattered_again.eq(21.0).all()
        for number, result in zip((1.0, 10.0), gathered, strict=True):
            assert torch.equal(result, torch.tensor([number, number + 1]).repeat_interleave(128)), rank


def files_made(mesh):
    """The files behind the memory, by what the module was given for them."""
    made, original = [], collectives_peer.tempfile.mkstemp
    try:
        collectives_peer.tempfile.mkstemp = lambda **how: made.append(original(**how)) or made[-1]
        PeerMemory(4096, mesh, "dp")
    finally:
        collectives_peer.tempfile.mkstemp = original
    return [path for _, path in made]


def test_no_file_is_left_behind():
    made = [path for paths in run_ranks(files_made, 2) for path in paths]
    assert len(set(made)) == 2 and not any(Path(path).exists() for path in made)


def on_two_machines(mesh, folder):
    collectives_peer.BOOT_ID = Path(folder) / f"boot{mesh.rank}"
    try:
        PeerMemory(4096, mesh, "dp")
    except UserError as error:
        return str(error)


def test_ranks_of_two_machines_are_refused(tmp_path, monkeypatch):
    for rank in range(2):
        (tmp_path / f"boot{rank}").write_text(f"machine-{rank}")
    for message in run_ranks(on_two_machines, 2, str(tmp_path)):
        assert "on one machine; use parallel.transport=backend" in message
    run_ranks(restore_boot_id, 2)


def restore_boot_id(mesh):
    collectives_peer.BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def mappings():
    return sum("mew-peer-" in line for line in Path("/proc/self/maps").read_text().splitlines())


def mapped_during_and_after(mesh):
    """By a strategy that reduces gradients and by one that gathers parameters too, each dropped with its model."""
    gc.collect()
    before, counts = mappings(), []
    for apply, settings in ((DataParallel, DdpSettings(transport="peer")), (Zero1, Zero1Settings(transport="peer"))):
        model = torch.nn.Linear(3, 3)
        strategy = apply(model, mesh, settings)
        counts.append(mappings() - before)
        del model, strategy
        gc.collect()
        counts.append(mappings() - before)
    return counts


def test_memory_goes_with_its_strategy():
    counts = pool_of(2).run(mapped_during_and_after, degrees=Degrees(dp_shard=None))
    assert counts == [[2, 0, 4, 0]] * 2  # this rank's and the other's; of ZeRO-1 parameters and slots


def without_room(mesh):
    try:
        PeerMemory(1 << 50 if mesh.rank == 1 else 4096, mesh, "dp")
    except UserError as error:
        return str(error)


def test_a_rank_without_room_ends_all_of_them():
    for message in run_ranks(without_room, 3):
        assert f"needs {1 << 50} bytes in" in message and "use parallel.transport=backend" in message


def in_another_container(mesh):
    """Rank 1's file is not where rank 0 looks for it, as with two folders of one name."""
    original = collectives_peer.all_gather_json

    def elsewhere(value, *where):
        moves = mesh.rank == 1 and isinstance(value, str) and value.startswith("/")
        return original(f"{value}-elsewhere" if moves else value, *where)

    collectives_peer.all_gather_json = elsewhere
    try:
        PeerMemory(4096, mesh, "dp")
    except UserError as error:
        return str(error)
    finally:
        collectives_peer.all_gather_json = original


def test_ranks_that_share_no_folder_are_refused():
    for message in run_ranks(in_another_container, 2):
        assert "-elsewhere of another rank is not there; use parallel.transport=backend" in message
        assert not Path(message.partition("and ")[2].partition(" of another")[0]).exists()


def test_memory_of_nothing_is_possible():
    assert run_ranks(bytes_of_nothing, 2) == [1, 1]


def bytes_of_nothing(mesh):
    return len({arena.numel() for arena in PeerMemory(0, mesh, "dp").arenas})


@pytest.mark.parametrize("settings", [{"zero": 3}, {"zero": 2}, {"ddp_mode": "naive"}, {"transport": "carrier-pigeon"}])
def test_what_has_no_buckets_is_refused(settings):
    with pytest.raises(UserError, match=r"parallel\.transport"):
        ParallelConfig(**({"transport": "peer"} | settings))


def test_the_naive_mode_has_no_buckets():
    with pytest.raises(UserError, match="ddp_mode=naive"):
        DdpSettings(mode="naive", transport="peer")


class OneGpu:
    """What map_devices asks of a mesh, without a GPU."""

    device, peer_bytes = torch.device("cpu"), 0

    def group(self, axis):
        return None


def device_memory(mesh, monkeypatch, rendezvous):
    from torch.distributed import _symmetric_memory as symmetric

    monkeypatch.setattr(symmetric, "empty", torch.empty)
    monkeypatch.setattr(symmetric, "rendezvous", rendezvous)
    memory = PeerMemory.__new__(PeerMemory)
    memory.mesh, memory.axis, memory.size, memory.rank = mesh, "dp", 2, 0
    memory.arenas = memory.map_devices(4096)
    return memory


class Mapping:
    def get_buffer(self, place, shape, dtype):
        return torch.zeros(shape, dtype=dtype)


def test_bytes_that_the_allocator_does_not_see_are_counted_while_they_live(monkeypatch):
    mesh = OneGpu()
    memory = device_memory(mesh, monkeypatch, lambda own, group: Mapping())
    assert mesh.peer_bytes == 4096 and [arena.numel() for arena in memory.arenas] == [4096, 4096]
    del memory
    assert mesh.peer_bytes == 0


def test_a_gpu_whose_memory_cannot_be_mapped_is_told(monkeypatch):
    def rendezvous(own, group):
        raise RuntimeError("no such process")

    mesh = OneGpu()
    with pytest.raises(UserError, match=r"could not be shared \(no such process\).*parallel\.transport=backend"):
        device_memory(mesh, monkeypatch, rendezvous)
