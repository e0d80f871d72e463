"""What every block of one forward pass needs to know about its tokens, built once a batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llm.kv_cache import KVCache


@dataclass
class BlockContext:
    """Shared by all blocks of a forward pass.

    token_positions: (B, T) int64, or (1, T) where all rows share them: each token's place in its document, for RoPE;
        with a cache also its slot.
    doc_ids: (B, T) int32 or None; a token attends only within its document.
    cu_seqlens, max_seqlen: (documents + 1,) int32 and an int, the same packing as varlen kernels take it, or None.
    cache: the keys and values of the tokens before, or None.
    keys: key_lo and key_hi, (B or 1, T) int32, and S: a query sees the keys key_lo <= j < key_hi, which says every mask
        there is; None means plain causal with T = S.
    cache_lens: (B,) int32, the tokens of each row's sequence, these T being its last; None where they are not.
    mask, ranges: the same for dense backends, (B or 1, 1, T, S) bool, and for kernels; rope: cos and sin, each
        (B or 1, T, 1, D) float32. The model fills these in for its backend, once for all blocks.
    share: under context parallelism what attention needs to reach the other ranks' tokens (llm/parallelize_context);
        the masks are then in it.
    token_ids: (B, T) int64, for pipeline stages, which get states in their place.
    attend: attention over the engine's pages in place of the model's own backend, or None; attend_turns: it gets
        queries and keys without their positions and works these in itself.
    """

    token_positions: Tensor
    doc_ids: Tensor | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None
    cache: Any = None  # KVCache, or llm.engine_cache.StepCache
    keys: tuple[Tensor, Tensor, int] | None = None
    cache_lens: Tensor | None = None
    mask: Tensor | None = None
    ranges: Any = None  # kernel.flash_attention_ranges.KeyRanges
    rope: tuple[Tensor, Tensor] | None = None
    share: Any = None
    token_ids: Tensor | None = None
    attend: Callable | None = None
    attend_turns: bool = False


def document_starts(doc_ids: Tensor) -> Tensor:
    """(B, T) document ids, a document being a run of equal ones -> (B, T) int32, where each token's document begins."""
    columns = torch.arange(doc_ids.shape[1], device=doc_ids.device, dtype=torch.int32)
    begins = torch.ones_like(doc_ids, dtype=torch.bool)
    begins[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
    return torch.where(begins, columns, 0).cummax(dim=1).values


def dense_mask(keys: tuple[Tensor, Tensor, int]) -> Tensor:
    """The intervals of a context's `keys` as a mask (B or 1, 1, T, S), True where a query may attend."""
    key_lo, key_hi, num_keys = keys
    columns = torch.arange(num_keys, device=key_lo.device)  # (S,)
    return ((columns >= key_lo[..., None]) & (columns < key_hi[..., None]))[:, None]


def make_context(
    token_ids: Tensor,
    token_positions: Tensor | None = None,
    doc_ids: Tensor | None = None,
    cache: KVCache | None = None,
) -> BlockContext:
    """The context of a batch of token ids (B, T).

    Without positions a row's tokens follow the ones it has in the cache, or start at 0. With a cache, a token's slot
    is its position, so a right-padded prompt needs no mask of its own: what padding wrote is overwritten before any
    query gets as far.
    """
    num_tokens = token_ids.shape[1]
    cache_lens = None
    if token_positions is None:
        token_positions = torch.arange(num_tokens, device=token_ids.device)[None]  # (1, T)
        if cache is not None and cache.length > 0:
            token_positions = cache.positions[:, None] + token_positions  # (B, T)
            cache_lens = (cache.positions + num_tokens).int()  # (B,)
    keys = None
    if doc_ids is not None:
        assert cache is None, "documents are packed in training, a cache is for generation"
        columns = torch.arange(num_tokens, device=token_ids.device, dtype=torch.int32)
        keys = (document_starts(doc_ids), (columns + 1).expand(doc_ids.shape), num_tokens)
    elif cache is not None and cache.length > 0:
        key_hi = token_positions.int() + 1
        keys = (torch.zeros_like(key_hi), key_hi, cache.length + num_tokens)
    return BlockContext(token_positions, doc_ids=doc_ids, cache=cache, keys=keys, cache_lens=cache_lens)
