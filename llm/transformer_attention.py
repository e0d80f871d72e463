"""The attention backends behind one seam: attend(q, k, v, ctx) -> (out, lse).

q (B, T, H, D), k and v (B, S, K, D) in the layout that the projections write; out (B, T, H, D). lse (B, H, T) float32
is the logsumexp of each query's scaled scores, or None where a backend does not give it. A query that may attend to
nothing gets out = 0 and lse = -inf. Scores are scaled by 1/sqrt(D).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from llm.transformer_context import BlockContext, dense_mask
from llm.transformer_layers import at_least_float32

Attend = Callable[[Tensor, Tensor, Tensor, BlockContext], tuple[Tensor, Tensor | None]]


def eager_attend(q: Tensor, k: Tensor, v: Tensor, ctx: BlockContext) -> tuple[Tensor, Tensor]:
    """The equation itself, softmax(q k^T / sqrt(D)) v, with every score in memory: the reference to read."""
    B, T, H, D = q.shape
    K = k.shape[2]
    q = q.view(B, T, K, H // K, D)  # query head h reads kv head h // (H / K)
    scores = torch.einsum("btkgd,bskd->bkgts", q, k)  # (B, K, G, T, S)
    scores = at_least_float32(scores) / math.sqrt(D)
    mask = ctx.mask
    if mask is None:
        mask = torch.ones(T, k.shape[1], dtype=torch.bool, device=q.device).tril()[None, None]  # (1, 1, T, S)
    scores = scores.masked_fill(~mask[:, :, None], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)  # (B, K, G, T)
    probabilities = torch.exp(scores - lse.masked_fill(lse.isinf(), 0.0)[..., None])
    out = torch.einsum("bkgts,bskd->btkgd", probabilities.to(v.dtype), v)  # (B, T, K, G, D)
    return out.reshape(B, T, H, D), lse.reshape(B, H, T)


def sdpa_attend(q: Tensor, k: Tensor, v: Tensor, ctx: BlockContext) -> tuple[Tensor, None]:
    """torch's scaled_dot_product_attention: flash kernels on CPU and GPU, no lse."""
    if q.shape[2] != k.shape[2]:
        # Only some of torch's kernels take fewer kv heads; with the heads repeated, all of them do.
        groups = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)  # (B, S, H, D)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D), (B, H, S, D)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=ctx.mask, is_causal=ctx.mask is None)
    return out.transpose(1, 2), None  # (B, T, H, D)


def mock_attend(q: Tensor, k: Tensor, v: Tensor, ctx: BlockContext) -> tuple[Tensor, Tensor]:
    """The tiles of the Triton kernels in plain PyTorch: to read and to compare with, not to be quick."""
    from kernel.flash_attention_mock import flash_attention_mock

    return flash_attention_mock(q, k, v, ranges=ctx.ranges, block=(64, 64))


def triton_attend(q: Tensor, k: Tensor, v: Tensor, ctx: BlockContext) -> tuple[Tensor, Tensor]:
    """Our Triton kernels, forward and backward: kv heads are mapped, not repeated, and no T x S tensor exists.

    A few new tokens over a cache go to the decode kernel, which cuts the keys instead of the queries.
    """
    if decodes(ctx):
        from kernel.flash_attention_triton_decode import flash_attention_decode

        return flash_attention_decode(q, k, v, ctx.cache_lens)
    from kernel.flash_attention_triton import AttentionMask, flash_attention

    return flash_attention(q, k, v, AttentionMask(ranges=ctx.ranges))


BACKENDS: dict[str, Attend] = {
    "eager": eager_attend,
    "sdpa": sdpa_attend,
    "mock": mock_attend,
    "triton": triton_attend,
}
MAX_DECODED_TOKENS = 16  # a row: more fill a tile of queries, and the training kernel is the better one
KERNEL_BACKENDS = ("mock", "triton")  # they take the mask as key intervals, the others as a dense tensor


def decodes(ctx: BlockContext) -> bool:
    """Whether the decode kernel, which needs no mask and has no gradient, can take this forward pass."""
    few = ctx.token_positions.shape[1] <= MAX_DECODED_TOKENS
    return ctx.cache_lens is not None and few and not torch.is_grad_enabled()


def prepare_mask(backend: str, ctx: BlockContext) -> None:
    """Put the context's mask into the backend's form, once for all blocks of a forward pass."""
    if ctx.keys is None or (backend == "triton" and decodes(ctx)):
        return
    if backend in KERNEL_BACKENDS:
        from kernel.flash_attention_ranges import ranges_from_keys

        ctx.ranges = ranges_from_keys(ctx.keys[0].contiguous(), ctx.keys[1].contiguous(), ctx.keys[2])
    else:
        ctx.mask = dense_mask(ctx.keys)
