"""Wilson's interval against its defining equation, and at the ends."""

import math

import pytest

from alignment.intervals import Z95, wilson_interval


@pytest.mark.parametrize(("successes", "count"), [(10, 50), (1, 7), (499, 500), (0, 20), (20, 20)])
def test_bounds_solve_the_score_equation(successes, count):
    """Each bound p is z standard errors, at p itself, from the share that was seen."""
    share = successes / count
    for bound, sign in zip(wilson_interval(successes, count), (-1, 1), strict=True):
        distance = Z95 * math.sqrt(bound * (1 - bound) / count)
        assert bound == pytest.approx(share + sign * distance, abs=1e-9)


def test_bounds_stay_within_shares_and_narrow_with_the_count():
    assert wilson_interval(0, 0) == (0.0, 1.0)
    low, high = wilson_interval(3, 10)
    narrow_low, narrow_high = wilson_interval(300, 1000)
    assert 0 <= low < narrow_low < 0.3 < narrow_high < high <= 1
