"""Log-probabilities of given tokens under a model, at the temperature they were sampled at, and the true entropy.

A policy at temperature T is softmax(logits / T); a trainer that leaves T out computes another policy's log-probs. Only
the logits and a number a row are kept for backward, as in llm/loss.py. N = B*T rows, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from llm.loss import chunk_rows, flatten, row_logsumexp, scaled_softmax


def token_log_probs(logits: Tensor, targets: Tensor, temperature: float = 1.0, num_ids: int | None = None) -> Tensor:
    """log softmax(logits / temperature) at the targets, differentiable: (B, T, V), (B, T) int64 -> (B, T) float32.

    logits[:, t] is what the model says after token t, and targets[:, t] is token t + 1 (a Batch's targets); where a
    target is negative (-100: no label) the result is 0. `num_ids`: ids from here up count as impossible, as they do
    for the sampler. float64 logits give float64.
    """
    assert temperature > 0, f"temperature={temperature}: a greedy sampler has no log-probs; use 1.0 for it"
    logits = logits[..., :num_ids]
    rows, flat_targets = flatten(logits, targets)
    return TokenLogProbs.apply(rows, flat_targets, temperature).view(targets.shape)


class TokenLogProbs(torch.autograd.Function):
    """logits (N, V), targets (N,) -> (N,): z_target - logsumexp(z) of z = logits / T; gradient (onehot - p) / T."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
        scaled = logits if temperature == 1.0 else logits / temperature
        lse = row_logsumexp(scaled)  # (N,)
        counted = targets >= 0
        index = torch.where(counted, targets, 0)[:, None]  # (N, 1)
        at_target = scaled.gather(1, index)[:, 0].to(lse.dtype)
        ctx.save_for_backward(logits, lse, index, counted)
        ctx.temperature = temperature
        return torch.where(counted, at_target - lse, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, lse, index, counted = ctx.saved_tensors
        scaled = logits if ctx.temperature == 1.0 else logits / ctx.temperature
        scale = torch.where(counted, gradient, 0.0) / ctx.temperature  # (N,)
        at_target = scaled.gather(1, index)[:, 0].to(lse.dtype)
        result = scaled_softmax(scaled, lse, -scale)  # (N, V)
        # Written over, not added: in bfloat16 a rounded p near 1 would swallow what is left of 1 - p.
        own = -torch.expm1(at_target - lse) * scale
        return result.scatter_(1, index, own[:, None].to(result.dtype)), None, None


@torch.no_grad()
def token_entropies(logits: Tensor, temperature: float = 1.0, num_ids: int | None = None) -> Tensor:
    """The entropy of softmax(logits / temperature) in nats, (B, T, V) -> (B, T) float32; a whole sum, not a sample."""
    logits = logits[..., :num_ids]
    rows = logits.reshape(-1, logits.shape[-1])
    parts = []
    for chunk in rows.split(chunk_rows(rows)):
        log_probs = torch.log_softmax(chunk.float() / temperature, dim=-1)
        parts.append(-(log_probs.exp() * log_probs.clamp(min=-1e4)).sum(-1))  # 0 x -inf is 0 here
    return torch.cat(parts).view(logits.shape[:-1])
