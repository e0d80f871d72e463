"""Collectives on two and three gloo ranks against sums written out, and what the log says about them."""

import pytest
import torch

from parallel.collectives import all_gather, all_reduce_max, all_reduce_sum, barrier, broadcast
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
        assert all(line.pop("seconds") > 0 for line in lines)
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


def test_one_rank_communicates_nothing_and_copies_nothing():
    mesh = Mesh(0, 0, 1, torch.device("cpu"), "none", {"dp": MeshAxis(1, 0, None)})
    tensor = torch.ones(3)
    assert all_reduce_sum(tensor, mesh) is tensor and broadcast(tensor, mesh) is tensor
    assert all_gather(tensor, mesh).data_ptr() == tensor.data_ptr()
    barrier(mesh)
    assert mesh.log.drain(0) == []
