"""From rewards to advantages: what a group of completions of one prompt says about each of them.

Group means and standard deviations as in GRPO (Shao et al. 2024), without the division by the deviation as in Dr. GRPO
(Liu et al. 2025), leave-one-out as in RLOO (Ahmadian et al. 2024); DAPO's overlong shaping and its choice of groups
(Yu et al. 2025). Moments are taken of differences to a member of the group, so that equal rewards give exactly 0 and
no rounding error is blown up by dividing by it. R completions, P groups, G members of the largest group.
"""

import torch
from torch import Tensor

BASELINES = ("none", "group_mean", "leave_one_out")
SCALES = ("none", "group_std")
STD_EPS = 1e-6  # added to a deviation before dividing


def group_advantages(
    rewards: Tensor, group_ids: Tensor, baseline: str = "group_mean", scale: str = "group_std", eps: float = STD_EPS
) -> Tensor:
    """Advantages (R,) float32 of completions with `rewards` (R,) and the number of their prompt, `group_ids` (R,).

    none            A_i = r_i
    group_mean      A_i = r_i - mean(r)            group_std: / (std(r) + eps)
    leave_one_out   A_i = r_i - mean(r without i)  group_std: / (std(r without i) + eps)

    Deviations divide by n - 1. Completions of a group may stand anywhere. 0 for a group of one, and for one without
    variance (with leave_one_out and group_std: where the others have none). Raises AssertionError for rewards that are
    not finite.
    """
    assert baseline in BASELINES, f"{baseline} is none of {BASELINES}"
    assert scale in SCALES, f"{scale} is none of {SCALES}"
    assert bool(rewards.isfinite().all()), "a reward is not finite"
    wide = rewards.double()
    if baseline == "none" and scale == "none":
        return wide.float()
    members, index = by_group(wide, group_ids)
    mean, std, count = others_moments(members) if baseline == "leave_one_out" else moments(members)
    difference = members - mean if baseline != "none" else members
    if scale == "group_std":
        difference = torch.where(std > 0, difference / (std + eps), 0.0)
    advantages = torch.where(count > 0, difference, 0.0) if baseline == "leave_one_out" else difference
    return advantages[index].float()


def by_group(values: Tensor, group_ids: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Values (R,) as (P, G), nan where a group has fewer members, and the row and column of each value."""
    _, rows, sizes = group_ids.unique(return_inverse=True, return_counts=True)
    order = rows.argsort(stable=True)
    starts = sizes.cumsum(0) - sizes  # (P,)
    columns = torch.empty_like(rows)
    columns[order] = torch.arange(len(rows), device=rows.device) - starts[rows[order]]
    members = values.new_full((len(sizes), int(sizes.max())), torch.nan)
    members[rows, columns] = values
    return members, (rows, columns)


def moments(members: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, deviation (of n - 1) and number of the members of each row that are not nan: each (..., 1)."""
    held = ~members.isnan()
    count = held.sum(-1, keepdim=True)  # (..., 1)
    # Differences to the largest member: all exactly 0 where the members are equal, whatever their value.
    origin = torch.where(held, members, -torch.inf).amax(-1, keepdim=True)
    origin = torch.where(count > 0, origin, 0.0)
    offsets = torch.where(held, members - origin, 0.0)
    shift = offsets.sum(-1, keepdim=True) / count.clamp(min=1)
    squares = torch.where(held, (offsets - shift).square(), 0.0).sum(-1, keepdim=True)
    return origin + shift, (squares / (count - 1).clamp(min=1)).sqrt(), count


def others_moments(members: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same of each row without the member at hand: each (P, G)."""
    size = members.shape[1]
    itself = torch.eye(size, dtype=torch.bool, device=members.device)
    others = members[:, None].expand(-1, size, -1).masked_fill(itself, torch.nan)  # (P, G, G)
    return tuple(moment.squeeze(-1) for moment in moments(others))


def informative(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Whether each completion's group has unequal rewards, (R,) bool: the others teach nothing (dynamic sampling)."""
    members, (rows, _) = by_group(rewards.double(), group_ids)
    held = ~members.isnan()
    highest = torch.where(held, members, -torch.inf).amax(-1)
    lowest = torch.where(held, members, torch.inf).amin(-1)
    return (highest > lowest)[rows]


def overlong_penalty(lengths: Tensor, max_response_tokens: int, cache_tokens: int) -> Tensor:
    """DAPO's soft punishment (equation 13), to be added to the reward: (R,) float32 in -1..0.

    0 up to max - cache tokens, then down to -1 in a straight line over the last `cache_tokens`, and -1 beyond.
    """
    assert 0 < cache_tokens <= max_response_tokens, f"{cache_tokens} must lie in 1..{max_response_tokens}"
    return ((max_response_tokens - cache_tokens - lengths.float()) / cache_tokens).clamp(-1.0, 0.0)
