"""One block of a ring, and how blocks are joined: softmax over all keys from softmaxes over some of them.

With lse_b the logsumexp of a block's scores and out_b its result, the whole is

    lse = log sum_b exp(lse_b),    out = sum_b exp(lse_b - lse) out_b

kept in float32 or better and updated block by block, so that no logit is ever exponentiated by itself. Backward needs
no merging: with p = exp(s - lse) of the whole, dS = p (dP - delta) holds in every block (FlashAttention-2, Dao 2023).
This package knows no kernel: a block's attention is handed in, as BlockAttention.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """What backward knows of a block's queries: out and dout (B, T, H, D), lse (B, H, T), all of the whole sequence."""

    out: Tensor
    lse: Tensor
    dout: Tensor

    def __getitem__(self, queries: slice) -> "Rows":
        return Rows(self.out[:, queries], self.lse[:, :, queries], self.dout[:, queries])


class BlockAttention(Protocol):
    """Attention of q (B, T, H, D) over k, v (B, S, K, D) under a mask in the form that `prepare` gave it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
        """out like q, and lse (B, H, T) float32 or better: 0 and -inf for a query that sees no key."""

    def backward(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, mask: Any) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of this block, given out, lse and dout of the softmax over all blocks."""


class DifferentiableBlock:
    """BlockAttention of any `attend(q, k, v, mask) -> (out, lse)` with gradients through both: forward runs twice.

    A kernel whose backward takes out and lse from outside does without the second forward (llm/parallelize_context).
    """

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor, Any], tuple[Tensor, Tensor]]):
        self.attend = attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
        return self.attend(q, k, v, mask)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, mask: Any) -> tuple[Tensor, Tensor, Tensor]:
        """out = sum_b w_b out_b with w_b = exp(lse_b - lse), so dlse_b = w_b dout (out_b - out)."""
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            out, lse = self.attend(*inputs, mask)
        weight = by_row(block_weight(lse.detach(), rows.lse))  # (B, T, H, 1), wide: so is what it multiplies
        dout = weight * rows.dout
        dlse = (dout * (out.detach() - rows.out.to(weight.dtype))).sum(-1).transpose(1, 2)  # (B, H, T)
        return torch.autograd.grad((out, lse), inputs, (dout.to(out.dtype), dlse.to(lse.dtype)))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums over blocks are kept in."""
    return torch.promote_types(dtype, torch.float32)


def by_row(numbers: Tensor) -> Tensor:
    """(B, H, T) -> (B, T, H, 1), beside the rows of out."""
    return numbers.transpose(1, 2)[..., None]


def block_weight(lse_b: Tensor, lse: Tensor) -> Tensor:
    """exp(lse_b - lse), 0 where the block or the whole row sees nothing."""
    return torch.exp(lse_b - lse.masked_fill(lse == -torch.inf, 0.0))


class Merger:
    """The result so far of a rank's rows over the blocks added, of which the first has all rows: then `out`, `lse`.

    Each further block costs a pass over the float32 `out` of its rows, and no tensor as large beside it.
    """

    def __init__(self) -> None:
        self.out: Tensor | None = None  # (B, T, H, D)
        self.lse: Tensor | None = None  # (B, H, T)

    def add(self, queries: slice, out: Tensor, lse: Tensor) -> None:
        """A block's result of some rows: out like q, lse float32 or better."""
        if self.out is None:
            self.out, self.lse = out.to(wide(out.dtype), copy=True), lse.clone()
            return
        old = self.lse[:, :, queries]
        new = torch.logaddexp(old, lse)  # by the larger one: exp(lse) alone would overflow
        self.out[:, queries].mul_(by_row(block_weight(old, new))).addcmul_(out, by_row(block_weight(lse, new)))
        self.lse[:, :, queries] = new
