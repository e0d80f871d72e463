"""Which keys a query sees, as one interval a query: causal, offset, packed documents and windows in one form.

Every mask of this stack lets query i see the keys key_lo[i] <= j < key_hi[i], and neither end ever moves backwards
with i. So the queries that see key j form an interval too, a tile of scores is known to be empty, full or mixed from
the ends of its first and last row, and the kernels need no other notion of a mask.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeyRanges:
    """The interval of keys of each query, and of queries of each key; build once a batch, all layers share it.

    key_lo, key_hi: (B, T) int32. query_lo, query_hi: (B, S) int32, the same relation seen from the keys.
    """

    key_lo: Tensor
    key_hi: Tensor
    query_lo: Tensor
    query_hi: Tensor


def ranges_from_keys(key_lo: Tensor, key_hi: Tensor, num_keys: int) -> KeyRanges:
    """KeyRanges of intervals (B, T) whose two ends are non-decreasing along T; an empty one masks its query."""
    keys = torch.arange(num_keys, device=key_lo.device, dtype=key_lo.dtype).expand(key_lo.shape[0], -1).contiguous()
    query_lo = torch.searchsorted(key_hi, keys, right=True, out_int32=True)  # first query whose end lies after j
    query_hi = torch.searchsorted(key_lo, keys, right=True, out_int32=True)  # first query that starts after j
    return KeyRanges(key_lo, key_hi, query_lo, query_hi)


def document_ranges(doc_ids: Tensor, causal: bool = True, window: int | None = None) -> KeyRanges:
    """KeyRanges of self-attention inside documents: a document is a run of equal ids in doc_ids (B, T)."""
    T = doc_ids.shape[1]
    positions = torch.arange(T, device=doc_ids.device, dtype=torch.int32).expand(doc_ids.shape)  # (B, T)
    first = torch.ones_like(doc_ids, dtype=torch.bool)
    first[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
    starts = torch.where(first, positions, 0).cummax(dim=1).values  # (B, T)
    last = first.roll(-1, dims=1)  # a token before a first one; the row's last token, since token 0 is a first one
    ends = torch.where(last, positions + 1, T).flip(1).cummin(dim=1).values.flip(1)  # (B, T)
    return _within(starts, ends, positions, causal, window, T)


def cu_seqlens_ranges(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    num_queries: int,
    num_keys: int,
    causal: bool = True,
    window: int | None = None,
) -> KeyRanges:
    """KeyRanges (1, N) of packed sequences; causal aligns each sequence's last query with its last key."""
    queries = torch.arange(num_queries, device=cu_seqlens_q.device, dtype=torch.int32)  # (T,)
    sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), queries, right=True)  # (T,)
    sequence = sequence.clamp_max(cu_seqlens_q.shape[0] - 2)  # tokens after the last sequence join it
    starts, ends = cu_seqlens_k[sequence].int(), cu_seqlens_k[sequence + 1].int()  # (T,)
    positions = ends - (cu_seqlens_q[sequence + 1].int() - queries)  # (T,) each query's place among the keys
    ranges = _within(starts[None], ends[None], positions[None], causal, window, num_keys)
    return ranges


def offset_ranges(shape: tuple[int, int, int], offset: int, causal: bool, window: int | None, device) -> KeyRanges:
    """KeyRanges of (B, T, S) where query i sits at key position i + offset."""
    B, T, S = shape
    positions = torch.arange(T, device=device, dtype=torch.int32).expand(B, T) + offset  # (B, T)
    zeros = torch.zeros_like(positions)
    return _within(zeros, zeros + S, positions, causal, window, S)


def _within(
    starts: Tensor, ends: Tensor, positions: Tensor, causal: bool, window: int | None, num_keys: int
) -> KeyRanges:
    """Each query's [start, end), cut at its own position when causal and to the last `window` keys."""
    low, high = starts, ends
    if window is not None:
        low = torch.maximum(low, positions - (window - 1))
    if causal:
        high = torch.minimum(high, positions + 1)
    elif window is not None:
        high = torch.minimum(high, positions + window)
    # Nothing visible: low = high inside the document, so that both ends stay sorted.
    low = torch.minimum(low, ends)
    high = torch.maximum(high, low)
    return ranges_from_keys(low.int().contiguous(), high.int().contiguous(), num_keys)
