"""One block of a ring, and how blocks are joined: softmax over all keys from softmaxes over some of them.

With lse_b the logsumexp of a block's scores and out_b its result, the whole is

    lse = log sum_b exp(lse_b),    out = sum_b exp(lse_b - lse) out_b

kept in float32 or better and updated block by block, so that no logit is ever exponentiated by itself. Backward needs
no merging: with p = exp(s - lse) of the whole, dS = p (dP - delta) holds in every block (FlashAttention-2, Dao 2023).
This package knows no kernel: a block's attention is handed in, as BlockAttention, and joins itself to what the blocks
before it left, so that a kernel may begin with that in place of writing a result of its own.
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


@dataclass(frozen=True)
class Joined:
    """What the blocks so far give some rows: out (B, T, H, D) and lse (B, H, T), float32 or better, changed in place.

    `empty`: no block yet, so whatever lies there does not count. The first block has all rows.
    """

    out: Tensor
    lse: Tensor
    empty: bool

    def __getitem__(self, queries: slice) -> "Joined":
        return Joined(self.out[:, queries], self.lse[:, :, queries], self.empty)

    def add(self, out: Tensor, lse: Tensor) -> None:
        """A block's own result for these rows: out like q, lse float32 or better."""
        if self.empty:
            self.out.copy_(out)
            self.lse.copy_(lse)
            return
        new = torch.logaddexp(self.lse, lse)  # by the larger one: exp(lse) alone would overflow
        self.out.mul_(by_row(block_weight(self.lse, new))).addcmul_(out, by_row(block_weight(lse, new)))
        self.lse.copy_(new)


@dataclass(frozen=True)
class Sums:
    """Gradients of the blocks so far, float32 or better, changed in place; `empty`: what lies there does not count."""

    tensors: tuple[Tensor, ...]
    empty: bool

    def add(self, *parts: Tensor) -> None:
        for total, part in zip(self.tensors, parts, strict=True):
            if self.empty:
                total.copy_(part)
            else:
                total += part


class BlockAttention(Protocol):
    """Attention of q (B, T, H, D) over k, v (B, S, K, D) under a mask in the form that `prepare` gave it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, joined: Joined) -> None:
        """Join this block to `joined`; a query that saw no key in any block has out 0 and lse -inf."""

    def prepare_rows(self, rows: Rows) -> Any:
        """What backward takes in place of these rows, once for all blocks that have them."""

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, rows: Any, mask: Any, dq: Sums, arrive: Callable[[], Sums]
    ) -> None:
        """Add this block's gradients to dq and to the sums of dk and dv, given `rows` of the softmax over all blocks.

        arrive() gives the latter; it is called once, as late as can be, since they may still be on their way.
        """


class DifferentiableBlock:
    """BlockAttention of any `attend(q, k, v, mask) -> (out, lse)` with gradients through both: forward runs twice.

    A kernel that goes on from out and lse so far does without that, and without a pass that joins
    (llm/parallelize_context_blocks).
    """

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor, Any], tuple[Tensor, Tensor]]):
        self.attend = attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, joined: Joined) -> None:
        joined.add(*self.attend(q, k, v, mask))

    def prepare_rows(self, rows: Rows) -> Rows:
        return rows

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, mask: Any, dq: Sums, arrive: Callable[[], Sums]
    ) -> None:
        """out = sum_b w_b out_b with w_b = exp(lse_b - lse), so dlse_b = w_b dout (out_b - out)."""
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            out, lse = self.attend(*inputs, mask)
        weight = by_row(block_weight(lse.detach(), rows.lse))  # (B, T, H, 1), wide: so is what it multiplies
        dout = weight * rows.dout
        dlse = (dout * (out.detach() - rows.out.to(weight.dtype))).sum(-1).transpose(1, 2)  # (B, H, T)
        dq_part, *dkv_part = torch.autograd.grad((out, lse), inputs, (dout.to(out.dtype), dlse.to(lse.dtype)))
        dq.add(dq_part)
        arrive().add(*dkv_part)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums over blocks are kept in."""
    return torch.promote_types(dtype, torch.float32)


def by_row(numbers: Tensor) -> Tensor:
    """(B, H, T) -> (B, T, H, 1), beside the rows of out."""
    return numbers.transpose(1, 2)[..., None]


def block_weight(lse_b: Tensor, lse: Tensor) -> Tensor:
    """exp(lse_b - lse), 0 where the block or the whole row sees nothing."""
    return torch.exp(lse_b - lse.masked_fill(lse == -torch.inf, 0.0))
