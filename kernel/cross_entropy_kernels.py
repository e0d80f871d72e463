"""The Triton kernels of the fused loss: from a chunk of logits to its rows' statistics and, in place, its gradient.

A program takes a row. With the row in registers (ONE_PASS) each logit is read once and one exponential serves sum and
gradient; a longer row is read twice, block by block, the second time from the L2 cache, with an online maximum
(Milakov & Gimelshein 2018). Everything in float32, rounded once into the logits' dtype; p is exp(logit - maximum) over
their sum, since exp(logit - lse) would carry the rounding of lse.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@dataclass(frozen=True)
class RowTiles:
    """Elements of a row that a program holds at once, and its warps."""

    block: int
    warps: int


def default_rows(num_columns: int) -> RowTiles:
    """The whole row up to 8k columns, longer rows in blocks of 8k: swept on an H200 at 32,768 and 50,304 columns."""
    block = min(triton.next_power_of_2(num_columns), 8192)
    return RowTiles(block, min(8, max(4, block // 512)))


@triton.jit
def online_sum(row_ptr, valid_columns, BLOCK_V: tl.constexpr):
    """A row's maximum and the sum of exp(logit - maximum), block by block.

    Each run of 32 columns has a maximum and a sum of its own until the end: four lanes share one, so that no warp waits
    for another while the row is read.
    """
    RUN: tl.constexpr = 32 if BLOCK_V >= 32 else BLOCK_V
    RUNS: tl.constexpr = BLOCK_V // RUN
    offs_v = tl.arange(0, RUNS)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    tops = tl.full((RUNS,), float("-inf"), tl.float32)
    sums = tl.zeros((RUNS,), tl.float32)
    for first in range(0, valid_columns, BLOCK_V):
        columns = first + offs_v
        logit = tl.load(row_ptr + columns, mask=columns < valid_columns, other=float("-inf")).to(tl.float32)
        new_tops = tl.maximum(tops, tl.max(logit, axis=1))
        pivots = tl.where(new_tops == float("-inf"), 0.0, new_tops) * LOG2E  # a run of masked columns has no maximum
        sums = sums * tl.exp2(tops * LOG2E - pivots) + tl.sum(tl.exp2(logit * LOG2E - pivots[:, None]), axis=1)
        tops = new_tops
    top = tl.max(tops, axis=0)
    pivot = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.sum(sums * tl.exp2((tops - pivot) * LOG2E), axis=0)


@triton.jit
def loss_kernel(
    logits_ptr, targets_ptr, lse_ptr, target_logit_ptr, loss_ptr, z_ptr,
    stride, num_columns, valid_columns, offset, ignore_index, z_loss, scale,
    STATISTICS: tl.constexpr, GRADIENT: tl.constexpr, ONE_PASS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One row of logits (rows, V): lse and the target's logit are computed (STATISTICS) or read, loss and z written.

    GRADIENT: logits become scale (p (1 + 2 z lse) - onehot). Columns from valid_columns on have probability 0.
    Without STATISTICS lse and target_logit may be those of a whole vocabulary of which these columns are a part.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    offs_v = tl.arange(0, BLOCK_V)
    target = tl.load(targets_ptr + row)
    counted = target != ignore_index
    local = target - offset
    here = counted & (local >= 0) & (local < valid_columns)
    if STATISTICS:
        target_logit = tl.load(logits_ptr + local, mask=here, other=0.0).to(tl.float32)
        if ONE_PASS:
            logit = tl.load(logits_ptr + offs_v, mask=offs_v < valid_columns, other=float("-inf")).to(tl.float32)
            top = tl.max(logit, axis=0)
            exponential = tl.exp2(logit * LOG2E - top * LOG2E)
            total = tl.sum(exponential, axis=0)
        else:
            top, total = online_sum(logits_ptr, valid_columns, BLOCK_V)
        lse = top + tl.log2(total) * LN2
        tl.store(lse_ptr + row, lse)
        tl.store(target_logit_ptr + row, target_logit)
    else:
        lse = tl.load(lse_ptr + row)
        target_logit = tl.load(target_logit_ptr + row)
        top, total = lse, 1.0  # p = exp(logit - top) / total
    tl.store(loss_ptr + row, tl.where(counted, lse - target_logit, 0.0))
    tl.store(z_ptr + row, tl.where(counted, z_loss * lse * lse, 0.0))
    if GRADIENT:
        tl.debug_barrier()  # the target's logit has been read by all before it is written over
        factor = tl.where(counted, scale * (1.0 + 2.0 * z_loss * lse), 0.0) / total
        at_target = tl.where(here, scale, 0.0)
        kind = logits_ptr.dtype.element_ty
        if ONE_PASS and STATISTICS:
            gradient = exponential * factor - tl.where(offs_v == local, at_target, 0.0)
            tl.store(logits_ptr + offs_v, gradient.to(kind), mask=offs_v < num_columns)
        else:
            for first in range(0, num_columns, BLOCK_V):
                columns = first + offs_v
                inside = columns < valid_columns
                logit = tl.load(
                    logits_ptr + columns, mask=inside, other=float("-inf"), eviction_policy="evict_first"
                ).to(tl.float32)
                gradient = tl.exp2(logit * LOG2E - top * LOG2E) * factor - tl.where(columns == local, at_target, 0.0)
                tl.store(logits_ptr + columns, gradient.to(kind), mask=columns < num_columns)


@triton.jit
def scale_kernel(x_ptr, gradient_ptr, made_for, count, BLOCK: tl.constexpr):
    """x *= gradient / made_for in place, unless the incoming gradient is what x was made for."""
    gradient = tl.load(gradient_ptr)
    if gradient != made_for:
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offsets, mask=offsets < count, other=0.0).to(tl.float32)
        tl.store(x_ptr + offsets, (x * (gradient / made_for)).to(x_ptr.dtype.element_ty), mask=offsets < count)


def scale_(x: Tensor, gradient: Tensor, made_for: float) -> Tensor:
    """Multiply a contiguous x by gradient / made_for, in place; the host does not wait for the device's number."""
    scale_kernel[(triton.cdiv(x.numel(), 8192),)](x, gradient, made_for, x.numel(), BLOCK=8192, num_warps=8)
    return x


def run_rows(
    logits: Tensor,
    targets: Tensor,
    rows: Tensor,
    numbers: tuple[int, int, int, float, float],
    passes: tuple[bool, bool],
    tiles: RowTiles,
) -> None:
    """Launch over a chunk: rows (4, n) float32 are lse, target logit, loss and z of each.

    numbers: valid columns, vocabulary offset, ignore index, z_loss, scale; passes: STATISTICS, GRADIENT.
    """
    n, V = logits.shape
    statistics, gradient = passes
    one_pass = statistics and tiles.block >= V and numbers[0] > 0  # a shard of padding alone has no maximum
    loss_kernel[(n,)](
        logits, targets, *rows, logits.stride(0), V, *numbers,
        STATISTICS=statistics, GRADIENT=gradient, ONE_PASS=one_pass, BLOCK_V=tiles.block, num_warps=tiles.warps,
    )  # fmt: skip


def add_product(out: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """out = a b (first) or out += a b; a float32 `out` takes bfloat16 factors without rounding between the calls."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out) if first else out.addmm_(a, b)
    elif out.is_cuda and first:
        torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)
    elif out.is_cuda:
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)
    else:
        product = a.to(out.dtype) @ b.to(out.dtype)
        out.copy_(product) if first else out.add_(product)
