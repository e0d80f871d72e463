"""silu(gate) * up (Shazeer 2020) in one launch, and its two gradients in one more; the sigmoid is computed again.

Nothing but gate and up is kept for backward, which the projections' outputs are anyway. Rows may be strided, as halves
of a packed projection are. Arithmetic in float32.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from configs.errors import UserError
from kernel.launch_cache import cached
from kernel.operator_inputs import check_rows, check_tensors, is_traced, row_stride

BLOCK = 2048  # elements a program
WARPS = 4


@triton.jit
def swiglu_forward_kernel(gate_ptr, up_ptr, out_ptr, stride_g, stride_u, C, BLOCK_C: tl.constexpr):
    """out is contiguous rows (N, C); a program takes a block of one row."""
    blocks = tl.cdiv(C, BLOCK_C)
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    row, offs_c = row.to(tl.int64), block.to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = offs_c < C
    gate = tl.load(gate_ptr + row * stride_g + offs_c, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_u + offs_c, mask=inside, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * C + offs_c, product.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward_kernel(
    gate_ptr, up_ptr, dout_ptr, dgate_ptr, dup_ptr, stride_g, stride_u, stride_d, C, BLOCK_C: tl.constexpr
):  # fmt: skip
    """dup = dout silu(gate), dgate = dout up s (1 + gate (1 - s)) with s the sigmoid of gate."""
    blocks = tl.cdiv(C, BLOCK_C)
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    row, offs_c = row.to(tl.int64), block.to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = offs_c < C
    gate = tl.load(gate_ptr + row * stride_g + offs_c, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride_u + offs_c, mask=inside, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + row * C + offs_c, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    dgate = dout * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(dgate_ptr + row * stride_d + offs_c, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + row * stride_d + offs_c, (dout * gate * sigmoid).to(dup_ptr.dtype.element_ty), mask=inside)


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """The same in plain PyTorch."""
    return F.silu(gate) * up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate and up (..., F) of one dtype -> silu(gate) * up, contiguous and in their dtype.

    Raises UserError for dtypes, devices, strides or sizes that the kernels do not take.
    """
    check_tensors("swiglu", swiglu_forward_kernel, gate=gate, up=up)
    if gate.shape != up.shape or gate.dtype != up.dtype:
        kinds = f"gate {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} {up.dtype}"
        raise UserError(f"swiglu: {kinds} must have one shape and dtype; cast or reshape them")
    check_rows("swiglu", "gate", gate)
    check_rows("swiglu", "up", up)
    return swiglu_op(gate, up) if is_traced(gate) else EagerSwiGlu.apply(gate, up)


class EagerSwiGlu(torch.autograd.Function):
    """The kernels without the dispatcher's Python layers."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return run_forward(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor):
        return run_backward(*ctx.saved_tensors, dout, beside=True)


@torch.library.custom_op("mew::swiglu", mutates_args=())
def swiglu_op(gate: Tensor, up: Tensor) -> Tensor:
    return run_forward(gate, up)


@torch.library.custom_op("mew::swiglu_backward", mutates_args=())
def backward_op(gate: Tensor, up: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    return run_backward(gate, up, dout)


@swiglu_op.register_fake
def _(gate, up):
    return gate.new_empty(gate.shape)


@backward_op.register_fake
def _(gate, up, dout):
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def save_inputs(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def propagate(ctx: Any, dout: Tensor):
    return backward_op(*ctx.saved_tensors, dout)


swiglu_op.register_autograd(propagate, setup_context=save_inputs)


def grid_of(gate: Tensor, up: Tensor) -> tuple[int, int]:
    """Rows and their width: contiguous tensors are one long row, so that no program works on a short end."""
    C = gate.shape[-1]
    if gate.is_contiguous() and up.is_contiguous() and gate.numel() < 2**31:
        return 1, gate.numel()
    return gate.numel() // C, C


def run_forward(gate: Tensor, up: Tensor, block: int = BLOCK, warps: int = WARPS) -> Tensor:
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    rows, C = grid_of(gate, up)
    args = (gate, up, out, row_stride(gate), row_stride(up), C)
    cached(swiglu_forward_kernel).launch((rows * -(-C // block),), args, dict(BLOCK_C=block), num_warps=warps)
    return out


def are_halves(gate: Tensor, up: Tensor) -> bool:
    """Whether gate and up are the two halves of the columns of one projection (N, 2 F)."""
    F_ = gate.shape[-1]
    same = gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr() and gate.stride() == up.stride()
    return same and row_stride(gate) == 2 * F_ and up.storage_offset() - gate.storage_offset() == F_


def run_backward(
    gate: Tensor, up: Tensor, dout: Tensor, block: int = BLOCK, warps: int = WARPS, beside: bool = False
) -> tuple[Tensor, Tensor]:
    """dgate and dup, contiguous; `beside`: halves of one tensor where gate and up are, for whom one product follows."""
    dout, C = dout.contiguous(), gate.shape[-1]
    if beside and are_halves(gate, up):
        dgate, dup = torch.empty(*gate.shape[:-1], 2 * C, dtype=gate.dtype, device=gate.device).split(C, dim=-1)
    else:
        dgate, dup = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (gate, up))
    rows, C = grid_of(gate, up)
    grid = (rows * triton.cdiv(C, block),)
    swiglu_backward_kernel[grid](
        gate, up, dout, dgate, dup, row_stride(gate), row_stride(up), row_stride(dgate), C,
        BLOCK_C=block, num_warps=warps,
    )  # fmt: skip
    return dgate, dup
