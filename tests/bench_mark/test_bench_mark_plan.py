"""Kendall's tau of bench_mark_plan: pairs that lie apart count, and each by its order alone."""

import pytest

from bench_mark.bench_mark_plan import kendall_tau


def rows(*pairs: tuple[float, float]) -> list[dict[str, float]]:
    return [{"predicted_step_s": predicted, "step_s": measured} for predicted, measured in pairs]


def test_an_order_that_agrees_is_1_and_one_that_is_reversed_is_minus_1():
    assert kendall_tau(rows((1, 10), (2, 20), (3, 30))) == (1.0, 3)
    assert kendall_tau(rows((3, 10), (2, 20), (1, 30))) == (-1.0, 3)


def test_one_pair_of_six_in_the_wrong_order():
    tau, pairs = kendall_tau(rows((1, 10), (2, 20), (4, 30), (3, 40)))
    assert pairs == 6 and tau == pytest.approx(4 / 6)


def test_pairs_within_five_percent_do_not_count():
    assert kendall_tau(rows((2, 10.0), (1, 10.4))) == (None, 0)
    assert kendall_tau(rows((2, 10.0), (1, 10.4), (3, 20.0))) == (1.0, 2)
