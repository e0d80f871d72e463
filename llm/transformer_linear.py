"""Linear layers that read one input, as one node of autograd: fewer passes over memory in mixed precision.

Under autocast each layer would round its weight's gradient to bfloat16 and cast it back, and the layers' input
gradients would be added by passes of their own. Here a product writes the weight's gradient in the weight's dtype, and
the second and third product add to the input's gradient as they write it. SwiGLU's two weights are cast into one
matrix: outputs and their gradients lie side by side, one product makes each of y, dx and dW. Attention's do not: who
keeps v would keep all three. torch.compile fuses most of this by itself, so a compiled model keeps its layers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from llm.transformer_layers import Linear, project_each


def project_together(x: Tensor, layers: Sequence[Linear]) -> list[Tensor]:
    """[layer(x) for layer in layers], x (..., in); layers whose matmul has been swapped are called as they are."""
    return project(x, layers, False)


def project_side_by_side(x: Tensor, layers: Sequence[Linear]) -> list[Tensor]:
    """The same; where weights must be cast, the outputs are the columns of one tensor."""
    return project(x, layers, True)


def project(x: Tensor, layers: Sequence[Linear], beside: bool) -> list[Tensor]:
    if torch.compiler.is_compiling() or not all(is_plain(layer.matmul) for layer in layers):
        return project_each(x, layers)
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    return list(Projections.apply(x, beside, *weights, *biases))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear as a group of one: what Linear.matmul becomes."""
    if torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    return Projections.apply(x, False, weight, bias)[0]


def is_plain(matmul: Callable) -> bool:
    """Whether it is x weight^T + bias and no more: torch's or ours."""
    return matmul in (F.linear, linear)


class Projections(torch.autograd.Function):
    """x (..., in), outputs side by side or not, weights (out, in), biases (out,) or None -> outputs (..., out)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, beside: bool, *parameters: Tensor | None):
        count = len(parameters) // 2
        weights, biases = parameters[:count], parameters[count:]
        autocast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
        rows = x.to(dtype).reshape(-1, x.shape[-1])  # (N, in)
        beside = beside and any(weight.dtype != dtype for weight in weights)
        matrices = [cast_side_by_side(weights, dtype)] if beside else [weight.to(dtype) for weight in weights]
        ctx.save_for_backward(rows, *matrices)
        ctx.shape, ctx.dtype, ctx.sizes = x.shape, x.dtype, [len(weight) for weight in weights]
        ctx.kinds = [None if parameter is None else parameter.dtype for parameter in parameters]
        if not beside:
            pairs = zip(matrices, biases, strict=True)
            outputs = [F.linear(rows, matrix, None if bias is None else bias.to(dtype)) for matrix, bias in pairs]
        else:
            bias = None if biases[0] is None else torch.cat(biases).to(dtype)
            outputs = F.linear(rows, matrices[0], bias).split(ctx.sizes, dim=-1)
        return tuple(out.view(*x.shape[:-1], -1) for out in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor):
        rows, *matrices = ctx.saved_tensors
        flat = [as_rows(gradient) for gradient in gradients]  # (N, out)
        needed, count = ctx.needs_input_grad[2:], len(flat)
        dbiases = [
            gradient.sum(0, dtype=kind) if need else None
            for gradient, kind, need in zip(flat, ctx.kinds[count:], needed[count:], strict=True)
        ]
        together = None if len(matrices) == count else columns_of_one(flat)
        if together is None:
            matrices = matrices if len(matrices) == count else matrices[0].split(ctx.sizes)
        else:
            flat = [together]
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.mm(flat[0], matrices[0])  # (N, in)
            for gradient, matrix in zip(flat[1:], matrices[1:], strict=True):
                dx.addmm_(gradient, matrix)
            dx = dx.view(ctx.shape).to(ctx.dtype)
        if together is not None and all(needed[:count]):
            dweights = product(together.t(), rows, ctx.kinds[0]).split(ctx.sizes)
        else:
            parts = flat if together is None else together.split(ctx.sizes, dim=-1)
            dweights = [
                product(gradient.t(), rows, kind) if need else None
                for gradient, kind, need in zip(parts, ctx.kinds[:count], needed[:count], strict=True)
            ]
        return dx, None, *dweights, *dbiases


def cast_side_by_side(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The weights in `dtype` as one matrix (sum of outs, in)."""
    sizes = [len(weight) for weight in weights]
    together = torch.empty(sum(sizes), weights[0].shape[1], dtype=dtype, device=weights[0].device)
    for part, weight in zip(together.split(sizes), weights, strict=True):
        part.copy_(weight.detach())  # _foreach_copy_ took twice as long for two of them
    return together


def as_rows(gradient: Tensor) -> Tensor:
    """(..., out) as (N, out), a view where the rows have one stride."""
    return gradient.reshape(-1, gradient.shape[-1])


def columns_of_one(parts: Sequence[Tensor]) -> Tensor | None:
    """The matrix whose columns, side by side and complete, the parts (N, out) are, or None."""
    width, offset = sum(part.shape[1] for part in parts), parts[0].storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == parts[0].untyped_storage().data_ptr()
        if not same or part.stride() != (width, 1) or part.storage_offset() != offset:
            return None
        offset += part.shape[1]
    return parts[0].as_strided((parts[0].shape[0], width), (width, 1))


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b in `dtype`; on a GPU a float32 result of 16-bit factors is written without rounding between."""
    if a.dtype == dtype:
        return torch.mm(a, b)
    if a.is_cuda and dtype == torch.float32:
        return torch.ops.aten.mm.dtype(a, b, dtype)
    return torch.mm(a.to(dtype), b.to(dtype))
