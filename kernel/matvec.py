"""Launches of matvec_kernels: one token of one sequence through a dense model, into buffers that are given.

Everything is shaped (rows,) or by weights; nothing is allocated, so a step can be captured in a CUDA graph. On Hopper
and later the kernels overlap by programmatic dependent launch; under Triton's interpreter they run on CPU tensors.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernel.matvec_kernels import (
    add_matvec_kernel,
    norm_qkv_kernel,
    norm_scores_kernel,
    norm_swiglu_kernel,
    start_kernel,
)
from kernel.operator_inputs import is_interpreted

MAX_WIDTH = 8192  # of a normed row, which a program holds whole


@dataclass(frozen=True)
class MatvecConfig:
    """Weights that a program asks for at once (elements), its warps, and whether kernels overlap."""

    tile: int = 8192
    warps: int = 4
    pdl: bool = True


def default_matvec_config(device: torch.device) -> MatvecConfig:
    """PDL needs compute capability 9."""
    return MatvecConfig(pdl=device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0))


def matvec_runs(width: int, head_dim: int, device: torch.device) -> bool:
    """Whether the kernels take a model of this d_model and head_dim on this device."""
    on_device = device.type == "cuda" or is_interpreted(start_kernel)
    return on_device and width <= MAX_WIDTH and head_dim & (head_dim - 1) == 0


def options(config: MatvecConfig) -> dict[str, object]:
    """Launch options; the interpreter and older devices know no launch_pdl."""
    return {"num_warps": config.warps, "PDL": config.pdl} | ({"launch_pdl": True} if config.pdl else {})


def rows_a_program(block_c: int, config: MatvecConfig, matrices: int = 1) -> int:
    """A power of two."""
    return max(1, config.tile // (block_c * matrices))


@dataclass(frozen=True)
class TokenBuffers:
    """What passes between the kernels: stream (C,), queries (H D,), attended (H D,), hidden (F,), scores (V,), all of
    the model's dtype; table (1, P) int32, length (1,) int32 and place (1,) int64 of the token."""

    stream: Tensor
    queries: Tensor
    hidden: Tensor
    scores: Tensor
    table: Tensor
    length: Tensor
    place: Tensor


def start_token(rows: Tensor, last_tokens: Tensor, tables: Tensor, embedding: Tensor, page_size: int,
                to: TokenBuffers, config: MatvecConfig) -> None:  # fmt: skip
    """rows (>= 2, 1) int64: slot and length; last_tokens (slots,), tables (slots, P) int32, embedding (V, C)."""
    start_kernel[(1,)](
        rows, last_tokens, tables, embedding, to.stream, to.table, to.length, to.place,
        rows.stride(0), embedding.shape[1], tables.shape[1],
        PAGE_SIZE=page_size, BLOCK_C=2048, BLOCK_P=256, **options(config),
    )  # fmt: skip


@dataclass(frozen=True)
class QkvWeights:
    """norm (C,), weight ((H + 2K) D, C), bias or None, and the shape's numbers."""

    norm: Tensor
    weight: Tensor
    bias: Tensor | None
    eps: float
    num_heads: int
    num_kv_heads: int
    head_dim: int


def norm_qkv(
    own: QkvWeights, tables: tuple[Tensor, Tensor], k_pages: Tensor, v_pages: Tensor, to: TokenBuffers,
    config: MatvecConfig,
) -> None:  # fmt: skip
    """queries and the token's keys and values in the pages; tables: cos and sin (positions, D/2) float32."""
    D, C = own.head_dim, own.weight.shape[1]
    block_c = triton.next_power_of_2(C)
    pairs = min(D // 2, rows_a_program(block_c, config, 2))
    grid = ((own.num_heads + 2 * own.num_kv_heads) * (D // 2 // pairs),)
    bias = own.weight if own.bias is None else own.bias
    norm_qkv_kernel[grid](
        to.stream, own.norm, own.weight, bias, *tables, to.length, to.place, to.queries, k_pages, v_pages,
        own.eps, C, own.num_heads, own.num_kv_heads,
        D=D, BIAS=own.bias is not None, BLOCK_P=pairs, BLOCK_C=block_c, **options(config),
    )  # fmt: skip


def add_matvec(x: Tensor, weight: Tensor, stream: Tensor, config: MatvecConfig) -> None:
    """stream (N,) += weight (N, C) x (C,)."""
    N, C = weight.shape
    block_c = min(2048, triton.next_power_of_2(C))
    block_n = rows_a_program(block_c, config)
    grid = (triton.cdiv(N, block_n),)
    add_matvec_kernel[grid](x, weight, stream, N, C, BLOCK_N=block_n, BLOCK_C=block_c, **options(config))


def norm_swiglu(norm: Tensor, weight: Tensor, eps: float, to: TokenBuffers, config: MatvecConfig) -> None:
    """hidden = silu(gate) * up of the normed stream; weight (2 F, C): gate's rows, then up's."""
    C, F = weight.shape[1], weight.shape[0] // 2
    block_c = triton.next_power_of_2(C)
    block_n = rows_a_program(block_c, config, 2)
    grid = (triton.cdiv(F, block_n),)
    norm_swiglu_kernel[grid](
        to.stream, norm, weight, to.hidden, eps, C, F, BLOCK_N=block_n, BLOCK_C=block_c, **options(config)
    )


def norm_scores(norm: Tensor, weight: Tensor, eps: float, to: TokenBuffers, config: MatvecConfig) -> None:
    """scores of the whole vocabulary from the normed stream; weight (V, C)."""
    V, C = weight.shape
    block_c = triton.next_power_of_2(C)
    block_n = rows_a_program(block_c, config)
    grid = (triton.cdiv(V, block_n),)
    norm_scores_kernel[grid](
        to.stream, norm, weight, to.scores, eps, C, V, BLOCK_N=block_n, BLOCK_C=block_c, **options(config)
    )
