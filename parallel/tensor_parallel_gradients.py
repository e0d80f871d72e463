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

Held = list[tuple[Placement, Tensor]]  # gradients that this rank holds, in one order on all ranks of the axis


@torch.no_grad()
def sum_shares(held: Held, mesh: Mesh, axis: str) -> None:
    """Replace each partial gradient by the sum over the ranks that hold copies: one all-reduce a dtype, in place.

    A parameter in several parts has a slot for each in the message, of which a rank fills its own.
    """
    rank = mesh.rank_in(axis)
    by_dtype: dict[torch.dtype, Held] = defaultdict(list)
    for placement, gradient in held:
        if placement.partial:
            by_dtype[gradient.dtype].append((placement, gradient))
    for dtype, shares in by_dtype.items():
        sizes = [placement.parts * gradient.numel() for placement, gradient in shares]
        message = torch.zeros(sum(sizes), dtype=dtype, device=shares[0][1].device)
        slots = [
            slot.view(placement.parts, -1)[placement.part(rank)].view(gradient.shape)
            for slot, (placement, gradient) in zip(message.split(sizes), shares, strict=True)
        ]
        gradients = [gradient for _, gradient in shares]
        torch._foreach_copy_(slots, gradients)
        all_reduce(message, mesh, axis, "sum")
        torch._foreach_copy_(gradients, slots)


@torch.no_grad()
def norm_over(held: Held, mesh: Mesh, axes: list[str], like: Tensor) -> Tensor:
    """The L2 norm of the whole gradient, at least float32, equal bits on every rank; each element counts once.

    `axes` are those over which gradients are spread: that of the shards, where there are any, and last the tp axis.
    `like` gives device and dtype where a rank holds nothing.
    """
    rank = mesh.rank_in(axes[-1])
    own = [gradient for placement, gradient in held if placement.copy(rank) == 0 and gradient.numel()]
    dtype = torch.promote_types(like.dtype, torch.float32)
    total = torch.zeros((), device=like.device, dtype=dtype)
    if own:
        total = torch.stack(torch._foreach_norm(own, 2.0, dtype=dtype)).square().sum()
    for axis in axes:
        total = all_reduce(total, mesh, axis, "sum")
    return total.sqrt()
