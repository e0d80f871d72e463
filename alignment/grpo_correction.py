"""The mismatch between the sampler and the trainer, and importance weights that correct it.

An engine's kernels, precision and truncation (top-k, top-p, min-p) make it sample from q, while the trainer computes p
for the same tokens. Truncated importance sampling (Yao et al. 2025) multiplies a token's loss by min(p / q, cap).
"""

import torch
from torch import Tensor

from alignment.grpo_kl import MAX_LOG_RATIO


def sampling_log_probs(log_probs: Tensor, kept_masses: Tensor) -> Tensor:
    """log q of sampled tokens, from the untruncated log-probs and the mass that truncation kept, both (B, T).

    Within the kept support q = p / mass, so log q = log p - log mass; without truncation the mass is 1.
    """
    return log_probs - kept_masses.log()


@torch.no_grad()
def importance_weights(trainer_log_probs: Tensor, sampler_log_probs: Tensor, cap: float) -> Tensor:
    """min(p / q, cap) of each token, (B, T), without a gradient: what its loss is multiplied by."""
    assert cap > 0, f"cap={cap} must be positive"
    ratio = (trainer_log_probs - sampler_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return ratio.clamp(max=cap)
