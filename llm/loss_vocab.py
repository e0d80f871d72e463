"""The loss of logits that lie over several ranks by vocabulary: no rank ever has them all.

Each rank has its tokens' logsumexp and, where the target is one of them, the target's logit: two numbers a row, which
one all-gather exchanges. The gradient needs nothing more: softmax of the own logits, less 1 at an own target. Every
rank returns the loss of all tokens. Plain and fused (kernel/cross_entropy) losses share `combine`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from llm.loss import (
    CrossEntropyLoss,
    FusedCrossEntropyLoss,
    LossSums,
    row_logsumexp,
    scaled_softmax,
    softmax_rows,
)
from llm.transformer_layers import Linear
from parallel.collectives_operators import Along
from parallel.tensor_parallel import VocabOutput, VocabShard

Loss = CrossEntropyLoss | FusedCrossEntropyLoss


def vocab_head(model: nn.Module, loss: Loss, targets: Tensor) -> Callable[[Tensor, Linear], LossSums] | None:
    """The loss as what a model with a cut output layer makes of its states; None where that layer is whole."""
    output = model.output
    if output is None or not isinstance(output.matmul, VocabOutput):
        return None
    if isinstance(loss, FusedCrossEntropyLoss):
        return lambda states, layer: fused_loss(states, layer, targets, loss)
    return lambda states, layer: plain_loss(layer.matmul.local_logits(states, layer.weight), layer, targets, loss)


def combine(lse: Tensor, target_logit: Tensor, along: Along) -> tuple[Tensor, Tensor]:
    """lse (n,) over a rank's tokens and the target's logit (n,), 0 where it is another rank's -> both over all."""
    both = along.all_gather(torch.stack((lse, target_logit))[None])  # (tp, 2, n)
    return torch.logsumexp(both[:, 0], dim=0), both[:, 1].sum(dim=0)


def plain_loss(logits: Tensor, output: Linear, targets: Tensor, loss: CrossEntropyLoss) -> LossSums:
    """This rank's logits (B, T, rows), targets (B, T) -> the sums over all tokens, equal on every rank."""
    shard: VocabShard = output.matmul.shard
    rows, flat = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    sums = VocabCrossEntropy.apply(rows, flat, (loss.ignore_index, loss.z_loss), shard.first, shard.crossing.along)
    return LossSums(sums[0], sums[1], (targets != loss.ignore_index).sum())


def fused_loss(states: Tensor, output: Linear, targets: Tensor, loss: FusedCrossEntropyLoss) -> LossSums:
    """As plain_loss, from states (B, T, C) and without even this rank's logits."""
    from kernel.cross_entropy import linear_cross_entropy

    shard: VocabShard = output.matmul.shard
    states = output.matmul.states(states)
    options = replace(
        loss.options(),
        vocab_offset=shard.first,
        vocab_size=shard.size,
        combine=lambda lse, target_logit: combine(lse, target_logit, shard.crossing.along),
    )
    rows, flat = states.reshape(-1, states.shape[-1]), targets.reshape(-1)
    if torch.is_autocast_enabled(rows.device.type):
        rows = rows.to(torch.get_autocast_dtype(rows.device.type))
    loss_sum, z_loss_sum = linear_cross_entropy(rows, output.weight, flat, options)
    return LossSums(loss_sum, z_loss_sum, (targets != loss.ignore_index).sum())


class VocabCrossEntropy(torch.autograd.Function):
    """logits (N, rows) from token `first` on, targets (N,) -> loss sum and z-loss sum over the whole vocabulary."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, settings: tuple[int, float], first: int, along: Along
    ) -> tuple[Tensor, Tensor]:
        ignore_index, z_loss = settings
        counted = targets != ignore_index
        own, index = own_targets(targets, counted, first, logits.shape[1])
        lse = row_logsumexp(logits)
        at_target = torch.where(own, logits.gather(1, index)[:, 0].to(lse.dtype), 0.0)
        lse, at_target = combine(lse, at_target, along)
        ctx.save_for_backward(logits, targets, lse)
        ctx.settings, ctx.first = settings, first
        loss_sum = torch.where(counted, lse - at_target, 0.0).sum()
        return loss_sum, z_loss * torch.where(counted, lse.square(), 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, grad_z_loss: Tensor) -> tuple[Tensor, None, None, None, None]:
        """d/dlogits = p (grad_loss + 2 z lse grad_z_loss) - onehot grad_loss, of this rank's columns."""
        logits, targets, lse = ctx.saved_tensors
        ignore_index, z_loss = ctx.settings
        counted = targets != ignore_index
        own, index = own_targets(targets, counted, ctx.first, logits.shape[1])
        scale = torch.where(counted, grad_loss + 2 * z_loss * lse * grad_z_loss, 0.0)  # (N,)
        # As in llm/loss: the target's entry is made on its own, since adding to a rounded p would lose it.
        at_target = softmax_rows(logits.gather(1, index), lse, scale)
        at_target = at_target - torch.where(own, grad_loss, 0.0)[:, None]
        gradient = scaled_softmax(logits, lse, scale)
        return gradient.scatter_(1, index, at_target.to(gradient.dtype)), None, None, None, None


def own_targets(targets: Tensor, counted: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Which targets (N,) are counted and this rank's, and their columns (N, 1) here, 0 for the others."""
    local = targets - first
    own = counted & (local >= 0) & (local < rows)
    return own, torch.where(own, local, 0)[:, None]
