"""The norm of gradients and their scaling, over tensors of one rank; a strategy adds up what lies on other ranks."""

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def gradient_norm(params: Iterable[Tensor]) -> Tensor:
    """The L2 norm of all gradients as one vector, a scalar of at least float32 on their device; no host sync."""
    params = list(params)
    gradients = [param.grad for param in params if param.grad is not None]
    if not gradients:
        return torch.zeros((), device=params[0].device if params else None)
    dtype = torch.promote_types(gradients[0].dtype, torch.float32)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0, dtype=dtype)))


@torch.no_grad()
def scale_gradients(params: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiply the gradients by min(1, max_norm / norm), in place and without a host sync."""
    gradients = [param.grad for param in params if param.grad is not None]
    if not gradients or (norm.device.type == "cpu" and norm <= max_norm):
        return
    torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
