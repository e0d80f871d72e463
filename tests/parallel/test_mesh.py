"""The mesh from torchrun's variables, and each broken set of them refused with one line."""

import pytest
import torch
from torch import distributed as dist

from configs.errors import UserError
from parallel.mesh import RENDEZVOUS, TORCHRUN, close_mesh, init_mesh
from tests.parallel.pool import run_ranks


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
