"""Ring attention (Liu et al. 2023): each rank keeps its queries, and keys and values pass round the ranks.

In P steps every rank sees the keys of all. While a block is computed, the keys of the next one arrive and these go on,
on a side stream. Backward sends keys round once more, and behind them the sums dK, dV that each rank adds to, in
float32 or better, until they are home again. What is kept for backward is a rank's own share alone. Sequences are cut
zig-zag (context_parallel_layout), so all ranks are busy in all steps, and what no query sees is not computed.

context_parallel_exchange has the two other ways: all keys gathered, or heads for tokens (Ulysses).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parallel.collectives import exchange
from parallel.collectives_pending import Pending
from parallel.context_parallel_blocks import BlockAttention, Joined, Rows, Sums, wide
from parallel.context_parallel_layout import RingBlock
from parallel.mesh import Mesh


@dataclass(frozen=True)
class Ring:
    """What one batch's attention needs: the ranks, their blocks with masks as the attention takes them, both in order.

    Made once a batch; all layers share it. `masks` has one entry a block.
    """

    mesh: Mesh
    blocks: list[RingBlock]
    masks: list[Any]
    attention: BlockAttention
    axis: str = "cp"

    def pass_on(self, tensor: Tensor) -> Pending:
        """Send a contiguous tensor to the next rank; wait() gives what the rank before sent."""
        ranks, place = self.mesh.size(self.axis), self.mesh.rank_in(self.axis)
        arriving = torch.empty_like(tensor)
        sends, receives = [(tensor, (place + 1) % ranks)], [(arriving, (place - 1) % ranks)]
        # A stream of its own: behind a bucket of gradients the next keys would come too late.
        return exchange(sends, receives, self.mesh, self.axis, stream="ring")


def ring_attention(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over the keys of all ranks, differentiable in q, k and v.

    q (B, T/P, H, D), k and v (B, T/P, K, D) of the tokens that zigzag_columns names; out like q, and lse (B, H, T/P)
    float32 or better, which has no gradient. Called by all ranks of the axis.
    """
    return RingAttention.apply(q, k, v, ring)


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
        out, lse = ring_forward(q, torch.stack((k, v)), ring)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring, ctx.autocast = ring, autocast_of(q)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        device, dtype, enabled = ctx.autocast
        with torch.autocast(device, dtype, enabled=enabled):  # for a block that runs forward again
            dq, dkv = ring_backward(q, torch.stack((k, v)), Rows(out, lse, dout), ctx.ring)
        return dq, *dkv.to(k.dtype).unbind(), None


def autocast_of(tensor: Tensor) -> tuple[str, torch.dtype, bool]:
    """The device type, dtype and state of autocast, as torch.autocast takes them."""
    kind = tensor.device.type
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)


def ring_forward(q: Tensor, keys: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
    """out and lse of q; `keys` (2, B, T/P, K, D) are this rank's k and v."""
    out, lse = empty_results(q)
    for step, (block, mask) in enumerate(zip(ring.blocks, ring.masks, strict=True)):
        arriving = ring.pass_on(keys) if step < len(ring.blocks) - 1 else None
        # Keys have no second name, which would hold them while the next ones arrive.
        joined = Joined(out, lse, step == 0)[block.queries]
        ring.attention.forward(q[:, block.queries], *keys[:, :, block.keys], mask, joined)
        if arriving is not None:
            (keys,) = arriving.wait()
    return out.to(q.dtype), lse


def empty_results(q: Tensor) -> tuple[Tensor, Tensor]:
    """out (B, T, H, D) and lse (B, H, T) for the rows of q, not filled."""
    (B, T, H, _), dtype = q.shape, wide(q.dtype)
    return torch.empty(q.shape, dtype=dtype, device=q.device), torch.empty(B, H, T, dtype=dtype, device=q.device)


def ring_backward(q: Tensor, keys: Tensor, rows: Rows, ring: Ring) -> tuple[Tensor, Tensor]:
    """dq, and (2, B, T/P, K, D) dk and dv of this rank's keys, summed over the queries of all ranks.

    The sums of a rank's keys travel one step behind the keys, and end one step later, at home. They are waited for
    where the block needs them, which may be in the midst of it.
    """
    dq = torch.empty(q.shape, dtype=wide(q.dtype), device=q.device)
    prepared: dict[int, Any] = {}  # by the first query: all of them, or the second chunk's
    sums = TravellingSums(ring, keys)
    for step, (block, mask) in enumerate(zip(ring.blocks, ring.masks, strict=True)):
        arriving = ring.pass_on(keys) if step < len(ring.blocks) - 1 else None
        queries = block.queries
        if queries.start not in prepared:
            prepared[queries.start] = ring.attention.prepare_rows(rows[queries])
        part, arrive = Sums((dq[:, queries],), step == 0), partial(sums.arrive, block.keys)
        ring.attention.backward(q[:, queries], *keys[:, :, block.keys], prepared[queries.start], mask, part, arrive)
        sums.go_on()
        if arriving is not None:
            (keys,) = arriving.wait()
    return dq.to(q.dtype), sums.at_home()


class TravellingSums:
    """dk and dv, (2, B, T/P, K, D), of the keys at hand, which they follow round the ring."""

    def __init__(self, ring: Ring, keys: Tensor):
        self.ring = ring
        self.dkv = torch.empty(keys.shape, dtype=wide(keys.dtype), device=keys.device)
        self.pending: Pending | None = None

    def arrive(self, keys: slice) -> Sums:
        """Those of some of the keys, once they are here."""
        first = self.pending is None
        if not first:
            (self.dkv,) = self.pending.wait()
        return Sums(self.dkv[:, :, keys].unbind(), first)

    def go_on(self) -> None:
        self.pending = self.ring.pass_on(self.dkv)

    def at_home(self) -> Tensor:
        (dkv,) = self.pending.wait()
        return dkv
