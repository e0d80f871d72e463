"""The mesh from torchrun's variables, and each broken set of them refused with one line."""

import re

import pytest
import torch
from torch import distributed as dist

from configs.errors import UserError
from llm.args import ParallelConfig
from parallel.collectives import all_reduce_sum
from parallel.mesh import RENDEZVOUS, TORCHRUN, close_mesh, init_mesh
from parallel.mesh_degrees import AXES, EXPERT_AXES, Degrees
from tests.parallel.pool import pool_of, run_ranks


@pytest.fixture
def environment(monkeypatch):
    for name in TORCHRUN + RENDEZVOUS:
        monkeypatch.delenv(name, raising=False)

    def set_variables(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

    return set_variables


def test_without_torchrun_there_is_one_rank_and_no_process_group(environment):
    mesh = init_mesh(device="cpu")
    assert (mesh.rank, mesh.local_rank, mesh.world_size, mesh.is_main) == (0, 0, 1, True)
    assert (mesh.size("dp"), mesh.rank_in("dp"), mesh.group("dp"), mesh.backend) == (1, 0, None, "none")
    assert mesh.device == torch.device("cpu") and not dist.is_initialized()
    close_mesh(mesh)


def test_torchrun_with_one_rank_makes_no_process_group(environment):
    environment(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0)
    assert init_mesh(device="cpu").group("dp") is None and not dist.is_initialized()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": 1}, "RANK=1 is set but WORLD_SIZE, LOCAL_RANK not"),
        ({"WORLD_SIZE": 2}, "WORLD_SIZE=2 is set but RANK, LOCAL_RANK not"),
        ({"RANK": 2, "WORLD_SIZE": 2, "LOCAL_RANK": 0}, "RANK=2 must be below WORLD_SIZE=2"),
        ({"RANK": "x", "WORLD_SIZE": 2, "LOCAL_RANK": 0}, "RANK='x' must be a whole number"),
        ({"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0}, "needs MASTER_ADDR and MASTER_PORT"),
        ({"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost"}, "needs MASTER_PORT"),
    ],
)
def test_a_broken_environment_is_refused(environment, variables, message):
    environment(**variables)
    with pytest.raises(UserError, match=message):
        init_mesh(device="cpu")


def test_more_local_ranks_than_gpus_is_refused(environment, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    environment(RANK=2, WORLD_SIZE=3, LOCAL_RANK=2, MASTER_ADDR="localhost", MASTER_PORT=1)
    with pytest.raises(UserError, match="LOCAL_RANK=2 has no GPU of its own, this host has 2"):
        init_mesh(device="auto")


def test_cuda_without_a_gpu_and_an_unknown_device_are_refused(environment, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="device=cuda needs a CUDA GPU"):
        init_mesh(device="cuda")
    with pytest.raises(UserError, match="device='tpu' is unknown"):
        init_mesh(device="tpu")
    with pytest.raises(UserError, match="timeout_s=0 must be positive"):
        init_mesh(device="cpu", timeout_s=0)


def describe(mesh):
    return mesh.rank, mesh.world_size, mesh.size("dp"), mesh.rank_in("dp"), mesh.backend, mesh.is_main


@pytest.mark.dist
def test_two_ranks_each_know_their_place():
    assert run_ranks(describe, 2) == [(0, 2, 2, 0, "gloo", True), (1, 2, 2, 1, "gloo", False)]


def fail_on_rank_one(mesh):
    assert mesh.rank == 0, "rank one gives up"
    torch.distributed.barrier()


@pytest.mark.dist
def test_the_pool_reports_the_rank_that_failed():
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed.*rank one gives up"):
        run_ranks(fail_on_rank_one, 2)


def test_groups_of_a_small_grid_are_those_written_out():
    degrees = Degrees(dp=4, dp_shard=2, tp=2).resolve(8)  # rank = (replicate * 2 + shard) * 2 + tp
    assert degrees.dp_replicate == 2
    assert degrees.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert degrees.groups("dp_shard") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert degrees.groups("dp_replicate") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert degrees.groups("dp") == degrees.groups("dp_cp") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert degrees.groups("pp") == degrees.groups("cp") == [[rank] for rank in range(8)]
    assert degrees.groups("world") == [list(range(8))]


def test_experts_fold_over_the_data_ranks():
    degrees = Degrees(ep=2, tp=2).resolve(8)
    assert degrees.groups("ep") == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert degrees.groups("ep_replicate") == [[0, 4], [2, 6], [1, 5], [3, 7]]


@pytest.mark.parametrize(
    "degrees", [Degrees(pp=2, cp=2, tp=4), Degrees(dp_shard=None, cp=3), Degrees(dp_shard=4, ep=8)]
)
def test_every_axis_holds_every_rank_once(degrees):
    degrees = degrees.resolve(96)
    for axis in (*AXES, *EXPERT_AXES):
        groups = degrees.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(96))
        assert len({len(group) for group in groups}) == 1 and all(group == sorted(group) for group in groups)


@pytest.mark.parametrize(
    ("degrees", "world_size", "message"),
    [
        (Degrees(dp=3), 2, "parallel.dp=3 times pp x cp x tp = 1 x 1 x 1 must equal the world size 2"),
        (Degrees(dp=2, tp=2), 8, "parallel.dp=2 times pp x cp x tp = 1 x 1 x 2 must equal the world size 8"),
        (Degrees(tp=3), 4, "= 3 must divide the world size 4"),
        (Degrees(dp_shard=3), 4, "parallel.dp_shard=3 must divide dp=4"),
        (Degrees(ep=3), 4, "parallel.ep=3 must divide dp x cp = 4 x 1"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(degrees, world_size, message):
    with pytest.raises(UserError, match=re.escape(message)):
        degrees.resolve(world_size)
    with pytest.raises(UserError, match=r"parallel.tp=0 must be positive"):
        Degrees(tp=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"zero": 4}, "parallel.zero=4 must be 0, 1, 2 or 3"),
        ({"dp_shard": 2}, "parallel.dp_shard=2 needs something to shard"),
        ({"ddp_mode": "slow"}, "parallel.ddp_mode='slow' is unknown"),
        ({"bucket_mb": 0}, "parallel.bucket_mb=0 must be positive"),
        ({"reduce_dtype": "int8"}, "parallel.reduce_dtype='int8' is unknown"),
    ],
)
def test_settings_that_mean_nothing_are_refused(fields, message):
    with pytest.raises(UserError, match=re.escape(message)):
        ParallelConfig(**fields)


def meet_along_each_axis(mesh):
    """The ranks that a sum along each axis reaches, as bits."""
    return {axis: int(all_reduce_sum(torch.tensor([1 << mesh.rank]), mesh, axis)) for axis in AXES}


@pytest.mark.dist
def test_process_groups_are_those_of_the_degrees():
    degrees = Degrees(dp_shard=2).resolve(4)
    for rank, reached in enumerate(pool_of(4).run(meet_along_each_axis, degrees=degrees)):
        for axis, bits in reached.items():
            (own,) = [group for group in degrees.groups(axis) if rank in group]
            assert bits == sum(1 << other for other in own), (rank, axis)


def describe_forced(mesh):
    before = mesh.log.drain(0)
    value = all_reduce_sum(torch.ones(3), mesh, "dp_cp")
    all_reduce_sum(torch.ones(3), mesh, "tp")
    return mesh.size("dp_cp"), mesh.is_active("dp_cp"), mesh.is_active("tp"), value, before, mesh.log.drain(1)


@pytest.mark.dist
def test_force_makes_groups_of_one_along_the_data_axes_alone():
    ((size, data, tensor, value, before, lines),) = pool_of(1).run(describe_forced, force=True)
    assert (size, data, tensor, value.tolist(), before) == (1, True, False, [1.0] * 3, [])
    assert [(line["axis"], line["calls"], line["bytes"]) for line in lines] == [("dp_cp", 1, 12)]
