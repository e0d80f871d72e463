"""The policy objectives, token by token and to be minimised; how they are summed is grpo_responses' business.

With r = exp(log policy - log old policy), A the advantage, and clip(r) = r held in 1 - clip_low .. 1 + clip_high:
    no_baseline, reinforce_with_baseline   -A log policy, where A is the reward, or the reward less a baseline
    grpo_clip    -min(r A, clip(r) A), also of Dr. GRPO and DAPO (Shao et al. 2024)
    gspo         the same of s = exp(mean of log r over the completion) (Zheng et al. 2025)
    cispo        -stop_gradient(clip(r)) A log policy (MiniMax 2025)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from alignment.grpo_kl import MAX_LOG_RATIO
from alignment.grpo_responses import Responses

OBJECTIVES = ("no_baseline", "reinforce_with_baseline", "grpo_clip", "gspo", "cispo")


@dataclass
class PolicyTokens:
    """What is known of each sampled token, all (B, T): outside `responses.mask` it may be anything.

    log_probs: under the policy that learns, with a gradient; old_log_probs: under the one that sampled, computed by the
    trainer; advantages; sampler_log_probs: the engine's, and reference_log_probs: the frozen reference's, or None.
    """

    responses: Responses
    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    sampler_log_probs: Tensor | None = None
    reference_log_probs: Tensor | None = None


@dataclass
class TokenObjective:
    """values (B, T), to be minimised; ratio (B, T), detached; clipped (B, T) bool: tokens without a gradient."""

    values: Tensor
    ratio: Tensor
    clipped: Tensor


def token_objective(tokens: PolicyTokens, objective: str, clip_low: float, clip_high: float) -> TokenObjective:
    """One of OBJECTIVES; `clip_low`, `clip_high`: how far below and above 1 the ratio may act."""
    assert objective in OBJECTIVES, f"{objective} is none of {OBJECTIVES}"
    mask, advantages = tokens.responses.mask, tokens.advantages
    # Elsewhere log-probs may be anything: 0 in, so that neither exp nor a gradient of it becomes nan.
    log_probs = torch.where(mask, tokens.log_probs, 0.0)
    log_ratio = log_probs - torch.where(mask, tokens.old_log_probs, 0.0).detach()
    if objective == "gspo":
        log_ratio = tokens.responses.means(log_ratio)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if objective in ("no_baseline", "reinforce_with_baseline"):
        return TokenObjective(-advantages * log_probs, ratio.detach(), torch.zeros_like(mask))
    held = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    if objective == "cispo":
        outside = mask & (held != ratio)  # they keep a gradient, with a smaller weight
        return TokenObjective(-held.detach() * advantages * log_probs, ratio.detach(), outside)
    values = -torch.minimum(ratio * advantages, held * advantages)
    above, below = ratio > 1.0 + clip_high, ratio < 1.0 - clip_low
    clipped = mask & ((above & (advantages > 0)) | (below & (advantages < 0)))
    return TokenObjective(values, ratio.detach(), clipped)
