"""What every block of one forward pass needs to know about its tokens, built once a batch."""

from dataclasses import dataclass

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
    mask: (B or 1, 1, T, S) bool, True where a query may attend; None means plain causal with T = S.
    rope: cos and sin, each (B or 1, T, 1, D) float32; the model fills them in.
    """

    token_positions: Tensor
    doc_ids: Tensor | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None
    cache: KVCache | None = None
    mask: Tensor | None = None
    rope: tuple[Tensor, Tensor] | None = None


def document_mask(doc_ids: Tensor) -> Tensor:
    """(B, T) document ids to a causal mask (B, 1, T, T) that keeps documents apart."""
    num_tokens = doc_ids.shape[1]
    causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=doc_ids.device).tril()
    return ((doc_ids[:, :, None] == doc_ids[:, None, :]) & causal)[:, None]  # (B, 1, T, T)


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
    if token_positions is None:
        token_positions = torch.arange(num_tokens, device=token_ids.device)[None]  # (1, T)
        if cache is not None and cache.length > 0:
            token_positions = cache.positions[:, None] + token_positions  # (B, T)
    mask = None
    if doc_ids is not None:
        assert cache is None, "documents are packed in training, a cache is for generation"
        mask = document_mask(doc_ids)
    elif cache is not None and cache.length > 0:
        slots = torch.arange(cache.length + num_tokens, device=token_ids.device)  # (S,)
        mask = (slots <= token_positions[:, :, None])[:, None]  # (B or 1, 1, T, S)
    return BlockContext(token_positions, doc_ids=doc_ids, cache=cache, mask=mask)
