"""Plain data parallelism: every rank holds the whole model, and gradients are summed once after backward.

No buckets and no overlap: the baseline that everything faster must equal. Sums, not means: each rank's loss is already
divided by the number of target tokens of the global batch, so the sum over ranks is the gradient of that batch however
unevenly its targets are spread.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from parallel.collectives import all_reduce_sum, broadcast
from parallel.mesh import Mesh

MODES = ("flat", "per_parameter")


def broadcast_parameters(model: nn.Module, mesh: Mesh, axis: str = "dp") -> None:
    """Give every rank of the axis the parameters and buffers of its rank 0."""
    for tensor in [*model.parameters(), *model.buffers()]:
        broadcast(tensor, mesh, axis)


@torch.no_grad()
def synchronise_gradients(parameters: Iterable[nn.Parameter], mesh: Mesh, axis: str = "dp", mode: str = "flat") -> None:
    """Replace every gradient by its sum over the ranks of the axis; call it once, after the last backward pass.

    "flat" copies the gradients of each dtype into one buffer, one reduction each; "per_parameter" sends each on its own
    and copies nothing. A gradient missing on one rank counts as zero; one missing on all ranks stays missing.
    """
    assert mode in MODES, f"mode={mode!r}, known {MODES}"
    if mesh.size(axis) == 1:
        return
    parameters = [param for param in parameters if param.requires_grad]
    present = torch.tensor([param.grad is not None for param in parameters], dtype=torch.int32)  # on the host: no sync
    present = all_reduce_sum(present, mesh, axis).tolist()
    gradients = []
    for param, count in zip(parameters, present, strict=True):
        if count and param.grad is None:
            param.grad = torch.zeros_like(param)
        if count:
            gradients.append(param.grad)
    if mode == "per_parameter":
        for gradient in gradients:
            all_reduce_sum(gradient, mesh, axis)
    else:
        all_reduce_flat(gradients, mesh, axis)


def all_reduce_flat(tensors: list[Tensor], mesh: Mesh, axis: str) -> None:
    """Sum tensors over the axis through one flat buffer a dtype."""
    by_dtype = defaultdict(list)
    for tensor in tensors:
        by_dtype[tensor.dtype].append(tensor)
    for same in by_dtype.values():
        buffer = all_reduce_sum(torch.cat([tensor.reshape(-1) for tensor in same]), mesh, axis)
        pieces = buffer.split([tensor.numel() for tensor in same])
        torch._foreach_copy_(same, [piece.view(tensor.shape) for piece, tensor in zip(pieces, same, strict=True)])
