"""Group-relative policy optimisation as pure tensor functions; `policy_loss` puts the parts in grpo_*.py together.

An algorithm is a choice of parts, one YAML file each in configs/algorithm: GRPO (Shao et al. 2024), Dr. GRPO (Liu et
al. 2025), DAPO (Yu et al. 2025), GSPO (Zheng et al. 2025), CISPO (MiniMax 2025), RLOO and REINFORCE. Formulas, with
what is measured of each: docs/grpo.md. B rows, T targets; a row is a completion, or holds several (`doc_ids`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from alignment.grpo_advantages import BASELINES, SCALES, STD_EPS, group_advantages, overlong_penalty
from alignment.grpo_correction import importance_weights
from alignment.grpo_kl import ESTIMATORS, kl_estimate
from alignment.grpo_objectives import OBJECTIVES, PolicyTokens, TokenObjective, token_objective
from alignment.grpo_responses import AGGREGATIONS, aggregate, count_units
from configs.errors import UserError, check_choice, check_positive


@dataclass
class AlgorithmConfig:
    """Which advantages, objective and normalisation; the defaults are GRPO's."""

    baseline: str = "group_mean"  # none, group_mean, leave_one_out
    scale: str = "group_std"  # what advantages are divided by: none or group_std
    std_eps: float = STD_EPS
    objective: str = "grpo_clip"
    clip_low: float = 0.2  # the ratio acts between 1 - clip_low and 1 + clip_high
    clip_high: float = 0.2
    aggregation: str = "sequence_mean"  # token_mean, sequence_mean, constant
    kl: str = "k3"
    kl_coef: float = 0.0  # weight of the KL to the reference; 0: no reference model is needed
    importance_cap: float | None = None  # truncated importance sampling between sampler and trainer; null: none
    dynamic_sampling: bool = False  # groups with equal rewards are replaced by new ones
    overlong_tokens: int = 0  # DAPO's punishment over the last so many tokens before the limit; 0: none

    def __post_init__(self) -> None:
        check_choice("algorithm.baseline", self.baseline, BASELINES)
        check_choice("algorithm.scale", self.scale, SCALES)
        check_choice("algorithm.objective", self.objective, OBJECTIVES)
        check_choice("algorithm.aggregation", self.aggregation, AGGREGATIONS)
        check_choice("algorithm.kl", self.kl, ESTIMATORS)
        check_positive(**{"algorithm.std_eps": self.std_eps, "algorithm.clip_high": self.clip_high})
        if not 0 < self.clip_low <= 1:
            raise UserError(f"algorithm.clip_low={self.clip_low} must lie in 0..1, 0 excluded; 0.2 is usual")
        if self.kl_coef < 0 or self.overlong_tokens < 0:
            raise UserError(
                f"algorithm.kl_coef={self.kl_coef} and algorithm.overlong_tokens={self.overlong_tokens} must not be "
                f"negative; use 0 for none"
            )
        if self.kl_coef > 0 and self.kl == "k1":
            raise UserError("algorithm.kl=k1 has no expected gradient as a loss; use k2 or k3, or algorithm.kl_coef=0")
        if self.importance_cap is not None and self.importance_cap <= 0:
            raise UserError(f"algorithm.importance_cap={self.importance_cap} must be positive; use null for none")
        if self.objective == "gspo" and self.aggregation != "sequence_mean":
            raise UserError(
                f"algorithm.objective=gspo has one ratio a completion, which algorithm.aggregation={self.aggregation} "
                f"would weigh by length; use sequence_mean"
            )


@dataclass
class PolicyLoss:
    """A batch's share of the loss; sums and counts add over micro-batches and ranks.

    loss_sum: differentiable; divide by the global batch's `units` (grpo_responses.count_units).
    sums: over sampled tokens, detached; `mean_metrics` divides them. maxima: to be combined by max.
    """

    loss_sum: Tensor
    units: int
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


def advantages_of(config: AlgorithmConfig, rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Advantages (R,) of rewards (R,) whose prompts are `group_ids` (R,)."""
    return group_advantages(rewards, group_ids, config.baseline, config.scale, config.std_eps)


def shaped_rewards(config: AlgorithmConfig, rewards: Tensor, lengths: Tensor, max_response_tokens: int) -> Tensor:
    """Rewards (R,) with the punishment of completions of `lengths` (R,) that come near the limit."""
    if config.overlong_tokens == 0:
        return rewards
    if config.overlong_tokens > max_response_tokens:
        raise UserError(
            f"algorithm.overlong_tokens={config.overlong_tokens} must not exceed the {max_response_tokens} tokens that "
            f"a completion may have; lower it, or use 0 for no punishment"
        )
    return rewards + overlong_penalty(lengths, max_response_tokens, config.overlong_tokens)


def policy_loss(
    tokens: PolicyTokens,
    config: AlgorithmConfig,
    max_response_tokens: int | None = None,
    entropies: Tensor | None = None,
) -> PolicyLoss:
    """The loss of one batch of sampled tokens, and what is logged of it.

    `max_response_tokens`: what aggregation "constant" divides each completion by. `entropies` (B, T): of the policy,
    to be logged (grpo_log_probs.token_entropies).
    """
    responses = tokens.responses
    objective = token_objective(tokens, config.objective, config.clip_low, config.clip_high)
    sums, maxima = objective_metrics(tokens, objective)
    values = objective.values
    if tokens.sampler_log_probs is not None:
        mismatch = (tokens.old_log_probs - tokens.sampler_log_probs).detach().abs()
        sums["sampler_mismatch"] = responses.masked_sum(mismatch)
        maxima["sampler_mismatch"] = torch.where(responses.mask, mismatch, 0.0).max()
        if config.importance_cap is not None:
            weights = importance_weights(tokens.old_log_probs, tokens.sampler_log_probs, config.importance_cap)
            values = values * torch.where(responses.mask, weights, 0.0)
            sums["importance_weight"] = responses.masked_sum(weights)
            sums["importance_capped"] = responses.masked_sum((weights >= config.importance_cap).float())
    if tokens.reference_log_probs is not None:
        difference = torch.where(responses.mask, tokens.log_probs - tokens.reference_log_probs, 0.0)
        kl = kl_estimate(difference, torch.zeros_like(difference), config.kl)
        sums["kl"] = responses.masked_sum(kl.detach())
        if config.kl_coef > 0:
            values = values + config.kl_coef * kl
    if entropies is not None:
        sums["entropy"] = responses.masked_sum(entropies)
    loss_sum = aggregate(values, responses, config.aggregation, max_response_tokens)
    return PolicyLoss(loss_sum, count_units(responses, config.aggregation), sums, maxima)


def objective_metrics(tokens: PolicyTokens, objective: TokenObjective) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What every algorithm logs: sums over the sampled tokens, and maxima. `old_kl` is KL(old policy || policy)."""
    responses, log_probs = tokens.responses, tokens.log_probs.detach()
    sums = {
        "tokens": responses.mask.sum(),
        "ratio": responses.masked_sum(objective.ratio),
        "clip_fraction": responses.masked_sum(objective.clipped.float()),
        "old_kl": responses.masked_sum(kl_estimate(tokens.old_log_probs, log_probs, "k3")),
        "advantage": responses.masked_sum(tokens.advantages.expand(log_probs.shape)),
        "negative_log_prob": responses.masked_sum(-log_probs),
    }
    log_ratio = torch.where(responses.mask, log_probs - tokens.old_log_probs, 0.0)
    return sums, {"abs_log_ratio": log_ratio.abs().max()}


def mean_metrics(sums: dict[str, Tensor]) -> dict[str, float]:
    """Each sum of a global batch a sampled token; "tokens" stays a count."""
    tokens = max(float(sums["tokens"]), 1.0)
    return {name: float(value) / (1.0 if name == "tokens" else tokens) for name, value in sums.items()}
