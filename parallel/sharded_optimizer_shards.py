"""What a rank holds of a parameter, and an optimizer over such parts: shared by ZeRO-1 and FSDP.

A shard is a run of elements of the flattened parameter: a range of rows under FSDP, whatever part of a flat bucket
falls to the rank under ZeRO-1. It is a parameter of its own, so an element-wise optimizer (AdamW, SGD) needs no change;
padding is in no shard, so that nothing decays or is counted that is not a weight.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel.collectives import all_reduce, start_all_gather
from parallel.mesh import Mesh
from parallel.sharded_checkpoint_pieces import Piece


@dataclass
class Shard:
    """`local` holds elements start .. start + local.numel() of the parameter `name`, flattened, of full `shape`.

    `starts` gives the first element of every rank along the sharded axis and, last, the number of elements: rank r
    holds starts[r] .. starts[r + 1].
    """

    name: str
    shape: tuple[int, ...]
    starts: tuple[int, ...]
    rank: int
    local: nn.Parameter
    has_gradient: bool = False  # any rank had one in this step, as agreed by `agree_on_gradients`

    @property
    def start(self) -> int:
        return self.starts[self.rank]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def piece(self, replicas: int = 1, replica: int = 0) -> Piece:
        """For the checkpoint; `replicas` ranks hold the same elements and this is number `replica`."""
        return Piece(self.name, self.shape, self.start, self.local.detach(), replicas, replica)

    def optimizer_piece(self, replicas: int = 1, replica: int = 0) -> Piece:
        """As `piece`, but `local` is the parameter itself: the key of the optimizer's state."""
        return Piece(self.name, self.shape, self.start, self.local, replicas, replica)


def agree_on_gradients(shards: list[Shard], present: list[bool], mesh: Mesh, axes: Iterable[str]) -> None:
    """Set `has_gradient` of each shard: whether any rank of the axes has one. A small all-reduce an axis, on the host.

    A gradient missing on one rank counts as zero there; one missing on all ranks stays missing, and the optimizer
    leaves the parameter alone as it does on a single device.
    """
    counts = torch.tensor(present, dtype=torch.int32)
    for axis in axes:
        counts = all_reduce(counts, mesh, axis, "sum")
    for shard, count in zip(shards, counts.tolist(), strict=True):
        shard.has_gradient = count > 0


@torch.no_grad()
def sharded_norm(shards: Iterable[Shard], mesh: Mesh, axis: str) -> Tensor:
    """The L2 norm of the whole gradient, at least float32, the same bits on every rank; no host synchronisation.

    Each parameter counts once: `axis` is the one that the shards are spread over.
    """
    shards = list(shards)
    gradients = [shard.local.grad for shard in shards if shard.local.grad is not None and shard.local.grad.numel()]
    device = shards[0].local.device if shards else None
    wide = torch.promote_types(shards[0].local.dtype, torch.float32) if shards else torch.float32
    total = torch.zeros((), device=device, dtype=wide)
    if gradients:
        total = torch.stack(torch._foreach_norm(gradients, 2.0, dtype=wide)).square().sum()
    return all_reduce(total, mesh, axis, "sum").sqrt()


def use_shards(optimizer: Optimizer, shards: dict[str, Shard]) -> None:
    """Put shards in the place of the full parameters of every group; to be called before the first step.

    A rank that holds nothing of a parameter does not list it. Raises AssertionError for a parameter that was wrapped by
    no strategy, since it would be updated from an unsynchronised gradient.
    """
    assert not optimizer.state, "the optimizer has stepped already; wrap the model before the first step"
    for group in optimizer.param_groups:
        unknown = [name for name in group["param_names"] if name not in shards]
        assert not unknown, f"{unknown[:3]} of the optimizer are not among the sharded parameters"
        held = [shards[name] for name in group["param_names"] if shards[name].local.numel()]
        group["params"] = [shard.local for shard in held]
        group["param_names"] = [shard.name for shard in held]


@torch.no_grad()
def gather_full(shards: list[Shard], values: list[Tensor], mesh: Mesh, axis: str) -> dict[str, Tensor]:
    """The full tensors of which `values` are this rank's parts: {name: tensor of the shard's full shape}.

    Every rank gathers every tensor, one after the other: for tests, samples and small models.
    """
    full = {}
    for shard, value in zip(shards, values, strict=True):
        lengths = [end - start for start, end in zip(shard.starts, shard.starts[1:], strict=False)]
        longest = max(lengths)
        padded = value.new_zeros(longest)
        padded[: value.numel()] = value.reshape(-1)
        rows = start_all_gather(padded, mesh, axis).wait().view(-1, longest)  # (P, longest)
        parts = [row[:length] for row, length in zip(rows, lengths, strict=True)]
        full[shard.name] = torch.cat(parts).view(shard.shape)
    return full
