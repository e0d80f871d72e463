"""Collectives on two and three gloo ranks against sums written out, and what the log says about them."""

import pytest
import torch

from parallel.collectives import (
    all_gather,
    all_gather_flat,
    all_gather_json,
    all_reduce_max,
    all_reduce_sum,
    all_to_all,
    barrier,
    broadcast,
    exchange,
    reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_broadcast,
    start_reduce_scatter,
)
from parallel.mesh import Mesh, MeshAxis
from tests.parallel.pool import run_ranks

pytestmark = pytest.mark.dist


def reduce_everything(mesh):
    own = torch.arange(6, dtype=torch.float64).view(2, 3) + 10 * mesh.rank
    strided = own.clone().t()[1:]  # (2, 2), a slice whose rows are not adjacent in memory
    return {
        "sum": all_reduce_sum(own.clone(), mesh),
        "strided": all_reduce_sum(strided, mesh),
        "max": all_reduce_max(torch.tensor([mesh.rank, -mesh.rank]), mesh),
        "broadcast": broadcast(own.clone(), mesh, source=1),
        "gathered": all_gather(own, mesh),
        "half": all_reduce_sum(torch.ones(5, dtype=torch.bfloat16), mesh).float(),
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_match_the_sums_written_out(world_size):
    inputs = [torch.arange(6, dtype=torch.float64).view(2, 3) + 10 * rank for rank in range(world_size)]
    for result in run_ranks(reduce_everything, world_size):
        assert torch.equal(result["sum"], sum(inputs))
        assert torch.equal(result["strided"], sum(inputs).t()[1:])
        assert result["max"].tolist() == [world_size - 1, 0]
        assert torch.equal(result["broadcast"], inputs[1])
        assert torch.equal(result["gathered"], torch.stack(inputs))
        assert torch.equal(result["half"], torch.full((5,), float(world_size)))


def log_of_three_calls(mesh):
    all_reduce_sum(torch.zeros(3, 5), mesh)
    all_reduce_sum(torch.zeros(7), mesh)
    broadcast(torch.zeros(4, dtype=torch.int64), mesh)
    barrier(mesh)
    return mesh.log.drain(step=12), mesh.log.drain(step=13)


def test_log_counts_calls_and_bytes_per_kind_and_is_empty_after_a_drain():
    for lines, after in run_ranks(log_of_three_calls, 2):
        assert all(line.pop("exposed_seconds") == line.pop("seconds") > 0 for line in lines)
        assert lines == [
            {"step": 12, "op": "all_reduce_sum", "axis": "dp", "dtype": "float32", "ranks": 2, "calls": 2, "bytes": 88},
            {"step": 12, "op": "broadcast", "axis": "dp", "dtype": "int64", "ranks": 2, "calls": 1, "bytes": 32},
            {"step": 12, "op": "barrier", "axis": "dp", "dtype": "int32", "ranks": 2, "calls": 1, "bytes": 4},
        ]
        assert after == []


def meet_after_the_slow_rank(mesh, path):
    import time

    if mesh.rank == 1:
        time.sleep(0.3)
        path.write_text("written")
    barrier(mesh)
    return path.exists()


def test_barrier_holds_until_the_last_rank_is_there(tmp_path):
    assert run_ranks(meet_after_the_slow_rank, 2, tmp_path / "file") == [True, True]


def shards_and_rows(mesh):
    size, rank = mesh.size("dp"), mesh.rank
    flat = torch.arange(2.0 * size) + rank
    rows = torch.arange(3.0 * size).view(-1, 3) + 100 * rank  # a row for each rank
    uneven = torch.full((sum(range(1, size + 1)),), float(rank))  # r + 1 rows for rank r
    after, before = (rank + 1) % size, (rank - 1) % size
    received = torch.empty(2)
    exchange([(torch.tensor([rank, 7.0]), after)], [(received, before)], mesh, "dp").wait()
    return {
        "scattered": reduce_scatter(flat, mesh),
        "gathered": all_gather_flat(torch.tensor([float(rank), -1.0]), mesh),
        "rows": all_to_all(rows, mesh, "dp"),
        "uneven": all_to_all(uneven, mesh, "dp", list(range(1, size + 1)), [rank + 1] * size),
        "ring": received,
        "json": all_gather_json({"rank": rank, "text": "x" * rank}, mesh),
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_sharded_collectives_match_what_is_written_out(world_size):
    total = sum(torch.arange(2.0 * world_size) + rank for rank in range(world_size))
    sent = [torch.arange(3.0 * world_size).view(-1, 3) + 100 * rank for rank in range(world_size)]
    for rank, result in enumerate(run_ranks(shards_and_rows, world_size)):
        assert torch.equal(result["scattered"], total[2 * rank : 2 * rank + 2])
        assert result["gathered"].tolist() == [x for r in range(world_size) for x in (r, -1.0)]
        assert torch.equal(result["rows"], torch.stack([rows[rank] for rows in sent]))
        assert result["uneven"].tolist() == [float(r) for r in range(world_size) for _ in range(rank + 1)]
        assert result["ring"].tolist() == [(rank - 1) % world_size, 7.0]
        assert result["json"] == [{"rank": r, "text": "x" * r} for r in range(world_size)]


def start_many(mesh):
    reduced, copied = torch.full((5,), float(mesh.rank)), torch.full((3,), float(mesh.rank))
    shard, flat = torch.full((2,), float(mesh.rank)), torch.arange(4.0)
    whole = torch.empty(4)
    pending = [
        start_all_reduce(reduced, mesh),
        start_reduce_scatter(flat, mesh),
        start_all_gather(shard, mesh, out=whole),
        start_broadcast(copied, mesh, source=1),
    ]
    numbers = [call.number for call in mesh.log.in_flight][-4:]
    unfinished = [handle.is_done for handle in pending]
    results = [handle.wait() for handle in pending]
    again = [handle.wait() for handle in pending]
    same = all(first is second for first, second in zip(results, again, strict=True))
    in_place = results[0] is reduced and results[2] is whole and results[3] is copied
    return results, (unfinished, same, in_place, numbers[-1] - numbers[0]), mesh.log.drain(3)


def test_started_collectives_give_their_results_and_are_logged_once():
    for rank, (results, told, lines) in enumerate(run_ranks(start_many, 2)):
        assert [result.tolist() for result in results] == [
            [1.0] * 5,
            [4.0 * rank, 4.0 * rank + 2],
            [0.0, 0.0, 1.0, 1.0],
            [1.0] * 3,
        ]
        assert told[:3] == ([False] * 4, True, True)
        assert [(line["op"], line["calls"], line["bytes"]) for line in lines] == [
            ("all_reduce_sum", 1, 20),
            ("reduce_scatter_sum", 1, 16),
            ("all_gather", 1, 16),
            ("broadcast", 1, 12),
        ]
        assert all(0 <= line["exposed_seconds"] <= line["seconds"] for line in lines)


def busy_while_waiting(mesh):
    import time

    handle = start_all_reduce(torch.ones(8), mesh)
    time.sleep(0.3)  # on both ranks: the transfer is over long before
    handle.wait()
    (line,) = mesh.log.drain(0)
    if mesh.rank == 1:
        time.sleep(0.3)
    start_all_reduce(torch.ones(8), mesh).wait()
    (waited,) = mesh.log.drain(1)
    return line["exposed_seconds"], waited["exposed_seconds"]


def test_hidden_time_is_told_from_exposed_time():
    (hidden, waited), _ = run_ranks(busy_while_waiting, 2)
    assert hidden < 0.2 < waited  # rank 0 waits 0.3 s for its peer, but for nothing where it was busy itself


def test_one_rank_communicates_nothing_and_copies_nothing():
    mesh = Mesh(0, 0, 1, torch.device("cpu"), "none", {"dp": MeshAxis(1, 0, None)})
    tensor = torch.ones(3)
    assert all_reduce_sum(tensor, mesh) is tensor and broadcast(tensor, mesh) is tensor
    assert all_gather(tensor, mesh).data_ptr() == tensor.data_ptr()
    assert start_all_reduce(tensor, mesh).wait() is tensor and reduce_scatter(tensor, mesh) is tensor
    assert all_gather_flat(tensor, mesh) is tensor and all_to_all(tensor, mesh, "ep") is tensor
    assert all_gather_json([1], mesh) == [[1]] and exchange([], [], mesh, "pp").wait() == []
    barrier(mesh)
    assert mesh.log.drain(0) == []
