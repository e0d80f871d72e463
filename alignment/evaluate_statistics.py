"""What several samples of each problem say about a model: pass@k, maj@k, and how sure the figures are.

pass@k is the unbiased estimate of Chen et al. 2021: the chance that k of a problem's n samples, drawn without
replacement, hold a right one; the mean of "any of the first k" has the same mean and more variance. maj@k (Wang et al.
2022) is the chance that the commonest answer of k drawn samples is right, ties broken at random. Problems are the
sample: intervals are Wilson's for one sample a problem, else a bootstrap over problems, since a problem's samples are
not independent of each other.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

MAX_SUBSETS = 500
BOOTSTRAP_CHUNK = 2_000_000  # drawn indices at a time: 16 MB


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k), for 1 <= k <= n."""
    assert 0 <= num_correct <= num_samples and 1 <= k <= num_samples, f"n={num_samples} c={num_correct} k={k}"
    if num_samples - num_correct < k:
        return 1.0
    wrong = num_samples - num_correct
    return 1.0 - math.prod((wrong - i) / (num_samples - i) for i in range(k))


def majority_at_k(groups: Sequence[int | None], right: Sequence[bool], k: int, seed: int = 0) -> float:
    """The chance that the commonest group among k of the samples is a right one.

    groups: which answer each sample gave, equal numbers for equal answers, None for no answer (no vote). right: whether
    that answer is right. All subsets when there are at most 500 of them, else 500 drawn with `seed`.
    """
    assert 1 <= k <= len(groups) == len(right), f"k={k}, {len(groups)} groups, {len(right)} verdicts"
    is_right = {group for group, good in zip(groups, right, strict=True) if good and group is not None}
    if math.comb(len(groups), k) <= MAX_SUBSETS:
        subsets: Sequence = list(itertools.combinations(range(len(groups)), k))
    else:
        rng = np.random.default_rng(seed)
        subsets = [rng.choice(len(groups), k, replace=False) for _ in range(MAX_SUBSETS)]
    return sum(vote([groups[i] for i in subset], is_right) for subset in subsets) / len(subsets)


def vote(groups: list[int | None], is_right: set[int]) -> float:
    """The share of right groups among the commonest ones; 0 without a vote."""
    counts = Counter(group for group in groups if group is not None)
    if not counts:
        return 0.0
    most = max(counts.values())
    winners = [group for group, count in counts.items() if count == most]
    return sum(group in is_right for group in winners) / len(winners)


def bootstrap_interval(
    values: Sequence[float], draws: int = 2_000, seed: int = 0, confidence: float = 0.95
) -> tuple[float, float]:
    """The percentile interval of the mean of per-problem values, by resampling problems (Efron 1979)."""
    array = np.asarray(values, dtype=np.float64)  # (problems,)
    if len(array) == 0:
        return 0.0, 1.0
    rng = np.random.default_rng(seed)
    at_once = max(1, BOOTSTRAP_CHUNK // len(array))
    means = np.concatenate(
        [
            array[rng.integers(0, len(array), (min(at_once, draws - done), len(array)))].mean(1)
            for done in range(0, draws, at_once)
        ]
    )  # (draws,)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def paired_difference(
    ours: Sequence[float], theirs: Sequence[float], draws: int = 2_000, seed: int = 0
) -> tuple[float, float, float]:
    """The mean difference of two evaluations of the same problems, and its interval by resampling problems.

    Pairing takes out what makes some problems harder for both.
    """
    assert len(ours) == len(theirs), f"{len(ours)} problems against {len(theirs)}"
    difference = np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64)
    return float(difference.mean()), *bootstrap_interval(difference, draws, seed)
