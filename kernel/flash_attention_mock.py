"""FlashAttention's tiles in plain PyTorch: the version to read first, and what the kernels are tested against.

Forward: Milakov and Gimelshein's online softmax over tiles of keys, as in FlashAttention-2 (Dao, 2023). For a tile of
queries keep a running maximum m, a running sum l and an output acc; each tile of scores s updates

    m' = max(m, max s),  p = exp(s - m'),  l' = l exp(m - m') + sum p,  acc' = acc exp(m - m') + p v

and at the end out = acc / l and lse = m + ln l. Backward recomputes p = exp(s - lse), so nothing of size T x S is kept.
The gradient of lse adds to dS: dS = p (dP - delta + dlse), where dP = dout v^T and delta = rowsum(dout * out).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernel.flash_attention_ranges import KeyRanges, offset_ranges


@dataclass(frozen=True)
class _Tiling:
    """What every tile needs: the mask as intervals, the scale, the softcap (0: none) and the sides of a tile."""

    ranges: KeyRanges
    scale: float
    softcap: float
    block_q: int
    block_k: int


def flash_attention_mock(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    ranges: KeyRanges | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    block: tuple[int, int] = (16, 16),
) -> tuple[Tensor, Tensor]:
    """Attention of q (B, T, H, D) over k, v (B, S, K, D): out like q, and lse (B, H, T), natural log.

    Without `ranges` it is causal, the last query seeing all keys. Differentiable in q, k and v, through lse too.
    """
    if ranges is None:
        B, T, S = q.shape[0], q.shape[1], k.shape[1]
        ranges = offset_ranges((B, T, S), S - T, True, None, q.device)
    tiling = _Tiling(ranges, scale or 1 / math.sqrt(q.shape[-1]), softcap, *block)
    return _FlashAttentionMock.apply(q, k, v, tiling)


def _scores(q: Tensor, k: Tensor, rows: slice, cols: slice, tiling: _Tiling) -> tuple[Tensor, Tensor]:
    """One tile's capped scores (B, H, bq, bk), and its mask (B, 1, bq, bk); q and k have H heads."""
    scores = torch.einsum("bthd,bshd->bhts", q[:, rows], k[:, cols]) * tiling.scale
    if tiling.softcap:
        scores = tiling.softcap * torch.tanh(scores / tiling.softcap)
    keys = torch.arange(cols.start, cols.stop, device=q.device)
    low, high = tiling.ranges.key_lo[:, rows, None], tiling.ranges.key_hi[:, rows, None]  # (B, bq, 1)
    return scores, ((keys >= low) & (keys < high))[:, None]


def _slices(length: int, block: int) -> list[slice]:
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


def _forward(q: Tensor, k: Tensor, v: Tensor, tiling: _Tiling) -> tuple[Tensor, Tensor]:
    B, T, H, D = q.shape
    out, lse = torch.empty_like(q), q.new_empty(B, H, T)
    for rows in _slices(T, tiling.block_q):
        size = rows.stop - rows.start
        m, l = q.new_full((B, H, size), -math.inf), q.new_zeros(B, H, size)
        acc = q.new_zeros(B, H, size, D)
        for cols in _slices(k.shape[1], tiling.block_k):
            scores, visible = _scores(q, k, rows, cols, tiling)
            if not visible.any():
                continue  # the kernels never visit such a tile
            scores = scores.masked_fill(~visible, -math.inf)
            m_new = torch.maximum(m, scores.amax(-1))
            finite = m_new.masked_fill(m_new == -math.inf, 0.0)  # -inf - -inf would be NaN
            p, alpha = torch.exp(scores - finite[..., None]), torch.exp(m - finite)
            l = l * alpha + p.sum(-1)
            acc = acc * alpha[..., None] + torch.einsum("bhts,bshd->bhtd", p, v[:, cols])
            m = m_new
        out[:, rows] = (acc / l.masked_fill(l == 0, 1.0)[..., None]).transpose(1, 2)  # (B, bq, H, D)
        lse[:, :, rows] = m + torch.log(l)  # -inf where nothing was visible
    return out, lse


class _FlashAttentionMock(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, tiling):
        group = q.shape[2] // k.shape[2]
        out, lse = _forward(q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2), tiling)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.tiling = tiling
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        tiling, group = ctx.tiling, q.shape[2] // k.shape[2]
        k_heads, v_heads = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)  # (B, S, H, D)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k_heads), torch.zeros_like(v_heads)
        delta = (dout * out).sum(-1).transpose(1, 2) - dlse.masked_fill(lse == -math.inf, 0.0)  # (B, H, T)
        for rows in _slices(q.shape[1], tiling.block_q):
            row_lse = lse[:, :, rows, None].masked_fill(lse[:, :, rows, None] == -math.inf, 0.0)
            for cols in _slices(k.shape[1], tiling.block_k):
                scores, visible = _scores(q, k_heads, rows, cols, tiling)
                if not visible.any():
                    continue
                p = torch.exp(scores.masked_fill(~visible, -math.inf) - row_lse)
                dp = torch.einsum("bthd,bshd->bhts", dout[:, rows], v_heads[:, cols])
                ds = p * (dp - delta[:, :, rows, None])
                if tiling.softcap:
                    ds = ds * (1 - (scores / tiling.softcap) ** 2)
                ds = ds * tiling.scale
                dv[:, cols] += torch.einsum("bhts,bthd->bshd", p, dout[:, rows])
                dk[:, cols] += torch.einsum("bhts,bthd->bshd", ds, q[:, rows])
                dq[:, rows] += torch.einsum("bhts,bshd->bthd", ds, k_heads[:, cols])
        shape = (*k.shape[:3], group, k.shape[3])  # (B, S, K, G, D): a kv head's gradient is its group's sum
        return dq, dk.view(shape).sum(3), dv.view(shape).sum(3), None
