"""Who this process is among the ranks: the only reader of torchrun's environment variables.

Without torchrun, or with one rank, there is no process group and every collective does nothing. Today the mesh has one
axis, "dp"; code asks for axes by name (mesh.group("dp"), mesh.size("dp"), mesh.rank_in("dp")), so that more can come.
"""

import os
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import distributed as dist

from configs.errors import UserError, check_choice, check_positive
from parallel.collectives_log import CommLog

RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass
class MeshAxis:
    """One axis: how many ranks lie along it, which of them this is, and their process group (None at size 1)."""

    size: int
    rank: int
    group: dist.ProcessGroup | None


@dataclass
class Mesh:
    """The ranks of this run as seen from one of them."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    backend: str  # what moves tensors of `device`: "nccl", "gloo", or "none" at world size 1
    axes: dict[str, MeshAxis]
    log: CommLog = field(default_factory=CommLog)

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the run directory."""
        return self.rank == 0

    def size(self, axis: str) -> int:
        return self.axes[axis].size

    def rank_in(self, axis: str) -> int:
        return self.axes[axis].rank

    def group(self, axis: str) -> dist.ProcessGroup | None:
        return self.axes[axis].group


def init_mesh(device: str = "auto", timeout_s: float = 600.0) -> Mesh:
    """Join the ranks that torchrun started, or be the only one; `device` is "auto", "cpu" or "cuda".

    On a GPU both backends are made: NCCL moves CUDA tensors, gloo moves CPU tensors without stopping the device.
    Raises UserError for an incomplete environment, a missing GPU, or more local ranks than GPUs.
    """
    check_choice("device", device, ("auto", "cpu", "cuda"))
    check_positive(**{"parallel.timeout_s": timeout_s})
    rank, world_size, local_rank = read_ranks()
    chosen = choose_device(device, local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if world_size == 1:
        return Mesh(rank, local_rank, world_size, chosen, "none", {"dp": MeshAxis(1, 0, None)})
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    axes = {"dp": MeshAxis(world_size, rank, dist.group.WORLD)}
    return Mesh(rank, local_rank, world_size, chosen, "nccl" if chosen.type == "cuda" else "gloo", axes)


def close_mesh(mesh: Mesh) -> None:
    """Leave the process group, if there is one."""
    if mesh.world_size > 1:
        dist.destroy_process_group()


def read_ranks() -> tuple[int, int, int]:
    """RANK, WORLD_SIZE and LOCAL_RANK as torchrun sets them; (0, 1, 0) when it did not start this process."""
    given = [name for name in TORCHRUN if name in os.environ]
    if not given:
        return 0, 1, 0
    missing = [name for name in TORCHRUN if name not in os.environ]
    if missing:
        raise UserError(
            f"{given[0]}={os.environ[given[0]]} is set but {', '.join(missing)} not; "
            f"start with torchrun, which sets all three, or unset {', '.join(given)}"
        )
    rank, world_size, local_rank = (read_count(name) for name in TORCHRUN)
    if world_size < 1 or rank >= world_size:
        raise UserError(f"RANK={rank} must be below WORLD_SIZE={world_size}; start with torchrun, which sets both")
    missing = [name for name in RENDEZVOUS if name not in os.environ]
    if world_size > 1 and missing:
        raise UserError(f"WORLD_SIZE={world_size} needs {' and '.join(missing)}; start with torchrun, which sets them")
    return rank, world_size, local_rank


def read_count(name: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        raise UserError(f"{name}={text!r} must be a whole number from 0; start with torchrun, which sets it")
    return int(text)


def choose_device(device: str, local_rank: int) -> torch.device:
    """The GPU of this local rank, or the CPU."""
    available = torch.cuda.is_available()
    if device == "cpu" or (device == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise UserError("device=cuda needs a CUDA GPU and none was found; use device=auto or device=cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            f"LOCAL_RANK={local_rank} has no GPU of its own, this host has {count}; "
            f"use torchrun --nproc-per-node={count} or device=cpu"
        )
    return torch.device("cuda", local_rank)
