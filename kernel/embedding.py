"""The embedding table read in another dtype in one pass, with a gradient that has a fixed order of its sums.

Forward copies rows and rounds them on the way. Backward sorts the ids: a program takes a chunk of sorted places, adds
up the rows of equal ids by a segmented scan and writes each sum once; sums that reach beyond a chunk are written as
parts, which a second kernel adds in the order of the chunks. No atomics, so two calls give the same bits, and a token
that makes up a large part of a batch costs no more than others.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from configs.errors import UserError
from kernel.operator_inputs import FLOAT_DTYPES, check_tensors, is_traced

CHUNK = 32  # sorted places of a program
BLOCK_C = 128  # twice as many spill


@triton.jit
def embedding_forward_kernel(ids_ptr, weight_ptr, out_ptr, C, BLOCK: tl.constexpr):
    """A program copies one row of weight (V, C) to out (N, C), contiguous."""
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(ids_ptr + row) * C
    for first in range(0, C, BLOCK):
        offs_c = first + tl.arange(0, BLOCK)
        x = tl.load(weight_ptr + source + offs_c, mask=offs_c < C)
        tl.store(out_ptr + row * C + offs_c, x.to(out_ptr.dtype.element_ty), mask=offs_c < C)


@triton.jit
def add_segment(begins_a, sum_a, begins_b, sum_b):
    """The segmented sum's step: a segment that begins at b takes nothing from a."""
    return begins_a | begins_b, tl.where(begins_b > 0, sum_b, sum_a + sum_b)


@triton.jit
def embedding_backward_kernel(
    ids_ptr, order_ptr, dout_ptr, dweight_ptr, parts_ptr, N, C, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """ids (N,) sorted, order (N,) where each came from; parts (chunks, 2, C) float32: of a segment that began in an
    earlier chunk, and of one that begins here and goes on."""
    chunk = tl.program_id(0)
    place = tl.arange(0, CHUNK)
    offs_n = chunk * CHUNK + place
    offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    valid, in_row = offs_n < N, offs_c < C
    ids = tl.load(ids_ptr + offs_n, mask=valid, other=-1)
    before = tl.load(ids_ptr + offs_n - 1, mask=valid & (offs_n > 0), other=-1)
    after = tl.load(ids_ptr + offs_n + 1, mask=offs_n + 1 < N, other=-1)
    source = tl.load(order_ptr + offs_n, mask=valid, other=0)
    inside = valid[:, None] & in_row[None, :]
    dout = tl.load(dout_ptr + source[:, None] * C + offs_c[None, :], mask=inside, other=0.0).to(tl.float32)
    begins = tl.broadcast_to((ids != before).to(tl.int32)[:, None], (CHUNK, BLOCK_C))
    begun, sums = tl.associative_scan((begins, dout), 0, add_segment)
    ends, last = (ids != after)[:, None], ((place == CHUNK - 1) | (offs_n == N - 1))[:, None]
    whole = inside & ends & (begun > 0)
    kind = dweight_ptr.dtype.element_ty
    tl.store(dweight_ptr + ids[:, None] * C + offs_c[None, :], sums.to(kind), mask=whole)
    parts = parts_ptr + chunk * 2 * C + offs_c[None, :] + tl.zeros((CHUNK, 1), tl.int32)
    tl.store(parts, sums, mask=inside & (ends | last) & (begun == 0))
    tl.store(parts + C, sums, mask=inside & last & (begun > 0) & (ends == 0))


@triton.jit
def embedding_parts_kernel(ids_ptr, parts_ptr, dweight_ptr, N, C, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr):
    """Adds up a segment that begins in this chunk and ends in a later one."""
    first = tl.program_id(0) * CHUNK
    end = first + CHUNK
    token = tl.load(ids_ptr + end - 1, mask=end < N, other=-1)
    before = tl.load(ids_ptr + first - 1, mask=first > 0, other=-1)
    following = tl.load(ids_ptr + end, mask=end < N, other=-2)
    if (token == following) & (token != before):
        offs_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        parts_ptr += tl.program_id(0) * 2 * C
        total = tl.load(parts_ptr + C + offs_c, mask=offs_c < C, other=0.0)
        while following == token:
            parts_ptr += 2 * C
            total += tl.load(parts_ptr + offs_c, mask=offs_c < C, other=0.0)
            end += CHUNK
            following = tl.load(ids_ptr + end, mask=end < N, other=-2)
        # `following` is asked for once more, since Triton 3.6 fails to compile a loop whose result nobody uses.
        done = (offs_c < C) & (following != token)
        tl.store(dweight_ptr + token * C + offs_c, total.to(dweight_ptr.dtype.element_ty), mask=done)


def embedding_reference(token_ids: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    """The same in plain PyTorch."""
    return torch.nn.functional.embedding(token_ids, weight).to(out_dtype)


def embedding(token_ids: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """token_ids (...) int64 and weight (V, C) -> rows (..., C) in out_dtype, weight's unless given.

    Ids must lie in 0..V-1 (token files are checked when they are opened): nobody looks at them here. Raises UserError
    for dtypes, devices, strides or sizes that the kernels do not take.
    """
    out_dtype = out_dtype or weight.dtype
    check_tensors("embedding", embedding_forward_kernel, weight=weight)
    if token_ids.dtype != torch.int64 or token_ids.device != weight.device or token_ids.numel() == 0:
        kind = f"{token_ids.dtype} {tuple(token_ids.shape)} on {token_ids.device}"
        raise UserError(f"embedding: token_ids of {kind} must be int64 on {weight.device}, at least one; convert them")
    if weight.dim() != 2 or not weight.is_contiguous():
        raise UserError(f"embedding: weight {tuple(weight.shape)} must be a contiguous (V, C); call .contiguous()")
    if out_dtype not in FLOAT_DTYPES:
        raise UserError(f"embedding: out_dtype={out_dtype} must be bfloat16, float16 or float32; use one of them")
    token_ids = token_ids.contiguous()
    if is_traced(weight):
        return embedding_op(token_ids, weight, out_dtype)
    return EagerEmbedding.apply(token_ids, weight, out_dtype)


class EagerEmbedding(torch.autograd.Function):
    """The kernels without the dispatcher's Python layers."""

    @staticmethod
    def forward(ctx: Any, token_ids: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(token_ids)
        ctx.size, ctx.kind = weight.shape[0], weight.dtype
        return run_forward(token_ids, weight, out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor):
        return None, run_backward(ctx.saved_tensors[0], dout, ctx.size, ctx.kind), None


@torch.library.custom_op("mew::embedding", mutates_args=())
def embedding_op(token_ids: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    return run_forward(token_ids, weight, out_dtype)


@torch.library.custom_op("mew::embedding_backward", mutates_args=())
def backward_op(token_ids: Tensor, dout: Tensor, num_rows: int, dtype: torch.dtype) -> Tensor:
    return run_backward(token_ids, dout, num_rows, dtype)


@embedding_op.register_fake
def _(token_ids, weight, out_dtype):
    return weight.new_empty((*token_ids.shape, weight.shape[1]), dtype=out_dtype)


@backward_op.register_fake
def _(token_ids, dout, num_rows, dtype):
    return dout.new_empty((num_rows, dout.shape[-1]), dtype=dtype)


def save_ids(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.size, ctx.kind = inputs[1].shape[0], inputs[1].dtype


def propagate(ctx: Any, dout: Tensor):
    return None, backward_op(ctx.saved_tensors[0], dout, ctx.size, ctx.kind), None


embedding_op.register_autograd(propagate, setup_context=save_ids)


def run_forward(token_ids: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    C = weight.shape[1]
    out = torch.empty((*token_ids.shape, C), dtype=out_dtype, device=weight.device)
    block = min(triton.next_power_of_2(C), 2048)
    embedding_forward_kernel[(token_ids.numel(),)](token_ids, weight, out, C, BLOCK=block, num_warps=4)
    return out


def run_backward(token_ids: Tensor, dout: Tensor, num_rows: int, dtype: torch.dtype) -> Tensor:
    """dweight (num_rows, C) in `dtype`; rows of ids that do not occur are zero."""
    dout, C = dout.contiguous(), dout.shape[-1]
    ids, order = token_ids.reshape(-1).sort(stable=True)
    N = ids.numel()
    chunks = triton.cdiv(N, CHUNK)
    dweight = torch.zeros(num_rows, C, dtype=dtype, device=dout.device)
    parts = torch.empty(chunks, 2, C, dtype=torch.float32, device=dout.device)
    block = min(BLOCK_C, triton.next_power_of_2(C))
    grid = (chunks, triton.cdiv(C, block))
    embedding_backward_kernel[grid](
        ids, order, dout, dweight, parts, N, C, CHUNK=CHUNK, BLOCK_C=block, num_warps=8
    )  # fmt: skip
    embedding_parts_kernel[grid](ids, parts, dweight, N, C, CHUNK=CHUNK, BLOCK_C=block, num_warps=2)
    return dweight
