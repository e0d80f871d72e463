"""Backward in two parts (Qi et al. 2024): a linear layer's input gradient now, its weight gradient when asked for.

`DeferredGradients.matmul` goes where a Linear keeps its matrix product. In backward it gives the input's gradient and
puts aside what the weight's needs; `run` makes those of one stage and micro-batch. `DeferredGradients.project` does so
for layers that read one input, whose gradient is made by products that add to each other. Weight gradients reach a
parameter that has hooks through autograd, so these fire as ever; to others the products add them. Biases and other
parameters get theirs at once: they cost little.
"""

from collections.abc import Hashable, Sequence
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
        # Weights in the products' dtype, kept from step to step by who renews them (GraphedStages), else None.
        self.casts: dict[Tensor, Tensor] | None = None

    def matrix(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """A weight in the products' dtype."""
        if self.casts is None or weight.dtype == dtype:
            return weight.detach().to(dtype)
        if weight not in self.casts:
            self.casts[weight] = weight.detach().to(dtype)
        return self.casts[weight]

    @torch.no_grad()
    def renew_casts(self) -> None:
        """Make the kept casts those of the weights as they are now."""
        if self.casts:
            torch._foreach_copy_(list(self.casts.values()), list(self.casts))

    def begin(self, key: Hashable) -> None:
        """What the next backward pass leaves to do belongs to `key`."""
        self.current = self.waiting[key] = []

    def put_aside(self, weights: Sequence[Tensor], rows: Tensor, gradients: Sequence[Tensor]) -> None:
        """Leave to the current key the gradients of weights that read `rows` (N, in), outputs' `gradients` (N, out)."""
        assert self.current is not None, "a deferred weight gradient needs begin() before its backward pass"
        self.current += [(weight, rows, own) for weight, own in zip(weights, gradients, strict=True)]

    def matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x weight^T + bias: (..., in) -> (..., out), as F.linear, under autocast in its dtype."""
        return self.products(x, [weight], [bias])[0]

    def project(self, x: Tensor, layers: Sequence[Any]) -> list[Tensor]:
        """The outputs of layers, with weight and bias, that read one input x (..., in), by one node of autograd."""
        return self.products(x, [layer.weight for layer in layers], [layer.bias for layer in layers])

    def products(self, x: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> list[Tensor]:
        if not (x.requires_grad and all(weight.requires_grad for weight in weights)):
            # A layer that ends backward has nothing to give first.
            return [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        device = x.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x, biases = x.to(dtype), [None if bias is None else bias.to(dtype) for bias in biases]
        # Weights go in unseen by autograd, or their hooks would fire for gradients that are not there yet.
        unseen = [self.matrix(weight, x.dtype) for weight in weights]
        return list(DeferredProducts.apply(x, (weights, self), *unseen, *biases))

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
                factors = (gradients.t(), rows)  # (out, N), (N, in)
                if weight.is_leaf and weight.grad is not None and not has_hooks(weight):
                    add_product(weight.grad, *factors)
                    continue
                products.append(product(*factors, weight.dtype))  # (out, in)
                weights.append(weight)
            with torch.enable_grad():
                leaves = [weight.view_as(weight) for weight in weights]
            if leaves:
                torch.autograd.backward(leaves, products)

    @torch.no_grad()
    def add_to(self, key: Hashable, buffers: dict[Tensor, Tensor]) -> list[Tensor]:
        """The same into a buffer for each weight, by the products themselves; no hook fires. Returns the weights."""
        kept, self.current = self.waiting.pop(key), None
        for weight, rows, gradients in kept:
            add_product(buffers[weight], gradients.t(), rows)
        return [weight for weight, _, _ in kept]


def has_hooks(weight: Tensor) -> bool:
    """Whether somebody waits for the gradient, before or after it is added."""
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a b; on a GPU a float32 `out` takes 16-bit factors without rounding or a pass between."""
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    elif out.is_cuda and out.dtype == torch.float32:
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)
    else:
        out.add_(torch.mm(a, b).to(out.dtype))


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b in `dtype`; on a GPU a float32 result of 16-bit factors is written without rounding or a pass between."""
    if a.dtype == dtype:
        return torch.mm(a, b)
    if a.is_cuda and dtype == torch.float32:
        return torch.ops.aten.mm.dtype(a, b, dtype)
    return torch.mm(a, b).to(dtype)


class DeferredProducts(torch.autograd.Function):
    """x (..., in), whom gradients go to, weights (out, in) and biases (out,) or None in x's dtype -> outputs."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, target: tuple[list[Tensor], DeferredGradients], *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.weights, ctx.deferred = target
        count = len(ctx.weights)
        matrices, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(x, *matrices)
        ctx.has_bias = [bias is not None for bias in biases]
        with torch.autocast(x.device.type, enabled=False):
            return tuple(F.linear(x, matrix, bias) for matrix, bias in zip(matrices, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *matrices = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])  # (N, in)
        flat = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]  # (N, out)
        ctx.deferred.put_aside(ctx.weights, rows, flat)
        dx = torch.mm(flat[0], matrices[0])  # (N, in)
        for own, matrix in zip(flat[1:], matrices[1:], strict=True):
            dx.addmm_(own, matrix)
        dbiases = [own.sum(0) if has_bias else None for own, has_bias in zip(flat, ctx.has_bias, strict=True)]
        return dx.view(x.shape), None, *[None] * len(flat), *dbiases
