"""The two Triton kernels of rms_norm and their launches.

Forward: a tile of rows a program, one read and one write of each tensor. Backward: as many programs as the GPU holds,
each walking over tiles of rows with the next tile's loads already under way, its part of dweight in registers; a
third kernel adds those parts up.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel.launch_cache import cached
from kernel.operator_inputs import num_processors, row_stride

MAX_WIDTH = 16384
TILE_ELEMENTS = 2048  # short rows share a program until it has this many


@dataclass(frozen=True)
class NormTiles:
    """Rows of a tile and warps of a program, forward and backward; backward programs a multiprocessor, loads ahead."""

    rows: int
    warps: int
    backward_rows: int
    backward_warps: int
    programs: int
    prefetch: bool = True


@cache
def default_tiles(width: int, stream_itemsize: int = 2) -> NormTiles:
    """By the width's next power of two: 16 elements a thread; two rows a program where the stream is wide too.

    Backward of a float32 stream at 2,048: 0.141 ms so against 0.158 with a row each (H200); above it has the registers
    for two programs only without loading ahead.
    """
    block = triton.next_power_of_2(width)
    rows = max(1, TILE_ELEMENTS // block)
    warps = min(16, max(4, block // 512))
    if stream_itemsize == 4 and block >= 2048:
        return NormTiles(rows, warps, 2, 8, 2) if block == 2048 else NormTiles(rows, warps, 1, warps, 2, False)
    return NormTiles(rows, warps, rows, warps, max(1, 16 // warps))


@triton.jit
def norm_forward_kernel(
    x_ptr, residual_ptr, weight_ptr, normed_ptr, stream_ptr, rstd_ptr,
    stride_x, stride_r, N, C, eps,
    HAS_RESIDUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """normed and stream are contiguous (N, C); rstd (N,) is 1 / rms."""
    offs_n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offs_c = tl.arange(0, BLOCK_C)
    inside = (offs_n < N)[:, None] & (offs_c < C)[None, :]
    x = tl.load(x_ptr + offs_n[:, None] * stride_x + offs_c[None, :], mask=inside, other=0.0).to(tl.float32)
    out = offs_n[:, None] * C + offs_c[None, :]
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + offs_n[:, None] * stride_r + offs_c[None, :], mask=inside, other=0.0)
        stream = (x + residual.to(tl.float32)).to(stream_ptr.dtype.element_ty)
        tl.store(stream_ptr + out, stream, mask=inside)
        x = stream.to(tl.float32)  # what backward will read
    weight = tl.load(weight_ptr + offs_c, mask=offs_c < C, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / C + eps)  # (ROWS,)
    normed = x * rstd[:, None] * weight[None, :]
    tl.store(rstd_ptr + offs_n, rstd, mask=offs_n < N)
    tl.store(normed_ptr + out, normed.to(normed_ptr.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward_kernel(
    stream_ptr, weight_ptr, rstd_ptr, dnormed_ptr, dstream_ptr, dresidual_ptr, dx_ptr, parts_ptr,
    stride_s, stride_n, stride_d, N, C,
    HAS_DSTREAM: tl.constexpr, SPLIT: tl.constexpr, PREFETCH: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """d = rstd (w dnormed - xhat mean(xhat w dnormed)) + dstream, xhat = stream rstd; dx is d in x's dtype (SPLIT)."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    offs_c = tl.arange(0, BLOCK_C)
    in_row = offs_c < C
    weight = tl.load(weight_ptr + offs_c, mask=in_row, other=0.0).to(tl.float32)
    dweight = tl.zeros((ROWS, BLOCK_C), dtype=tl.float32)  # summed over its rows once, at the end
    offs_n = program.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (offs_n < N)[:, None] & in_row[None, :]
    if PREFETCH:
        next_x = tl.load(stream_ptr + offs_n[:, None] * stride_s + offs_c[None, :], mask=inside, other=0.0)
        next_dy = tl.load(dnormed_ptr + offs_n[:, None] * stride_n + offs_c[None, :], mask=inside, other=0.0)
    for _first in range(program * ROWS, N, programs * ROWS):
        rows, valid = offs_n, inside
        if HAS_DSTREAM:
            dstream = tl.load(dstream_ptr + rows[:, None] * stride_d + offs_c[None, :], mask=valid, other=0.0)
        offs_n += programs * ROWS
        inside = (offs_n < N)[:, None] & in_row[None, :]
        if PREFETCH:  # the next tile's loads are issued before this tile's sums, so that memory never waits for them
            x, dy = next_x.to(tl.float32), next_dy.to(tl.float32)
            next_x = tl.load(stream_ptr + offs_n[:, None] * stride_s + offs_c[None, :], mask=inside, other=0.0)
            next_dy = tl.load(dnormed_ptr + offs_n[:, None] * stride_n + offs_c[None, :], mask=inside, other=0.0)
        else:
            x = tl.load(stream_ptr + rows[:, None] * stride_s + offs_c[None, :], mask=valid, other=0.0).to(tl.float32)
            dy = tl.load(dnormed_ptr + rows[:, None] * stride_n + offs_c[None, :], mask=valid, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < N, other=0.0)
        xhat = x * rstd[:, None]
        dweight += dy * xhat
        dxhat = dy * weight[None, :]
        projection = tl.sum(dxhat * xhat, axis=1) / C  # (ROWS,)
        d = (dxhat - xhat * projection[:, None]) * rstd[:, None]
        if HAS_DSTREAM:
            d += dstream.to(tl.float32)
        out = rows[:, None] * C + offs_c[None, :]
        tl.store(dresidual_ptr + out, d.to(dresidual_ptr.dtype.element_ty), mask=valid)
        if SPLIT:
            tl.store(dx_ptr + out, d.to(dx_ptr.dtype.element_ty), mask=valid)
    tl.store(parts_ptr + program * C + offs_c, tl.sum(dweight, axis=0), mask=in_row)


@triton.jit
def norm_sum_parts_kernel(parts_ptr, sum_ptr, programs, C, ROWS: tl.constexpr, BLOCK_C: tl.constexpr):
    """sum (C,) of parts (programs, C), in the order of the programs."""
    offs_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros((ROWS, BLOCK_C), dtype=tl.float32)
    for first in range(0, programs, ROWS):
        rows = first + tl.arange(0, ROWS)
        valid = (rows < programs)[:, None] & (offs_c < C)[None, :]
        total += tl.load(parts_ptr + rows[:, None] * C + offs_c[None, :], mask=valid, other=0.0)
    result = tl.sum(total, axis=0)
    tl.store(sum_ptr + offs_c, result.to(sum_ptr.dtype.element_ty), mask=offs_c < C)


def run_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    out_dtype: torch.dtype,
    tiles: NormTiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(normed, stream, rstd) of x (..., C); the stream is x itself without a residual."""
    C = x.shape[-1]
    N = x.numel() // C
    tiles = tiles or default_tiles(C)
    normed = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    stream = x if residual is None else torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    rstd = torch.empty(N, dtype=torch.float32, device=x.device)
    args = (
        x, x if residual is None else residual, weight, normed, stream, rstd,
        row_stride(x), 0 if residual is None else row_stride(residual), N, C, eps,
    )  # fmt: skip
    constants = dict(HAS_RESIDUAL=residual is not None, ROWS=tiles.rows, BLOCK_C=triton.next_power_of_2(C))
    cached(norm_forward_kernel).launch((-(-N // tiles.rows),), args, constants, num_warps=tiles.warps)
    return normed, stream, rstd


def run_backward(
    saved: tuple[Tensor, ...],
    dnormed: Tensor,
    dstream: Tensor | None,
    x_dtype: torch.dtype,
    tiles: NormTiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dresidual, dx, dweight) from (stream, weight, rstd); dx is dresidual where their dtypes are one."""
    stream, weight, rstd = saved
    C, N = stream.shape[-1], rstd.numel()
    tiles = tiles or default_tiles(C, stream.element_size())
    dnormed = dnormed if dnormed.is_contiguous() else dnormed.contiguous()
    if dstream is not None and not dstream.is_contiguous():
        dstream = dstream.contiguous()
    dresidual = torch.empty(stream.shape, dtype=stream.dtype, device=stream.device)
    dx = dresidual if x_dtype == stream.dtype else torch.empty(stream.shape, dtype=x_dtype, device=stream.device)
    programs = min(triton.cdiv(N, tiles.backward_rows), tiles.programs * num_processors(stream.device.index))
    parts = torch.empty(programs, C, dtype=torch.float32, device=stream.device)
    norm_backward_kernel[(programs,)](
        stream, weight, rstd, dnormed, dnormed if dstream is None else dstream, dresidual, dx, parts,
        row_stride(stream), C, C, N, C,
        HAS_DSTREAM=dstream is not None, SPLIT=dx is not dresidual, PREFETCH=tiles.prefetch,
        ROWS=tiles.backward_rows, BLOCK_C=triton.next_power_of_2(C), num_warps=tiles.backward_warps,
    )  # fmt: skip
    dweight = torch.empty(C, dtype=weight.dtype, device=stream.device)
    norm_sum_parts_kernel[(triton.cdiv(C, 32),)](parts, dweight, programs, C, ROWS=64, BLOCK_C=32, num_warps=8)
    return dresidual, dx, dweight
