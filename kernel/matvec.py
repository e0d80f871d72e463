"""Launches of matvec_kernels: one token of one sequence through a dense model, into buffers that are given.

Nothing is allocated, so a step can be captured in a CUDA graph. On compute capability 9 and later the kernels overlap
by programmatic dependent launch; under Triton's interpreter they run on CPU tensors.
"""

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from kernel.matvec_kernels import (
    add_matvec_kernel,
    attend_kernel,
    norm_qkv_kernel,
    norm_scores_kernel,
    norm_swiglu_kernel,
    start_kernel,
)
from kernel.operator_inputs import is_interpreted, num_processors

MAX_WIDTH = 32768  # of a weight's rows, which a program holds whole


@dataclass(frozen=True)
class MatvecConfig:
    """Weights of a tile (elements) of small and of large matrices, warps, programs a processor, and overlap.

    small_tile: of matrices with at most SMALL elements, whose rows must reach all processors.
    """

    tile: int = 16384
    small_tile: int = 8192
    warps: int = 8
    programs: int = 2
    pdl: bool = True


SMALL = 2**23


def default_matvec_config(device: torch.device) -> MatvecConfig:
    """PDL needs compute capability 9."""
    return MatvecConfig(pdl=device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0))


def matvec_candidates(device: torch.device) -> list[MatvecConfig]:
    """Configurations worth timing on a device, the default first."""
    default = default_matvec_config(device)
    return [default, replace(default, tile=8192, programs=3)]


def matvec_runs(widths: list[int], head_dim: int, device: torch.device) -> bool:
    """Whether the kernels take a model whose weights have rows of `widths`, on this device."""
    on_device = device.type == "cuda" or is_interpreted(start_kernel)
    return on_device and max(widths) <= MAX_WIDTH and head_dim & (head_dim - 1) == 0 and head_dim >= 16


def options(config: MatvecConfig) -> dict[str, object]:
    """Launch options; the interpreter and older devices know no launch_pdl."""
    return {"num_warps": config.warps, "PDL": config.pdl} | ({"launch_pdl": True} if config.pdl else {})


def tiling(weight: Tensor, config: MatvecConfig, matrices: int = 1) -> tuple[int, int, int]:
    """(width of a tile, its rows of each of `matrices`, the most programs) for a weight (N, C)."""
    block_c = triton.next_power_of_2(weight.shape[1])
    tile = config.small_tile if weight.numel() <= SMALL else config.tile
    rows = max(1, tile // (block_c * matrices))
    return block_c, rows, num_processors(weight.device.index) * config.programs


@dataclass(frozen=True)
class TokenBuffers:
    """What passes between the kernels, in the model's dtype: stream (C,), queries and attended (1, 1, H, D), hidden
    (F,), scores (1, V); and for flash_attention_decode table (1, P) and length (1,), int32."""

    stream: Tensor
    queries: Tensor
    attended: Tensor
    hidden: Tensor
    scores: Tensor
    table: Tensor
    length: Tensor


@dataclass(frozen=True)
class TokenPlace:
    """Which token: rows (>= 2, 1) int64, its slot and its length; tables (slots, P) int32 of pages of page_size."""

    rows: Tensor
    tables: Tensor
    page_size: int


def start_token(at: TokenPlace, last_tokens: Tensor, embedding: Tensor, to: TokenBuffers, config: MatvecConfig) -> None:
    """The vector (C,) of the slot's last token, last_tokens (slots,) int64, embedding (V, C)."""
    start_kernel[(1,)](
        at.rows, last_tokens, at.tables, embedding, to.stream, to.table, to.length,
        at.rows.stride(0), embedding.shape[1], at.tables.shape[1],
        BLOCK_C=2048, BLOCK_P=256, **options(config),
    )  # fmt: skip


@dataclass(frozen=True)
class QkvWeights:
    """norm (C,), weight ((H + 2K) D, C), bias or None, cos and sin (positions, D/2) float32, the shape's numbers."""

    norm: Tensor
    weight: Tensor
    bias: Tensor | None
    rope: tuple[Tensor, Tensor]
    eps: float
    num_heads: int
    num_kv_heads: int
    head_dim: int


def norm_qkv(
    own: QkvWeights, at: TokenPlace, pages: tuple[Tensor, Tensor], to: TokenBuffers, config: MatvecConfig
) -> None:
    """queries of the normed stream, and the token's keys and values into their pages (pages, page_size, K, D)."""
    D, C = own.head_dim, own.weight.shape[1]
    block_c, pairs, most = tiling(own.weight, config, 2)
    pairs = min(D // 2, pairs)
    tiles = (own.num_heads + 2 * own.num_kv_heads) * (D // 2 // pairs)
    norm_qkv_kernel[(min(tiles, most),)](
        to.stream, own.norm, own.weight, own.weight if own.bias is None else own.bias, *own.rope, at.rows, at.tables,
        to.queries, *pages, own.eps, C, own.num_heads, own.num_kv_heads, at.rows.stride(0), at.tables.shape[1],
        D=D, BIAS=own.bias is not None, PAGE_SIZE=at.page_size, BLOCK_P=pairs, BLOCK_C=block_c, **options(config),
    )  # fmt: skip


def attend_short(at: TokenPlace, pages: tuple[Tensor, Tensor], to: TokenBuffers, config: MatvecConfig) -> None:
    """attended: the queries over the pages of a sequence short enough for one program a head."""
    H, D = to.queries.shape[2:]
    attend_kernel[(H,)](
        to.queries, *pages, at.rows, at.tables, to.attended, D**-0.5, H, pages[0].shape[2],
        at.rows.stride(0), at.tables.shape[1],
        D=D, PAGE_SIZE=at.page_size, BLOCK_S=16384 // D if to.queries.is_cuda else 16, **options(config),
    )  # fmt: skip


def add_matvec(x: Tensor, weight: Tensor, stream: Tensor, config: MatvecConfig) -> None:
    """stream (N,) += weight (N, C) x (C,)."""
    N, C = weight.shape
    block_c, rows, most = tiling(weight, config)
    grid = (min(triton.cdiv(N, rows), most),)
    add_matvec_kernel[grid](x, weight, stream, N, C, BLOCK_N=rows, BLOCK_C=block_c, **options(config))


def norm_swiglu(norm: Tensor, weight: Tensor, eps: float, to: TokenBuffers, config: MatvecConfig) -> None:
    """hidden = silu(gate) * up of the normed stream; weight (2 F, C): gate's rows, then up's."""
    C, F = weight.shape[1], weight.shape[0] // 2
    block_c, rows, most = tiling(weight, config, 2)
    norm_swiglu_kernel[(min(triton.cdiv(F, rows), most),)](
        to.stream, norm, weight, to.hidden, eps, C, F, BLOCK_N=rows, BLOCK_C=block_c, **options(config)
    )


def norm_scores(norm: Tensor, weight: Tensor, eps: float, to: TokenBuffers, config: MatvecConfig) -> None:
    """scores of the whole vocabulary from the normed stream; weight (V, C)."""
    V, C = weight.shape
    block_c, rows, most = tiling(weight, config)
    norm_scores_kernel[(min(triton.cdiv(V, rows), most),)](
        to.stream, norm, weight, to.scores, eps, C, V, BLOCK_N=rows, BLOCK_C=block_c, **options(config)
    )
