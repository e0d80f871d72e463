"""RoPE of new queries and keys, and the keys and values into a paged cache, in one launch: what decoding does before
attention. Angles come from a table of all positions, so nothing is computed from them in a step.

rope_cache(q, k, v, tables, cache): q comes back turned; k is turned on its way into its page. No gradient.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel.launch_cache import cached


@triton.jit
def rope_cache_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, position_ptr, place_ptr, out_ptr, k_page_ptr, v_page_ptr,
    stride_q, stride_k, stride_v, H, K, D: tl.constexpr, BLOCK_H: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """All heads of one token; HALF is D / 2 rounded up to a power of two."""
    token = tl.program_id(0).to(tl.int64)
    offs_i = tl.arange(0, HALF)
    position, place = tl.load(position_ptr + token), tl.load(place_ptr + token)
    in_half = offs_i < D // 2
    cos = tl.load(cos_ptr + position * (D // 2) + offs_i, mask=in_half, other=0.0)[None, :]
    sin = tl.load(sin_ptr + position * (D // 2) + offs_i, mask=in_half, other=0.0)[None, :]
    for first_head in range(0, H, BLOCK_H):
        heads = first_head + tl.arange(0, BLOCK_H)
        inside = (heads < H)[:, None] & in_half[None, :]
        source = q_ptr + token * stride_q + heads[:, None] * D + offs_i[None, :]
        target = out_ptr + (token * H + heads)[:, None] * D + offs_i[None, :]
        first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + D // 2, mask=inside, other=0.0).to(tl.float32)
        tl.store(target, (first * cos - second * sin).to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(target + D // 2, (second * cos + first * sin).to(out_ptr.dtype.element_ty), mask=inside)
    for first_head in range(0, K, BLOCK_H):
        heads = first_head + tl.arange(0, BLOCK_H)
        inside = (heads < K)[:, None] & in_half[None, :]
        source = heads[:, None] * D + offs_i[None, :]
        target = (place * K + heads)[:, None] * D + offs_i[None, :]
        kind = k_page_ptr.dtype.element_ty
        first = tl.load(k_ptr + token * stride_k + source, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(k_ptr + token * stride_k + source + D // 2, mask=inside, other=0.0).to(tl.float32)
        tl.store(k_page_ptr + target, (first * cos - second * sin).to(kind), mask=inside)
        tl.store(k_page_ptr + target + D // 2, (second * cos + first * sin).to(kind), mask=inside)
        first = tl.load(v_ptr + token * stride_v + source, mask=inside, other=0.0)
        second = tl.load(v_ptr + token * stride_v + source + D // 2, mask=inside, other=0.0)
        tl.store(v_page_ptr + target, first.to(kind), mask=inside)
        tl.store(v_page_ptr + target + D // 2, second.to(kind), mask=inside)


@dataclass(frozen=True)
class RopeTables:
    """cos and sin of every position, each (positions, D/2) float32, and the positions (N,) int64 of the new tokens."""

    cos: Tensor
    sin: Tensor
    positions: Tensor


def rope_cache(
    q: Tensor, k: Tensor, v: Tensor, tables: RopeTables, pages: tuple[Tensor, Tensor], places: Tensor
) -> Tensor:
    """q (N, H, D), k and v (N, K, D) with heads side by side -> q turned (N, H, D), contiguous.

    pages: keys and values, each (pages, page_size, K, D) contiguous; places (N,) int64: page * page_size + offset.
    """
    (N, H, D), K = q.shape, k.shape[1]
    assert q.stride()[1:] == k.stride()[1:] == v.stride()[1:] == (D, 1), f"strides {q.stride()}, {k.stride()}"
    assert tables.cos.shape[1] == D // 2 and pages[0].is_contiguous() and pages[1].is_contiguous()
    out = torch.empty(N, H, D, dtype=q.dtype, device=q.device)
    half = triton.next_power_of_2(D // 2)
    args = (
        q, k, v, tables.cos, tables.sin, tables.positions, places, out, *pages,
        q.stride(0), k.stride(0), v.stride(0), H, K,
    )  # fmt: skip
    constants = dict(D=D, BLOCK_H=min(triton.next_power_of_2(H), max(1, 1024 // half)), HALF=half)
    cached(rope_cache_kernel).launch((N,), args, constants, num_warps=4)
    return out
