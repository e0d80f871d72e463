"""Confidence intervals of shares."""

import math

Z95 = 1.959964


def wilson_interval(successes: int, count: int, z: float = Z95) -> tuple[float, float]:
    """The score interval of a share of `count` trials (Wilson 1927), 95% by default; (0, 1) without trials."""
    if count == 0:
        return 0.0, 1.0
    share, spread = successes / count, z * z / count
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / count + spread / (4 * count)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)
