"""The two crossings of tensor parallelism: where tokens enter a column of weights and where its rows leave it.

Between blocks the residual stream is whole on every rank, or, under sequence parallelism (Korthikanti et al. 2022), cut
by tokens, so that norms and additions are shared out and an all-reduce becomes a reduce-scatter and an all-gather of
the same bytes. What differs: the stream (B, T, C) is cut by flattened rows, not along T. Rank t holds the rows
t N/tp .. (t + 1) N/tp in a tensor of the shape (B, T/tp, C); everything on the stream works on single tokens, so no
transposing copy goes with a collective. With `chunks` (tensor_parallel_overlap) it holds such rows of every chunk.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel.collectives_operators import Along


class Enter(torch.autograd.Function):
    """x as it is; its gradient, of which each rank makes a share, is summed over the axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, along: Along) -> Tensor:
        ctx.along = along
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.along.all_reduce(gradient), None


class Leave(torch.autograd.Function):
    """The sum of x over the axis; its gradient is the same on every rank, and each share's too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, along: Along) -> Tensor:
        return along.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class GatherColumns(torch.autograd.Function):
    """(..., n) of every rank -> (..., P n); every rank goes on with the whole alike, so its gradient is a slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, along: Along, rank: int) -> Tensor:
        ctx.rank, ctx.columns = rank, x.shape[-1]
        parts = along.all_gather(x[None])  # (P, ..., n)
        return torch.cat(parts.unbind(), dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.narrow(-1, ctx.rank * ctx.columns, ctx.columns), None, None


@dataclass(frozen=True)
class Crossing:
    """How tokens enter and leave a layer's columns and rows: x (B, T, C), or (B, T/tp, C) of a stream that is cut."""

    along: Along
    ranks: int
    sequence_parallel: bool
    chunks: int = 1

    def enter(self, x: Tensor) -> Tensor:
        """What a column of weights reads: all tokens, on every rank. Under autocast in its dtype, as products read."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return self.gather_tokens(x) if self.sequence_parallel else Enter.apply(x, self.along)

    def leave(self, x: Tensor) -> Tensor:
        """The sum over ranks of (B, T, C), as the stream has it."""
        if not self.sequence_parallel:
            return Leave.apply(x, self.along)
        B, T, C = x.shape
        rows = x.reshape(self.chunks, self.ranks, -1, C).transpose(0, 1).reshape(B * T, C)  # no copy of one chunk
        return self.along.reduce_scatter(rows).view(B, T // self.ranks, C)

    def gather_tokens(self, x: Tensor) -> Tensor:
        """(B, T/tp, C) of every rank -> (B, T, C); gradients are summed and scattered."""
        B, tokens, C = x.shape
        rows = self.along.all_gather(x.reshape(B * tokens, C)).view(self.ranks, self.chunks, -1, C)
        return rows.transpose(0, 1).reshape(B, tokens * self.ranks, C)
