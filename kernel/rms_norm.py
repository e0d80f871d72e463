"""RMSNorm (Zhang & Sennrich 2019) with the residual addition before it, forward and backward, in one pass over memory.

rms_norm(x, weight, eps, residual) -> (normed, stream): stream = x + residual, normed = stream / rms(stream) * weight,
with sums in float32. The stream is handed back so that the gradient which reaches it later is added inside the
backward kernel, not by a pass of its own. Each backward program keeps its share of dweight in registers over many
rows and writes it once, so the sum has a fixed order: two calls give the same bits.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from configs.errors import UserError
from kernel.operator_inputs import FLOAT_DTYPES, check_rows, check_tensors, is_traced
from kernel.rms_norm_kernels import MAX_WIDTH, norm_forward_kernel, run_backward, run_forward

Result = tuple[Tensor, Tensor]


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Result:
    """The same in plain PyTorch: float32 (or better) inside, normed in out_dtype, the stream in residual's dtype."""
    stream = x if residual is None else (x + residual).to(residual.dtype)
    wide = stream.to(torch.promote_types(stream.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight).to(out_dtype or x.dtype), stream


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Result:
    """x (..., C), weight (C,), residual like x or None -> normed (..., C) in out_dtype, stream (..., C).

    out_dtype: x's unless given. The stream is x itself without a residual, else of residual's dtype. Raises UserError
    for dtypes, devices, strides or sizes that the kernels do not take.
    """
    out_dtype = out_dtype or x.dtype
    check_inputs(x, weight, residual, out_dtype)
    if is_traced(x):
        if residual is None:
            return norm_op(x, weight, eps, out_dtype)[0], x
        return add_norm_op(x, residual, weight, eps, out_dtype)[:2]
    return EagerNorm.apply(x, weight, residual, eps, out_dtype)


def check_inputs(x: Tensor, weight: Tensor, residual: Tensor | None, out_dtype: torch.dtype) -> None:
    check_tensors("rms_norm", norm_forward_kernel, x=x, weight=weight, residual=residual)
    check_rows("rms_norm", "x", x)
    if weight.shape != x.shape[-1:] or not weight.is_contiguous():
        raise UserError(f"rms_norm: weight {tuple(weight.shape)} must be the contiguous ({x.shape[-1]},) of x's rows")
    if x.shape[-1] > MAX_WIDTH:
        raise UserError(f"rms_norm: width {x.shape[-1]} has no kernel; use at most {MAX_WIDTH}, or kernels.fused=false")
    if residual is not None:
        check_rows("rms_norm", "residual", residual)
        if residual.shape != x.shape:
            raise UserError(f"rms_norm: residual {tuple(residual.shape)} and x {tuple(x.shape)} must have one shape")
    if out_dtype not in FLOAT_DTYPES:
        raise UserError(f"rms_norm: out_dtype={out_dtype} must be bfloat16, float16 or float32; use one of them")


class EagerNorm(torch.autograd.Function):
    """The kernels without the dispatcher's Python layers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, residual: Tensor | None, eps: float, out_dtype: torch.dtype):
        normed, stream, rstd = run_forward(x, residual, weight, eps, out_dtype)
        ctx.save_for_backward(stream, weight, rstd)
        ctx.x_dtype, ctx.has_residual = x.dtype, residual is not None
        ctx.set_materialize_grads(False)
        return normed, stream

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dnormed: Tensor | None, dstream: Tensor | None):
        stream, weight, rstd = ctx.saved_tensors
        if dnormed is None:
            dx = None if dstream is None else dstream.to(ctx.x_dtype)
            return dx, None, dstream if ctx.has_residual else None, None, None
        dresidual, dx, dweight = run_backward((stream, weight, rstd), dnormed, dstream, ctx.x_dtype)
        return dx, dweight, dresidual if ctx.has_residual else None, None, None


@torch.library.custom_op("mew::rms_norm", mutates_args=())
def norm_op(x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    normed, _, rstd = run_forward(x, None, weight, eps, out_dtype)
    return normed, rstd


@torch.library.custom_op("mew::add_rms_norm", mutates_args=())
def add_norm_op(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return run_forward(x, residual, weight, eps, out_dtype)


@torch.library.custom_op("mew::rms_norm_backward", mutates_args=())
def backward_op(
    saved: list[Tensor], dnormed: Tensor, dstream: Tensor | None, x_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """saved: stream, weight, rstd; returns dresidual, dx and dweight, no two of which share memory."""
    dresidual, dx, dweight = run_backward(tuple(saved), dnormed, dstream, x_dtype)
    return dresidual, dx.new_empty(0) if dx is dresidual else dx, dweight


@norm_op.register_fake
def _(x, weight, eps, out_dtype):
    return x.new_empty(x.shape, dtype=out_dtype), x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)


@add_norm_op.register_fake
def _(x, residual, weight, eps, out_dtype):
    rstd = x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=out_dtype), residual.new_empty(residual.shape), rstd


@backward_op.register_fake
def _(saved, dnormed, dstream, x_dtype):
    stream, weight, _ = saved
    dx = stream.new_empty(0 if x_dtype == stream.dtype else stream.shape, dtype=x_dtype)
    return stream.new_empty(stream.shape), dx, weight.new_empty(weight.shape)


def save_norm(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])


def propagate_norm(ctx: Any, dnormed: Tensor, drstd: Tensor):
    saved = list(ctx.saved_tensors)
    dx, _, dweight = backward_op(saved, dnormed, None, saved[0].dtype)
    return dx, dweight, None, None


def save_add_norm(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(output[1], inputs[2], output[2])
    ctx.x_dtype = inputs[0].dtype


def propagate_add_norm(ctx: Any, dnormed: Tensor, dstream: Tensor, drstd: Tensor):
    dresidual, dx, dweight = backward_op(list(ctx.saved_tensors), dnormed, dstream, ctx.x_dtype)
    return dresidual if ctx.x_dtype == dresidual.dtype else dx, dresidual, dweight, None, None


norm_op.register_autograd(propagate_norm, setup_context=save_norm)
add_norm_op.register_autograd(propagate_add_norm, setup_context=save_add_norm)
