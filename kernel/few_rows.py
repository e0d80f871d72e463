"""Launches of few_rows_kernels: 2 to 64 tokens, one of each sequence, through a dense model, into buffers given.

Nothing is allocated and every shape is known to the host, so a step can be captured in a CUDA graph. On compute
capability 9 and later the kernels overlap by programmatic dependent launch; under Triton's interpreter they run on CPU
tensors.
"""

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from kernel.few_rows_kernels import (
    embed_kernel,
    product_kernel,
    rows_attend_kernel,
    sum_norm_kernel,
    swiglu_product_kernel,
)
from kernel.operator_inputs import is_interpreted

MAX_ROWS = 64
MAX_WIDTH = 16384  # of the stream, which a program of sum_norm_kernel holds whole
HEAD_DIMS = (32, 64, 128, 256)


@dataclass(frozen=True)
class ProductConfig:
    """Of one product: rows and columns of a tile of the weight, shares of its columns, loads under way, warps."""

    block_n: int = 64
    block_c: int = 64
    parts: int = 1
    stages: int = 5
    warps: int = 4


@dataclass(frozen=True)
class FewRowsConfig:
    """The products of a block and of the output layer; of attention, keys of a tile (for heads of 64), warps and
    registers a thread, so few that 64 rows x 8 kv heads run at once; and overlap. From an H200, a Llama shape of 1.1B,
    64 rows.
    """

    qkv: ProductConfig = ProductConfig(64, 64, parts=3)
    out: ProductConfig = ProductConfig(64, 128, parts=4, stages=4)
    gated: ProductConfig = ProductConfig(64, 64, stages=8)
    down: ProductConfig = ProductConfig(64, 128, parts=4, stages=6)
    scores: ProductConfig = ProductConfig(128, 64, stages=4)
    block_s: int = 64
    attend_warps: int = 2
    attend_registers: int | None = None
    pdl: bool = True


PRODUCTS = ("qkv", "out", "gated", "down", "scores")


def default_few_rows_config(device: torch.device) -> FewRowsConfig:
    """PDL needs compute capability 9; many loads under way need 192 KiB of shared memory, which 9 and 10 have.

    Elsewhere three are, in 96 KiB; not tried there.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    default = FewRowsConfig(pdl=capability >= (9, 0))
    if capability[0] in (9, 10):
        return default
    return replace(default, **{name: replace(getattr(default, name), stages=3) for name in PRODUCTS})


def few_rows_candidates(default: FewRowsConfig) -> tuple[list[FewRowsConfig], list[FewRowsConfig]]:
    """Configurations worth timing beside the default: other products, and other attention."""
    fewer = {name: replace(getattr(default, name), stages=3) for name in PRODUCTS}
    return [replace(default, **fewer)], [
        replace(default, attend_warps=4, attend_registers=128),
        replace(default, attend_warps=1, block_s=32),
    ]


def few_rows_run(width: int, head_dim: int, weight: Tensor) -> bool:
    """Whether the kernels take a model of this d_model and head_dim, whose weights are like `weight`.

    On a GPU tiles of float32 would not fit, and have no tensor cores to make it worth while.
    """
    on_device = (weight.is_cuda and weight.element_size() == 2) or is_interpreted(product_kernel)
    return on_device and width <= MAX_WIDTH and head_dim in HEAD_DIMS


@dataclass(frozen=True)
class RowPlaces:
    """Which tokens: rows (>= 2, M) int64, their slots and lengths; tables (slots, P) int32 of pages of page_size."""

    rows: Tensor
    tables: Tensor
    page_size: int


@dataclass(frozen=True)
class QkvInputs:
    """Of one block: parts (PARTS, M, (H + 2K) D) float32 of the projection, its bias or None, cos and sin
    (positions, D/2) float32, and the pages of keys and values, each (pages, page_size, K, D)."""

    parts: Tensor
    bias: Tensor | None
    rope: tuple[Tensor, Tensor]
    pages: tuple[Tensor, Tensor]


def overlap(pdl: bool, warps: int) -> dict[str, object]:
    """What every launch takes; the interpreter does not know launch_pdl."""
    return {"PDL": pdl, "num_warps": warps} | ({"launch_pdl": True} if pdl else {})


def row_block(count: int) -> int:
    """Rows of x in a tile: at least the 16 that tl.dot takes."""
    return max(16, triton.next_power_of_2(count))


def precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def shared(x: Tensor, weight: Tensor, config: ProductConfig, pdl: bool) -> dict[str, object]:
    """The constants that both products take."""
    return dict(
        BLOCK_M=row_block(x.shape[0]), BLOCK_N=config.block_n, BLOCK_C=config.block_c,
        EVEN=weight.shape[1] % config.block_c == 0, PRECISION=precision(x), STAGES=config.stages,
        **overlap(pdl, config.warps),
    )  # fmt: skip


def product(x: Tensor, weight: Tensor, out: Tensor, config: ProductConfig, pdl: bool) -> None:
    """out (parts, M, N), float32 sums or, with one part, any dtype: x (M, C) weight (N, C)^T."""
    (M, C), N = x.shape, weight.shape[0]
    assert out.shape == (config.parts, M, N) and x.is_contiguous(), f"out {tuple(out.shape)}, parts {config.parts}"
    grid = (triton.cdiv(N, config.block_n), config.parts)
    product_kernel[grid](x, weight, out, M, N, C, PARTS=config.parts, **shared(x, weight, config, pdl))


def swiglu_product(x: Tensor, weight: Tensor, out: Tensor, config: ProductConfig, pdl: bool) -> None:
    """out (M, F) = silu(gate) * up of x (M, C) and the joined weight (2 F, C)."""
    (M, C), F = x.shape, weight.shape[0] // 2
    grid = (triton.cdiv(F, config.block_n),)
    swiglu_product_kernel[grid](x, weight, out, M, F, C, **shared(x, weight, config, pdl))


def embed(at: RowPlaces, last_tokens: Tensor, embedding: Tensor, stream: Tensor, pdl: bool) -> None:
    """stream (M, C): the vectors of the slots' last tokens (slots,) int64; embedding (V, C)."""
    M, C = stream.shape
    embed_kernel[(M,)](at.rows, last_tokens, embedding, stream, C, BLOCK_C=triton.next_power_of_2(C), **overlap(pdl, 4))


def sum_norm(parts: Tensor | None, stream: Tensor, norm: Tensor, eps: float, normed: Tensor, pdl: bool) -> None:
    """stream (M, C) += parts (PARTS, M, C) float32, in place; normed (M, C) = RMSNorm of it by the weight norm (C,)."""
    M, C = stream.shape
    block_c = triton.next_power_of_2(C)
    sum_norm_kernel[(M,)](
        stream if parts is None else parts, stream, norm, normed, eps, M, C,
        PARTS=0 if parts is None else parts.shape[0], BLOCK_C=block_c, **overlap(pdl, min(16, max(4, block_c // 256))),
    )  # fmt: skip


def rows_attend(at: RowPlaces, inputs: QkvInputs, out: Tensor, config: FewRowsConfig) -> None:
    """out (M, H, D): the queries of each row over its pages, the new keys and values put into them."""
    (M, H, D), K = out.shape, inputs.pages[0].shape[2]
    block_s = max(16, min(config.block_s, config.block_s * 64 // D))  # wider heads take more registers a key
    bias = inputs.parts if inputs.bias is None else inputs.bias
    rows_attend_kernel[(K, M)](
        inputs.parts, bias, *inputs.rope, at.rows, at.tables, *inputs.pages, out, D**-0.5, M, H, K,
        at.rows.stride(0), at.tables.shape[1],
        D=D, GROUP=H // K, BLOCK_G=row_block(H // K), PARTS=inputs.parts.shape[0], BIAS=inputs.bias is not None,
        PAGE_SIZE=at.page_size, BLOCK_S=block_s if out.is_cuda else 16, PRECISION=precision(out),
        num_stages=1, maxnreg=config.attend_registers, **overlap(config.pdl, config.attend_warps),
    )  # fmt: skip
