"""Caches of known contents and decode's definition, a sequence at a time in float64: what its tests compare with."""

import math

import torch
from torch import Tensor

from kernel.flash_attention_triton_decode import DecodeOptions
from tests.kernel.attention_reference import causal_mask, dense_attention


def random_cache(lengths: list[int], S: int, heads: tuple[int, int], T: int, D: int) -> list[Tensor]:
    """q (B, T, H, D), caches (B, S, K, D) whose slots behind a sequence's length hold nan, and the lengths."""
    H, K = heads
    q, k, v = (torch.randn(len(lengths), n, h, D) for n, h in ((T, H), (S, K), (S, K)))
    for row, length in enumerate(lengths):
        k[row, length:] = v[row, length:] = math.nan
    return [q, k, v, torch.tensor(lengths, dtype=torch.int32)]


def to_pages(k: Tensor, v: Tensor, lengths: list[int], page_size: int) -> list[Tensor]:
    """The same caches cut into shuffled pages; unused pages hold nan, entries of the table past a length 2^30."""
    per_row = -(-k.shape[1] // page_size)
    total = len(lengths) * per_row + 3
    order = torch.randperm(total, generator=torch.Generator().manual_seed(1)).int()
    pages = [torch.full((total, page_size, *x.shape[2:]), math.nan, dtype=x.dtype) for x in (k, v)]
    table = torch.full((len(lengths), per_row), 2**30, dtype=torch.int32)
    for row, length in enumerate(lengths):
        for index in range(-(-length // page_size)):
            page = order[row * per_row + index]
            table[row, index] = page
            for x, cache in zip((k, v), pages, strict=True):
                part = x[row, index * page_size : (index + 1) * page_size]
                cache[page, : len(part)] = part
    return [*pages, table]


def exact_decode(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], options: DecodeOptions = DecodeOptions()
) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64 of q (B, T, H, D) over contiguous caches."""
    B, T, H, D = q.shape
    out = torch.zeros(B, T, H, D, dtype=torch.float64, device=q.device)
    lse = torch.full((B, H, T), -math.inf, dtype=torch.float64, device=q.device)
    for row, length in enumerate(lengths):
        if length:
            query, keys, values = (x[row : row + 1].double() for x in (q, k[:, :length], v[:, :length]))
            mask = causal_mask(T, length, length - T, options.window).to(q.device)
            results = dense_attention(query, keys, values, mask, options.scale, options.softcap)
            out[row], lse[row] = results[0][0], results[1][0]
    return out, lse


def relative_error(x: Tensor, exact: Tensor) -> float:
    """||x - exact|| / ||exact|| over the finite entries, which must be the same ones."""
    finite = exact.isfinite()
    assert torch.equal(x.isfinite(), finite)
    return ((x.double() - exact)[finite].norm() / exact[finite].norm().clamp_min(1e-30)).item()
