"""How sure a gain in held-out accuracy is: intervals over problems and over seeds."""

import math
from statistics import mean, stdev

from alignment.intervals import Z95, wilson_interval

T95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306)  # Student's t, by degrees of freedom


def pooled_interval(shares: list[float], count: int) -> tuple[float, float, float]:
    """Mean share of right answers over runs of `count` problems each, and its 95% interval by problems (Wilson)."""
    right = round(sum(share * count for share in shares))
    low, high = wilson_interval(right, count * len(shares))
    return right / (count * len(shares)), low, high


def difference_interval(before: list[float], after: list[float], count: int) -> tuple[float, float, float]:
    """The gain with its 95% interval, as if the two sets of answers were independent: wider than the paired one."""
    trials = count * len(before)
    first, second = mean(before), mean(after)
    half = Z95 * math.sqrt((first * (1 - first) + second * (1 - second)) / trials)
    return second - first, second - first - half, second - first + half


def mean_interval(values: list[float]) -> tuple[float, float, float]:
    """The mean over seeds and its 95% interval by Student's t; without a second seed the interval is unknown (nan)."""
    if len(values) < 2:
        return mean(values), math.nan, math.nan
    half = T95[min(len(values), len(T95)) - 1] * stdev(values) / math.sqrt(len(values))
    return mean(values), mean(values) - half, mean(values) + half
