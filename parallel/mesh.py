"""Who this process is among the ranks, and its process group along each axis (mesh_degrees says which axes there are).

The only reader of torchrun's environment variables. Code asks for axes by name: mesh.size("tp"), mesh.rank_in("dp"),
mesh.group("dp_cp"). Along an axis of one rank there is no group and every collective does nothing, unless `force` asks
for groups of one rank along the data axes, with which hooks and collectives can be measured on a single device.
"""

import os
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import distributed as dist

from configs.errors import UserError, check_choice, check_positive
from parallel.collectives_log import CommLog
from parallel.collectives_watchdog import Watchdog
from parallel.mesh_degrees import AXES, EXPERT_AXES, Degrees

RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
FORCED_AXES = ("dp", "dp_replicate", "dp_shard", "dp_shard_cp", "dp_cp", "world")


@dataclass
class MeshAxis:
    """One axis: how many ranks lie along it, which of them this is, and their process group (None at size 1).

    `ranks` are the ranks of the whole run along this axis, in its order.
    """

    size: int
    rank: int
    group: dist.ProcessGroup | None
    ranks: list[int] = field(default_factory=lambda: [0])


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
    degrees: Degrees = field(default_factory=lambda: Degrees().resolve(1))
    streams: dict[str, torch.cuda.Stream] = field(default_factory=dict)
    watchdog: Watchdog | None = None  # tells which ranks are missing when a collective hangs
    peer_bytes: int = 0  # of this GPU that other ranks read (collectives_peer), which its allocator does not count

    def __post_init__(self) -> None:
        if self.world_size == 1:  # a mesh of one rank has every axis
            self.axes = {axis: MeshAxis(1, 0, None) for axis in (*AXES, *EXPERT_AXES)} | self.axes

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

    def is_active(self, axis: str) -> bool:
        """Whether collectives along the axis do anything: more than one rank, or a forced group."""
        return self.axes[axis].group is not None

    def stream(self, name: str) -> torch.cuda.Stream:
        """The side stream of this name on a GPU, on which asynchronous collectives run; made on first use."""
        if name not in self.streams:
            self.streams[name] = torch.cuda.Stream(self.device, priority=-1)
        return self.streams[name]


def init_mesh(
    device: str = "auto", timeout_s: float = 600.0, degrees: Degrees | None = None, force: bool = False
) -> Mesh:
    """Join the ranks that torchrun started, or be the only one; `device` is "auto", "cpu" or "cuda".

    On a GPU both backends are made: NCCL moves CUDA tensors, gloo moves CPU tensors without stopping the device.
    Without `degrees` all ranks are data parallel. Raises UserError for an incomplete environment, a missing GPU, more
    local ranks than GPUs, or degrees that do not fill the world.
    """
    check_choice("device", device, ("auto", "cpu", "cuda"))
    check_positive(**{"parallel.timeout_s": timeout_s})
    rank, world_size, local_rank = read_ranks()
    degrees = (degrees or Degrees()).resolve(world_size)
    chosen = choose_device(device, local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if world_size == 1 and not force:
        return Mesh(rank, local_rank, world_size, chosen, "none", {})
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    # The backend gives up a little later than the watchdog, so that the report comes before the end.
    timeout = timedelta(seconds=timeout_s + min(30.0, max(3.0, timeout_s / 4)))
    if world_size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
    mesh = make_mesh(degrees, chosen, local_rank, force)
    if world_size > 1:
        mesh.watchdog = Watchdog(mesh.log, {name: axis.ranks for name, axis in mesh.axes.items()}, rank, timeout_s)
        mesh.watchdog.start()
    return mesh


def make_mesh(degrees: Degrees, device: torch.device, local_rank: int, force: bool = False) -> Mesh:
    """The mesh of these degrees over the process group that exists already; every rank must call it.

    Axes along which the same ranks lie share one process group.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    degrees = degrees.resolve(world_size)
    made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = {}
    axes = {}
    for axis in (*AXES, *EXPERT_AXES):
        groups = degrees.groups(axis)
        own = next(ranks for ranks in groups if rank in ranks)
        key = tuple(map(tuple, groups))
        if key not in made:
            made[key] = make_groups(groups, rank)
        group = made[key]
        if force and world_size == 1 and axis in FORCED_AXES:
            group = dist.group.WORLD
        axes[axis] = MeshAxis(len(own), own.index(rank), group, own)
    backend = "nccl" if device.type == "cuda" else "gloo"
    return Mesh(rank, local_rank, world_size, device, backend, axes, degrees=degrees)


def make_groups(groups: list[list[int]], rank: int) -> dist.ProcessGroup | None:
    """Make the group of every row, as all ranks must in one order; returns the one that `rank` is in."""
    if len(groups[0]) == 1:
        return None
    if len(groups) == 1:
        return dist.group.WORLD
    made = [dist.new_group(ranks) for ranks in groups]
    return next(group for group, ranks in zip(made, groups, strict=True) if rank in ranks)


def close_mesh(mesh: Mesh) -> None:
    """Leave the process group, if there is one."""
    if mesh.watchdog is not None:
        mesh.watchdog.stop()
    if mesh.backend != "none":
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
