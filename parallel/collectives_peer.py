"""Ranks of one host that read each other's memory: collectives by copy engines, in place of the backend's kernels.

NCCL's kernels hold processors of a GPU for as long as a message travels, and the products beside it run slower for it;
a copy from another GPU's memory is done by copy engines, which hold none. So a sum here is: meet, copy the others' part
of this rank's share, add it (the one kernel, over a share of the bytes), meet, copy the shares that the others have
finished. The idea is that of torch's low-contention collectives over symmetric memory, which maps the memory and lets
ranks meet in stream order; what differs is that buffers are ours, lie there from the start and are summed in place.

On CPUs the same steps run over shared memory and gloo, one after the other when the result is waited for.
"""

import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from configs.errors import UserError
from parallel.collectives import all_gather_json, barrier
from parallel.collectives_pending import Pending, start
from parallel.mesh import Mesh

TRANSPORTS = ("backend", "peer")
ALIGNMENT_BYTES = 512  # of a buffer's start and of the shares in it
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # the same for all processes of a machine, and for no others


class PeerMemory:
    """`nbytes` on every rank of the axis that the others can read; all ranks make it together, with equal sizes.

    `take` hands out buffers, in one order on all ranks. Raises UserError where the ranks share no machine, or their
    GPUs cannot read each other.
    """

    def __init__(self, nbytes: int, mesh: Mesh, axis: str):
        self.mesh, self.axis, self.taken = mesh, axis, 0
        self.size, self.rank = mesh.size(axis), mesh.rank_in(axis)
        self.mapping: Any = None  # of the others' memory, on GPUs
        if self.size == 1:
            self.arenas = [torch.empty(nbytes, dtype=torch.uint8, device=mesh.device)]
            return
        check_reachable(mesh, axis)
        nbytes = max(nbytes, ALIGNMENT_BYTES)  # of nothing there is no mapping
        self.arenas = self.map_devices(nbytes) if mesh.device.type == "cuda" else map_files(nbytes, mesh, axis)

    def map_devices(self, nbytes: int) -> list[Tensor]:
        from torch.distributed import _symmetric_memory as symmetric

        own = symmetric.empty(nbytes, dtype=torch.uint8, device=self.mesh.device)
        self.mesh.peer_bytes += nbytes
        weakref.finalize(self, give_back_bytes, self.mesh, nbytes)
        try:
            self.mapping = symmetric.rendezvous(own, self.mesh.group(self.axis))
        except RuntimeError as error:
            raise UserError(
                f"parallel.transport=peer: the GPUs' memory could not be shared ({error}); ranks in containers of "
                f"their own must share process ids and /tmp, or use parallel.transport=backend"
            ) from error
        others = [self.mapping.get_buffer(place, (nbytes,), torch.uint8) for place in range(self.size)]
        return [own if place == self.rank else arena for place, arena in enumerate(others)]

    def meet(self) -> None:
        """Nothing after this, in the current stream, begins before all ranks of the axis have come so far in theirs.

        Ranks meet in one order, so that a memory's collectives belong on one stream.
        """
        if self.size == 1:
            return
        if self.mapping is not None:
            self.mapping.barrier(channel=0)
        else:
            dist.barrier(group=self.mesh.group(self.axis))

    def take(self, numel: int, dtype: torch.dtype) -> "PeerBuffer":
        """The next (numel,) of the memory, on this rank and on the others."""
        begin, end = self.taken, self.taken + numel * dtype.itemsize
        assert end <= self.arenas[0].numel(), f"{end} bytes asked for of {self.arenas[0].numel()}"
        self.taken = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return PeerBuffer(self, [arena[begin:end].view(dtype) for arena in self.arenas])


def give_back_bytes(mesh: Mesh, nbytes: int) -> None:
    mesh.peer_bytes -= nbytes


def peer_bytes(sizes: list[tuple[int, torch.dtype]]) -> int:
    """What PeerMemory needs for buffers of these (numel, dtype)."""
    return sum(-(-numel * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for numel, dtype in sizes)


class PeerBuffer:
    """One flat tensor on every rank of the axis: `tensor` is this rank's, `tensors[i]` that of the rank at place i.

    The collectives below are in place and complete: when one is over, the others have read what they needed, and this
    rank may overwrite its tensor.
    """

    def __init__(self, memory: PeerMemory, tensors: list[Tensor]):
        self.memory, self.tensors, self.tensor = memory, tensors, tensors[memory.rank]
        numel = self.tensor.numel()
        aligned = ALIGNMENT_BYTES // self.tensor.element_size()
        share = -(-numel // (memory.size * aligned)) * aligned
        self.shares = [slice(min(i * share, numel), min((i + 1) * share, numel)) for i in range(memory.size)]
        self.own_share = self.shares[memory.rank]
        # Each rank begins with its next neighbour, so that no two read the same one at a time.
        self.others = [(memory.rank + step) % memory.size for step in range(1, memory.size)]

    def part(self, numel: int, dtype: torch.dtype) -> "PeerBuffer":
        """Its first bytes as a buffer (numel,) of this dtype."""
        nbytes = numel * dtype.itemsize
        return PeerBuffer(self.memory, [tensor.view(torch.uint8)[:nbytes].view(dtype) for tensor in self.tensors])

    def use_equal_shares(self) -> "PeerBuffer":
        """Shares of exactly numel / P, as reduce-scatter and all-gather have them; the ranks must divide numel."""
        size, numel = self.memory.size, self.tensor.numel()
        assert numel % size == 0, f"{numel} elements over {size} ranks"
        self.shares = [slice(i * (numel // size), (i + 1) * (numel // size)) for i in range(size)]
        self.own_share = self.shares[self.memory.rank]
        return self

    @torch.no_grad()
    def sum_own_share(self, out: Tensor) -> None:
        """`out` becomes the sum over the ranks of this rank's share; the other shares stay as they are."""
        self.memory.meet()
        received = out.new_empty(len(self.others), out.numel())  # (P - 1, n)
        for row, place in zip(received, self.others, strict=True):
            row.copy_(self.tensors[place][self.own_share])
        own = self.tensor[self.own_share]
        torch.add(own, received[0] if len(received) == 1 else received.sum(0), out=out)
        self.memory.meet()

    @torch.no_grad()
    def gather_shares(self) -> None:
        """Every share becomes that of the rank whose it is."""
        for place in self.others:
            self.tensor[self.shares[place]].copy_(self.tensors[place][self.shares[place]])
        self.memory.meet()

    def all_reduce(self) -> None:
        self.sum_own_share(self.tensor[self.own_share])
        self.gather_shares()

    def all_gather(self) -> None:
        self.memory.meet()
        self.gather_shares()


class AtWait:
    """On a CPU: a collective that runs when it is waited for, in the order in which the ranks wait."""

    def __init__(self, run: Callable[[], None]):
        self.run, self.is_over = run, False

    def wait(self) -> None:
        if not self.is_over:
            with _disable_current_modes():  # who counts this rank's tensors must not see those of others
                self.run()
            self.is_over = True

    def is_completed(self) -> bool:
        return self.is_over

    def get_future(self) -> Any:
        raise RuntimeError("it ends when it is waited for")


def start_peer(
    run: Callable[[], None], result: Tensor, op: str, payload: Tensor, memory: PeerMemory, stream: str
) -> Pending:
    """Begin a collective on its stream, logged as the backend's would be."""
    if not memory.mesh.is_active(memory.axis):
        run()
        return Pending(result)

    def begin(async_op: bool) -> Any:
        return AtWait(run) if async_op else run()

    return start(begin, result, memory.mesh, (op, memory.axis, [payload]), stream)


def start_peer_all_reduce(buffer: PeerBuffer, stream: str = "collectives") -> Pending:
    """Sum a buffer over the ranks, in place on all of them; wait() returns its tensor."""
    return start_peer(buffer.all_reduce, buffer.tensor, "all_reduce_sum", buffer.tensor, buffer.memory, stream)


def start_peer_reduce_scatter(buffer: PeerBuffer, stream: str = "collectives") -> Pending:
    """wait() returns the sum of this rank's share as a tensor of its own, (numel / P,)."""
    out = torch.empty_like(buffer.tensor[buffer.own_share])

    def run() -> None:
        buffer.sum_own_share(out)

    return start_peer(run, out, "reduce_scatter_sum", buffer.tensor, buffer.memory, stream)


def start_peer_all_gather(buffer: PeerBuffer, stream: str = "collectives") -> Pending:
    """Fill a buffer, of which each rank has its own share, in place; wait() returns its tensor."""
    return start_peer(buffer.all_gather, buffer.tensor, "all_gather", buffer.tensor, buffer.memory, stream)


def check_reachable(mesh: Mesh, axis: str) -> None:
    """UserError unless all ranks of the axis are processes of one machine, whose GPUs can read each other."""
    machine = BOOT_ID.read_text(encoding="ascii").strip() if BOOT_ID.exists() else "unknown"
    ranks = all_gather_json([machine, mesh.device.index], mesh, axis)
    if any(other != machine for other, _ in ranks):
        raise UserError(
            f"parallel.transport=peer needs all {len(ranks)} ranks along {axis} on one machine; "
            f"use parallel.transport=backend"
        )
    own, fault = mesh.device.index, None
    if mesh.device.type == "cuda":
        blind = [i for _, i in ranks if i != own and not torch.cuda.can_device_access_peer(own, i)]
        if blind:
            fault = f"needs GPUs that can read each other's memory, and cuda:{own} cannot read cuda:{blind[0]}"
    refuse_together(fault, mesh, axis)


def refuse_together(fault: str | None, mesh: Mesh, axis: str) -> None:
    """UserError on all ranks of the axis where one has met a fault: alone it would leave the others waiting."""
    faults = [told for told in all_gather_json(fault, mesh, axis) if told is not None]
    if faults:
        raise UserError(f"parallel.transport=peer {faults[0]}; use parallel.transport=backend")


def map_files(nbytes: int, mesh: Mesh, axis: str) -> list[Tensor]:
    """Shared memory of the processes of one machine, through files that are gone again when all have opened them.

    Raises UserError on all ranks where one has no room, or where they see different folders, as containers do.
    """
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()
    descriptor, path = tempfile.mkstemp(prefix="mew-peer-", dir=folder)
    try:
        refuse_together(reserve(descriptor, nbytes, folder), mesh, axis)
        paths = all_gather_json(path, mesh, axis)
        # Torch would make a file that is not there: sums of zeros, and no error.
        unseen = [other for other in paths if not Path(other).exists()]
        fault = f"needs ranks that share {folder}, and {unseen[0]} of another rank is not there" if unseen else None
        refuse_together(fault, mesh, axis)
        arenas = [torch.from_file(other, shared=True, size=nbytes, dtype=torch.uint8) for other in paths]
        barrier(mesh, axis)
    finally:
        os.close(descriptor)
        os.unlink(path)
    return arenas


def reserve(descriptor: int, nbytes: int, folder: str) -> str | None:
    """Give the file its size and its room; what is wrong, if there is none (a file of holes would kill its writer)."""
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        return f"needs {nbytes} bytes in {folder} on every rank, and there it says {error.strerror!r}; enlarge {folder}"
    return None
