"""Linear layers that read one input, as one node of autograd: fewer passes over memory in mixed precision.

Under autocast each layer would round its weight's gradient to bfloat16 and cast it back, and the layers' input
gradients would be added by passes of their own. Here a product writes the weight's gradient in the weight's dtype, and
the second and third product add to the input's gradient as they write it. torch.compile fuses those passes by itself,
so a compiled model keeps the layers as they are.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from llm.transformer_layers import Linear, project_each


def project_together(x: Tensor, layers: Sequence[Linear]) -> list[Tensor]:
    """[layer(x) for layer in layers], x (..., in); layers whose matmul has been swapped are called as they are."""
    if torch.compiler.is_compiling() or any(layer.matmul not in (F.linear, linear) for layer in layers):
        return project_each(x, layers)
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    return list(Projections.apply(x, len(layers), *weights, *biases))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear as a group of one: what Linear.matmul becomes."""
    if torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    return Projections.apply(x, 1, weight, bias)[0]


class Projections(torch.autograd.Function):
    """x (..., in), the number of layers, their weights (out, in), their biases (out,) or None -> outputs (..., out)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *parameters: Tensor | None):
        weights, biases = parameters[:count], parameters[count:]
        autocast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
        rows = x.to(dtype).reshape(-1, x.shape[-1])  # (N, in)
        matrices = [weight.to(dtype) for weight in weights]
        ctx.save_for_backward(rows, *matrices)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        ctx.kinds = [None if parameter is None else parameter.dtype for parameter in parameters]
        pairs = zip(matrices, biases, strict=True)
        outputs = [F.linear(rows, matrix, None if bias is None else bias.to(dtype)) for matrix, bias in pairs]
        return tuple(out.view(*x.shape[:-1], -1) for out in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor):
        rows, *matrices = ctx.saved_tensors
        flat = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]  # (N, out)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.mm(flat[0], matrices[0])  # (N, in)
            for gradient, matrix in zip(flat[1:], matrices[1:], strict=True):
                dx.addmm_(gradient, matrix)
            dx = dx.view(ctx.shape).to(ctx.dtype)
        needed, count = ctx.needs_input_grad[2:], len(matrices)
        dweights = [
            product(gradient.t(), rows, kind) if need else None
            for gradient, kind, need in zip(flat, ctx.kinds[:count], needed[:count], strict=True)
        ]
        dbiases = [
            gradient.sum(0, dtype=kind) if need else None
            for gradient, kind, need in zip(flat, ctx.kinds[count:], needed[count:], strict=True)
        ]
        return dx, None, *dweights, *dbiases


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b in `dtype`; on a GPU a float32 result of 16-bit factors is written without rounding between."""
    if a.dtype == dtype:
        return torch.mm(a, b)
    if a.is_cuda and dtype == torch.float32:
        return torch.ops.aten.mm.dtype(a, b, dtype)
    return torch.mm(a.to(dtype), b.to(dtype))
