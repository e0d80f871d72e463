"""Attention with every score in memory, in float64 if its inputs are: what the kernels' tests compare with."""

import math

import torch
from torch import Tensor


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """out (B, T, H, D) and lse (B, H, T) of q over k, v (B, S, K, D) under a mask (B or 1, T, S); differentiable."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)  # (B, S, H, D)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * (scale or 1 / math.sqrt(q.shape[-1]))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = mask[:, None].any(-1).expand(scores.shape[:3])  # (B, H, T)
    scores = scores.masked_fill(~mask[:, None], -1e30)
    lse = torch.logsumexp(scores, -1)
    p = torch.exp(scores - lse[..., None]) * mask[:, None]
    return torch.einsum("bhts,bshd->bthd", p, v), lse.masked_fill(~seen, -math.inf)


def causal_mask(T: int, S: int, offset: int, window: int | None = None, causal: bool = True) -> Tensor:
    """(1, T, S): query i at key position i + offset sees the keys up to it, and no further back than the window."""
    distance = torch.arange(T)[:, None] + offset - torch.arange(S)[None, :]
    mask = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        mask = mask & (distance.abs() < window)
    return mask[None]


def packed_mask(lengths_q: list[int], lengths_k: list[int] | None = None, causal: bool = True) -> Tensor:
    """(1, N, N'): block diagonal; causal with each block's last query on its last key."""
    lengths_k = lengths_k or lengths_q
    blocks = [causal_mask(t, s, s - t, causal=causal)[0] for t, s in zip(lengths_q, lengths_k, strict=True)]
    return torch.block_diag(*[block.float() for block in blocks]).bool()[None]


def outputs_and_gradients(attend, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor) -> list[Tensor]:
    """[out, lse, dq, dk, dv] of a callable attend(q, k, v) -> (out, lse), for gradients dout and dlse."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    out, lse = attend(q, k, v)
    finite = lse.detach().isfinite()
    loss = (out * dout).sum() + (lse.masked_fill(~finite, 0.0) * dlse).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, (q, k, v))]
