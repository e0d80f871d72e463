"""Rotary positions (Su et al. 2021, rotate-half) of queries and keys in one launch, forward and backward.

The pair (i, i + R/2) of each head turns by the angle of its token's position; the dims from R on, if the tables are
narrower than the heads, are copied. Backward is the same kernel with the angle's sign changed. q and k may be strided
views, of a packed projection for one; what comes out is contiguous. Arithmetic in float32.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from configs.errors import UserError
from kernel.operator_inputs import check_tensors, is_traced

Rope = tuple[Tensor, Tensor]  # cos and sin, each (B or 1, T, 1, R) float32, both halves alike
TILE_ELEMENTS = 2048  # of one half of the heads in a program


@triton.jit
def turn_heads(
    x_ptr, out_ptr, cos, sin, stride_h, heads, head_dim,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """One token's heads: x_ptr and out_ptr stand at its first; `out` has contiguous heads."""
    offs_r = tl.arange(0, BLOCK_R)
    for first_head in range(0, heads, BLOCK_H):
        offs_h = first_head + tl.arange(0, BLOCK_H)
        inside = (offs_h < heads)[:, None] & (offs_r < HALF)[None, :]
        source = x_ptr + offs_h[:, None] * stride_h + offs_r[None, :]
        target = out_ptr + offs_h[:, None] * head_dim + offs_r[None, :]
        first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
        kind = out_ptr.dtype.element_ty
        tl.store(target, (first * cos[None, :] - second * sin[None, :]).to(kind), mask=inside)
        tl.store(target + HALF, (second * cos[None, :] + first * sin[None, :]).to(kind), mask=inside)
        if BLOCK_REST > 0:
            offs_d = 2 * HALF + tl.arange(0, BLOCK_REST)
            rest = (offs_h < heads)[:, None] & (offs_d < head_dim)[None, :]
            copied = tl.load(x_ptr + offs_h[:, None] * stride_h + offs_d[None, :], mask=rest, other=0.0)
            tl.store(out_ptr + offs_h[:, None] * head_dim + offs_d[None, :], copied, mask=rest)


@triton.jit
def rope_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_rb, stride_rt,
    T, H, K, D,
    SIGN: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """A program turns all heads of one token; SIGN -1 turns back."""
    token = tl.program_id(0).to(tl.int64)
    b, t = token // T, token % T
    offs_r = tl.arange(0, BLOCK_R)
    angle = b * stride_rb + t * stride_rt + offs_r
    cos = tl.load(cos_ptr + angle, mask=offs_r < HALF, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=offs_r < HALF, other=0.0) * SIGN
    q_at, k_at = q_ptr + b * stride_qb + t * stride_qt, k_ptr + b * stride_kb + t * stride_kt
    turn_heads(q_at, q_out_ptr + token * H * D, cos, sin, stride_qh, H, D, HALF, BLOCK_H, BLOCK_R, BLOCK_REST)
    turn_heads(k_at, k_out_ptr + token * K * D, cos, sin, stride_kh, K, D, HALF, BLOCK_H, BLOCK_R, BLOCK_REST)


def rope_reference(q: Tensor, k: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """The same in plain PyTorch, for (B, T, H, D) and (B, T, K, D)."""
    return turn_reference(q, rope), turn_reference(k, rope)


def turn_reference(x: Tensor, rope: Rope) -> Tensor:
    cos, sin = rope
    width = cos.shape[-1]
    first, second = x[..., :width].chunk(2, dim=-1)
    turned = x[..., :width] * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned.to(x.dtype), x[..., width:]), dim=-1)


def rope(q: Tensor, k: Tensor, tables: Rope) -> tuple[Tensor, Tensor]:
    """q (B, T, H, D) and k (B, T, K, D) turned by the angles of their tokens, contiguous and in their own dtypes.

    tables: cos and sin, each (B or 1, T, 1, R) float32 with R <= D even. Raises UserError for dtypes, devices, strides
    or sizes that the kernel does not take.
    """
    cos, sin = tables
    check_inputs(q, k, cos, sin)
    if is_traced(q):
        return rope_op(q, k, cos, sin, False)
    return EagerRope.apply(q, k, cos, sin)


def check_inputs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    check_tensors("rope", rope_kernel, q=q, k=k, cos=cos, sin=sin)
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}"
    if q.dim() != 4 or k.dim() != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise UserError(f"rope: {shapes} must be (B, T, H, D) and (B, T, K, D); reshape them")
    if q.numel() == 0 or k.numel() == 0:
        raise UserError(f"rope: {shapes} may not be empty; skip the call")
    if q.stride(-1) != 1 or k.stride(-1) != 1:
        raise UserError(f"rope: strides {q.stride()} and {k.stride()} must end in 1; call .contiguous()")
    width = cos.shape[-1]
    expected = [(B, q.shape[1], 1, width) for B in (1, q.shape[0])]
    if cos.shape != sin.shape or tuple(cos.shape) not in expected or width % 2 or width > q.shape[3]:
        raise UserError(
            f"rope: tables {tuple(cos.shape)} and {tuple(sin.shape)} must be (1 or {q.shape[0]}, {q.shape[1]}, 1, R) "
            f"with R even and at most {q.shape[3]}; make them with RoPE of llm/transformer.py"
        )
    if cos.dtype != torch.float32 or sin.dtype != torch.float32 or cos.stride() != sin.stride() or cos.stride(-1) != 1:
        raise UserError(f"rope: tables of {cos.dtype}, strides {cos.stride()} must be float32, alike, and end in 1")


class EagerRope(torch.autograd.Function):
    """The kernel without the dispatcher's Python layers."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor):
        ctx.save_for_backward(cos, sin)
        return run_rope(q, k, cos, sin, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor):
        return *run_rope(dq, dk, *ctx.saved_tensors, True), None, None


@torch.library.custom_op("mew::rope", mutates_args=())
def rope_op(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    return run_rope(q, k, cos, sin, back)


@rope_op.register_fake
def _(q, k, cos, sin, back):
    return q.new_empty(q.shape), k.new_empty(k.shape)


def save_tables(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(inputs[2], inputs[3])
    ctx.back = inputs[4]


def propagate(ctx: Any, dq: Tensor, dk: Tensor):
    cos, sin = ctx.saved_tensors
    return *rope_op(dq, dk, cos, sin, not ctx.back), None, None, None


rope_op.register_autograd(propagate, setup_context=save_tables)


def run_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool, warps: int = 4) -> tuple[Tensor, Tensor]:
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    (B, T, H, D), K = q.shape, k.shape[2]
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    half, rest = cos.shape[-1] // 2, D - cos.shape[-1]
    block_r = triton.next_power_of_2(half)
    block_h = min(triton.next_power_of_2(max(H, K)), max(1, TILE_ELEMENTS // block_r))
    rope_kernel[(B * T,)](
        q, k, q_out, k_out, cos, sin,
        *q.stride()[:3], *k.stride()[:3], cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1),
        T, H, K, D,
        SIGN=-1.0 if back else 1.0, HALF=half, BLOCK_H=block_h, BLOCK_R=block_r,
        BLOCK_REST=triton.next_power_of_2(rest) if rest else 0, num_warps=warps,
    )  # fmt: skip
    return q_out, k_out
