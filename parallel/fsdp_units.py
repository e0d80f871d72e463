"""One unit of FSDP: the parameters that are gathered, freed and whose gradients are reduced together.

Between uses a rank holds its shards in the master dtype and nothing else: the memory of the full parameters is a
storage of zero bytes, grown for the gather and freed after use, so that parameters keep their identity (and autograd
what it saved of them) while their memory comes and goes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from parallel.collectives import start_all_gather, start_all_reduce, start_reduce_scatter
from parallel.collectives_pending import Pending
from parallel.fsdp_layout import ParamPlace, UnitLayout
from parallel.mesh import Mesh
from parallel.sharded_optimizer_shards import Shard

SHARDED, GATHERING, GATHERED = "sharded", "gathering", "gathered"


class FsdpUnit:
    """Shards, full parameters and gradients of one unit; the order of calls is Fsdp's affair."""

    def __init__(self, layout: UnitLayout, mesh: Mesh, axis: str, master_dtype: torch.dtype):
        self.layout, self.mesh, self.axis = layout, mesh, axis
        self.rank = mesh.rank_in(axis)
        self.master = torch.zeros(layout.share, dtype=master_dtype, device=mesh.device)  # (share,)
        self.shards = [self.make_shard(place) for place in layout.places]
        self.memory = torch.empty(layout.full_bytes, dtype=torch.uint8, device=mesh.device)
        self.params = [self.make_param(place) for place in layout.places]
        self.targets = [self.padded_bytes(place) for place in layout.places]
        self.memory.untyped_storage().resize_(0)
        self.state = SHARDED
        self.gathering: Pending | None = None
        self.reducing: Pending | None = None
        self.gradient: Tensor | None = None  # (gradient_share,) master dtype: what has been reduced in this step
        self.partial: Tensor | None = None  # (P * gradient_share,): what has not been, of earlier micro-batches
        self.trainable = [param for param in self.params if param.requires_grad]
        self.present = [False] * len(self.trainable)
        self.counts_gradients = len(self.trainable) == len(self.params)
        self.ready = 0  # gradients that backward has finished in this micro-batch
        self.in_backward = False
        self.is_reduced = False  # in this micro-batch

    def make_shard(self, place: ParamPlace) -> Shard:
        starts = place.starts(self.layout.ranks)
        numel = starts[self.rank + 1] - starts[self.rank]
        rest = place.shape[1:]
        shape = (numel // (place.block // place.rows), *rest) if place.block else (0, *rest)
        local = self.master[place.offset : place.offset + numel].view(shape if place.shape else (numel,))
        return Shard(place.name, place.shape, starts, self.rank, nn.Parameter(local, requires_grad=place.trainable))

    def make_param(self, place: ParamPlace) -> nn.Parameter:
        # .data gives an alias with a version counter of its own: refilling the memory for backward must not look to
        # autograd like a change of what it saved in forward, since the values are the same.
        flat = self.memory.data[place.full_offset :][: place.numel * place.dtype.itemsize].view(place.dtype)
        return nn.Parameter(flat.view(place.shape), requires_grad=place.trainable)

    def padded_bytes(self, place: ParamPlace) -> Tensor:
        """The memory of a gathered parameter and its padding as (P, block), in the messages' dtype."""
        size = self.layout.ranks * place.block * place.dtype.itemsize
        padded = self.memory[place.full_offset :][:size].view(self.layout.message_dtype)
        return padded.view(self.layout.ranks, -1)

    @torch.no_grad()
    def start_gather(self) -> None:
        """Begin to gather the parameters; does nothing when they are there or on their way."""
        if self.state != SHARDED:
            return
        layout = self.layout
        message = torch.empty(layout.ranks * layout.slot_bytes, dtype=torch.uint8, device=self.master.device)
        own = message[self.rank * layout.slot_bytes :][: layout.slot_bytes]
        for dtype, first, end, begin in layout.ranges():
            own[begin : begin + (end - first) * dtype.itemsize].view(dtype).copy_(self.master[first:end])
        message, own = message.view(layout.message_dtype), own.view(layout.message_dtype)
        self.gathering = start_all_gather(own, self.mesh, self.axis, out=message, stream="gather")
        self.state = GATHERING

    @torch.no_grad()
    def finish_gather(self) -> None:
        """Have the full parameters in place for the work that is issued from here on."""
        self.start_gather()
        if self.state == GATHERED:
            return
        message = self.gathering.wait().view(self.layout.ranks, -1)  # (P, slot)
        self.gathering = None
        self.memory.untyped_storage().resize_(self.layout.full_bytes)
        sizes = [size // self.layout.message_dtype.itemsize for size in self.layout.split_sizes()]
        if sum(sizes) < message.shape[1]:
            message = message[:, : sum(sizes)]
        torch.split_with_sizes_copy(message, sizes, dim=1, out=self.targets)
        self.state = GATHERED

    def reshard(self) -> None:
        """Free the full parameters."""
        if self.state == GATHERING:
            self.gathering.wait()
            self.gathering = None
        elif self.state == GATHERED:
            self.memory.untyped_storage().resize_(0)
        self.state = SHARDED

    @torch.no_grad()
    def take_gradients(self, into: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The full gradients as a message (P * gradient_share,), added to `into` if given; the parameters lose them."""
        gradients = [param.grad for param in self.trainable]
        for param in self.trainable:
            param.grad = None
        for index, gradient in enumerate(gradients):
            self.present[index] |= gradient is not None
        places = [place for place in self.layout.places if place.trainable]
        ranks, share = self.layout.ranks, self.layout.gradient_share
        message = into
        if into is None:
            whole = all(g is not None for g in gradients) and all(p.block * ranks == p.numel for p in places)
            make = torch.empty if whole else torch.zeros  # padding and missing gradients count as zero
            message = make(ranks * share, dtype=dtype, device=self.master.device)
        by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        slots = message.split([place.block for place in places] * ranks)  # rank by rank, parameter by parameter
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                pairs = by_dtype.setdefault(gradient.dtype, ([], []))
                add_blocks(slots[index :: len(places)], gradient, places[index].block, pairs)
        for targets, sources in by_dtype.values():
            if into is None:  # of one dtype and in one dimension: few launches for all, casts included
                torch._foreach_copy_(targets, sources)
            else:
                torch._foreach_add_(targets, [source.to(message.dtype) for source in sources])
        return message

    def start_reduce(self, message: Tensor) -> None:
        self.reducing = start_reduce_scatter(message, self.mesh, self.axis, stream="reduce")

    @torch.no_grad()
    def finish_reduce(self) -> None:
        """Add what the last reduce-scatter gave to this step's gradient."""
        if self.reducing is None:
            return
        reduced = self.reducing.wait().to(self.master.dtype)  # (gradient_share,)
        self.reducing = None
        self.gradient = reduced if self.gradient is None else self.gradient.add_(reduced)

    def start_replicate(self, axis: str) -> Pending:
        """Sum this step's gradient over the ranks that hold the same shards."""
        return start_all_reduce(self.gradient, self.mesh, axis, stream="reduce")

    def hand_over_gradients(self) -> None:
        """Give each shard its part of the gradient, or None where no rank had one."""
        for shard, place in zip(self.shards, self.layout.places, strict=True):
            shard.local.grad = None
            if shard.has_gradient and place.trainable:
                part = self.gradient[place.gradient_offset :][: shard.local.numel()]
                shard.local.grad = part.view(shard.local.shape)
        self.gradient = None
        self.present = [False] * len(self.trainable)

    def trainable_shards(self) -> list[Shard]:
        return [shard for shard, place in zip(self.shards, self.layout.places, strict=True) if place.trainable]


def add_blocks(slots: Sequence[Tensor], gradient: Tensor, block: int, pairs: tuple[list[Tensor], list[Tensor]]) -> None:
    """Append the places in a message that a gradient's rows go to, a rank's block each, and the rows themselves."""
    targets, sources = pairs
    for slot, rows in zip(slots, gradient.reshape(-1).split(block), strict=False):  # the last ranks may get none
        targets.append(slot if rows.numel() == block else slot[: rows.numel()])
        sources.append(rows)
