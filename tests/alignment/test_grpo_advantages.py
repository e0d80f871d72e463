"""Advantages against their definitions in Python's statistics module, and the cases in which real stacks went wrong."""

import statistics

import pytest
import torch

from alignment.grpo_advantages import STD_EPS, by_group, group_advantages, informative, others_moments, overlong_penalty
from tests.tolerances import FP32_FORWARD

REWARDS = [1.0, 0.0, 0.25, 0.5, 0.0, 0.75, 0.75, -1.0, 2.0]
GROUPS = [7, 7, 7, 7, 2, 2, 2, 9, 9]


def expected(rewards, groups, baseline, scale):
    """One completion at a time, with Python's own exact statistics."""
    result = []
    for index, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        members = [r for i, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group]
        others = [r for i, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and i != index]
        chosen = others if baseline == "leave_one_out" else members
        value = reward - (statistics.mean(chosen) if baseline != "none" else 0.0)
        if scale == "group_std":
            deviation = statistics.stdev(chosen) if len(chosen) > 1 else 0.0
            value = value / (deviation + STD_EPS) if deviation > 0 else 0.0
        result.append(value)
    return torch.tensor(result)


@pytest.mark.parametrize("baseline", ["none", "group_mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["none", "group_std"])
def test_advantages_match_their_definition_for_groups_of_unequal_size(baseline, scale):
    advantages = group_advantages(torch.tensor(REWARDS), torch.tensor(GROUPS), baseline, scale)
    torch.testing.assert_close(advantages, expected(REWARDS, GROUPS, baseline, scale), rtol=FP32_FORWARD, atol=1e-7)


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_order_of_completions_does_not_matter(baseline):
    rewards, groups = torch.tensor(REWARDS), torch.tensor(GROUPS)
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(3))
    straight = group_advantages(rewards, groups, baseline)
    assert torch.equal(group_advantages(rewards[order], groups[order], baseline), straight[order])


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["none", "group_std"])
@pytest.mark.parametrize("value", [0.95, 0.1, 1e-3, 1.0 / 3.0, 1e6 + 0.1])
def test_equal_rewards_give_exactly_zero(baseline, scale, value):
    advantages = group_advantages(torch.full((8,), value), torch.zeros(8, dtype=torch.int64), baseline, scale)
    assert torch.equal(advantages, torch.zeros(8))


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["none", "group_std"])
def test_group_of_one_gives_zero(baseline, scale):
    assert group_advantages(torch.tensor([0.7]), torch.tensor([0]), baseline, scale).tolist() == [0.0]


def test_others_of_an_outlier_have_variance_zero():
    rewards = torch.tensor([0.0, *[0.95] * 7], dtype=torch.float64)
    mean, std, _ = others_moments(by_group(rewards, torch.zeros(8, dtype=torch.int64))[0])
    assert std[0, 0] == 0.0 and mean[0, 0] == 0.95
    advantages = group_advantages(rewards, torch.zeros(8, dtype=torch.int64), "leave_one_out")
    assert advantages[0] == 0.0 and advantages.isfinite().all() and (advantages[1:] > 0).all()


def test_a_small_spread_at_a_large_offset_keeps_its_variance():
    """E[x^2] - mean^2 in float32 would lose it, or make it negative."""
    rewards = torch.tensor([1000.0, 1000.25, 1000.5, 1000.75])
    straight = group_advantages(rewards - 1000.0, torch.zeros(4, dtype=torch.int64))
    torch.testing.assert_close(group_advantages(rewards, torch.zeros(4, dtype=torch.int64)), straight)


def test_rewards_that_are_not_finite_are_refused():
    with pytest.raises(AssertionError, match="finite"):
        group_advantages(torch.tensor([1.0, float("nan")]), torch.tensor([0, 0]))


def test_informative_groups_have_unequal_rewards():
    rewards = torch.tensor([1.0, 0.95, 1.0, 0.95, 0.3])
    assert informative(rewards, torch.tensor([0, 1, 0, 1, 2])).tolist() == [False] * 5
    assert informative(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 1, 1])).tolist() == [False, True, True]


def test_overlong_penalty_matches_dapos_equation():
    lengths = torch.tensor([1, 80, 85, 90, 100, 120])
    assert overlong_penalty(lengths, 100, 20).tolist() == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
