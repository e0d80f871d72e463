"""Backward in two parts (Qi et al. 2024): a linear layer's input gradient now, its weight gradient when asked for.

`DeferredGradients.matmul` goes where a Linear keeps its matrix product. In backward it gives the input's gradient and
puts aside what the weight's needs; `run` makes those of one stage and micro-batch. They reach the parameter through
autograd, so hooks on it fire as ever. Biases and other parameters get their gradients at once: they cost little.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

TOGETHER = 7  # weights of a block

Kept = list[tuple[Tensor, Tensor, Tensor]]  # weight, rows (N, in), gradients (N, out)


class DeferredGradients:
    """Weight gradients that wait, by the key that `begin` was called with before the backward pass."""

    def __init__(self) -> None:
        self.waiting: dict[Hashable, Kept] = {}
        self.current: Kept | None = None

    def begin(self, key: Hashable) -> None:
        """What the next backward pass leaves to do belongs to `key`."""
        self.current = self.waiting[key] = []

    def matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x weight^T + bias: (..., in) -> (..., out), as F.linear, under autocast in its dtype."""
        if not (weight.requires_grad and x.requires_grad):  # a layer that ends backward has nothing to give first
            return F.linear(x, weight, bias)
        device = x.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        # The weight goes in unseen by autograd, or its hooks would fire for a gradient that is not there yet.
        return DeferredLinear.apply(x, bias, weight.detach(), (weight, self))

    @torch.no_grad()
    def run(self, key: Hashable) -> None:
        """Add the weight gradients that `key` left to those of the parameters."""
        kept = self.waiting.pop(key)
        if kept is self.current:  # or the last micro-batch's factors would live until the next one's backward pass
            self.current = None
        kept.reverse()
        while kept:
            # A few at a time: a call of autograd costs the host as much as several products, but all of a stage's
            # gradients at once would need as much memory again as they have.
            weights, products = [], []
            while kept and len(weights) < TOGETHER:
                weight, rows, gradients = kept.pop()
                products.append(product(gradients.t(), rows, weight.dtype))  # (out, in)
                weights.append(weight)
            with torch.enable_grad():
                leaves = [weight.view_as(weight) for weight in weights]
            torch.autograd.backward(leaves, products)


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b in `dtype`; on a GPU a float32 result of 16-bit factors is written without rounding or a pass between."""
    if a.dtype == dtype:
        return torch.mm(a, b)
    if a.is_cuda and dtype == torch.float32:
        return torch.ops.aten.mm.dtype(a, b, dtype)
    return torch.mm(a, b).to(dtype)


class DeferredLinear(torch.autograd.Function):
    """x (..., in) in the dtype of the product, bias (out,) or None, weight (out, in), and who gets its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, weight: Tensor, target: tuple[Tensor, DeferredGradients]
    ) -> Tensor:
        matrix = weight.to(x.dtype)
        ctx.save_for_backward(x, matrix)
        ctx.has_bias, (ctx.weight, ctx.deferred) = bias is not None, target
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, matrix, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, matrix = ctx.saved_tensors
        rows, flat = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])  # (N, in), (N, out)
        assert ctx.deferred.current is not None, "a deferred weight gradient needs begin() before its backward pass"
        ctx.deferred.current.append((ctx.weight, rows, flat))
        return torch.mm(flat, matrix).view(x.shape), flat.sum(0) if ctx.has_bias else None, None, None
