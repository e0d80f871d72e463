"""The two ways round a ring: gather all keys and values, or trade tokens for heads (Ulysses, Jacobs et al. 2023).

Gathered keys cost the memory of the whole sequence's keys in every layer and one exposed message, and suit short
sequences, sliding windows and any kernel. Ulysses sends q, k, v and out once each, 1/P of them to each rank; then a
rank has the whole sequence for H/P heads and any kernel will do, but P may not exceed the heads. With fewer kv heads
than ranks each is sent to all ranks whose query heads read it.
"""

from typing import Any

import torch
from torch import Tensor

from parallel.collectives_operators import Along
from parallel.context_parallel_blocks import wide


class GatherKeys(torch.autograd.Function):
    """(B, T/P, ...) of every rank -> (B, T, ...) in the ranks' order; gradients are summed in float32 or better."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, along: Along) -> Tensor:
        ctx.along, ctx.dtype = along, x.dtype
        gathered = along.all_gather(x[None])  # (P, B, T/P, ...)
        return gathered.transpose(0, 1).flatten(1, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ranks = ctx.along.size()
        parts = gradient.unflatten(1, (ranks, -1)).transpose(0, 1)  # (P, B, T/P, ...)
        return ctx.along.reduce_scatter(parts.to(wide(ctx.dtype)))[0].to(ctx.dtype), None


def gather_keys(k: Tensor, v: Tensor, along: Along, order: Tensor) -> tuple[Tensor, Tensor]:
    """k and v (B, T/P, K, D) of this rank -> those of the whole sequence (B, T, K, D), its tokens in order.

    `order` (T,) says where each token lies in the ranks' shares laid end to end (sequence_order).
    """
    return GatherKeys.apply(torch.stack((k, v), dim=2), along)[:, order].unbind(2)


def heads_for_tokens(x: Tensor, along: Along) -> Tensor:
    """(B, T/P, H, D) -> (B, T, H/P, D): this rank's heads of every token; the sequence lies over the ranks in order."""
    ranks = along.size()
    blocks = x.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4)  # (P, B, T/P, H/P, D)
    received = along.all_to_all(blocks.contiguous())
    return received.transpose(0, 1).flatten(1, 2)


def tokens_for_heads(x: Tensor, along: Along) -> Tensor:
    """(B, T, H/P, D) -> (B, T/P, H, D): the way back."""
    ranks = along.size()
    blocks = x.unflatten(1, (ranks, -1)).transpose(0, 1)  # (P, B, T/P, H/P, D)
    received = along.all_to_all(blocks.contiguous())
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


def spread_kv_heads(x: Tensor, ranks: int) -> Tensor:
    """(B, T, K, D) -> (B, T, max(K, P), D): a kv head once for each rank whose query heads read it."""
    K = x.shape[2]
    assert K % ranks == 0 or ranks % K == 0, f"{K} kv heads over {ranks} ranks"
    return x if K % ranks == 0 else x.repeat_interleave(ranks // K, dim=2)
