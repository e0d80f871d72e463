"""What tensor parallelism adds between backward and the update: sums of shares, and a norm that counts once.

Both work on what the data strategy left: whole gradients, or this rank's shards of them. Ranks of the tp axis have
parts of equal shape, so their shards lie alike.
"""

from collections import defaultdict

import torch
from torch import Tensor

from parallel.collectives import all_reduce
from parallel.mesh import Mesh
from parallel.tensor_parallel_placement import Placement

# Parameters, or shards of them, whose gradients this rank holds; in one order on all ranks of the axis.
Held = list[tuple[Placement, Tensor]]


@torch.no_grad()
def sum_shares(held: Held, mesh: Mesh, axis: str) -> None:
    """Replace each partial gradient by the sum over the ranks that hold copies: one all-reduce a dtype, in place.

    A parameter in several parts has a slot for each in the message, of which a rank fills its own. One without a
    gradient has a slot too, so that the message is the same in every step.
    """
    rank = mesh.rank_in(axis)
    by_dtype: dict[torch.dtype, Held] = defaultdict(list)
    for placement, param in held:
        if placement.partial:
            by_dtype[param.dtype].append((placement, param))
    for dtype, shares in by_dtype.items():
        sizes = [placement.parts * param.numel() for placement, param in shares]
        message = torch.zeros(sum(sizes), dtype=dtype, device=shares[0][1].device)
        slots, gradients = [], []
        for slot, (placement, param) in zip(message.split(sizes), shares, strict=True):
            if param.grad is not None:
                slots.append(slot.view(placement.parts, -1)[placement.part(rank)].view(param.shape))
                gradients.append(param.grad)
        if gradients:
            torch._foreach_copy_(slots, gradients)
        all_reduce(message, mesh, axis, "sum")
        if gradients:
            torch._foreach_copy_(gradients, slots)


@torch.no_grad()
def norm_over(held: Held, mesh: Mesh, axes: list[str]) -> Tensor:
    """The L2 norm of the whole gradient, at least float32, equal bits on every rank; each element counts once.

    `axes` are those over which gradients are spread: that of the shards, if they are sharded, and last the tp axis.
    """
    rank = mesh.rank_in(axes[-1])
    first = [param.grad for placement, param in held if placement.copy(rank) == 0]  # of its copies
    own = [gradient for gradient in first if gradient is not None and gradient.numel()]
    dtype = torch.promote_types(held[0][1].dtype, torch.float32)
    total = torch.zeros((), device=held[0][1].device, dtype=dtype)
    if own:
        total = torch.stack(torch._foreach_norm(own, 2.0, dtype=dtype)).square().sum()
    for axis in axes:
        total = all_reduce(total, mesh, axis, "sum")
    return total.sqrt()
