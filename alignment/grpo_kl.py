"""Estimators of KL(policy || reference) from the log-probs of sampled tokens (Schulman 2020), token by token.

With d = log policy - log reference at a token that the policy sampled:
    k1 = d                    unbiased, may be negative; as a loss its expected gradient is 0, so it is for logging
    k2 = d^2 / 2              biased, but its gradient's mean is the KL's
    k3 = exp(-d) - 1 + d      unbiased and never negative; its gradient's mean is that of KL(reference || policy)
"""

import torch
from torch import Tensor

ESTIMATORS = ("k1", "k2", "k3")
MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: far beyond any use, and far from overflow


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor, estimator: str) -> Tensor:
    """The estimate at each token, in the shape of its arguments; differentiable in `log_probs`."""
    assert estimator in ESTIMATORS, f"{estimator} is none of {ESTIMATORS}"
    difference = log_probs - reference_log_probs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    return torch.expm1((-difference).clamp(max=MAX_LOG_RATIO)) + difference
