"""What context parallelism sends, by hand for small numbers, and the time of a ring beside a step-by-step count."""

import pytest

from parallel.cost_model_context import (
    QUERY_SHARE,
    ContextShape,
    context_messages,
    ring_backward_time,
    ring_forward_time,
)


def shape(mode: str, ranks: int = 4, **changes) -> ContextShape:
    return ContextShape(ranks, mode, heads=8, kv_heads=2, head_dim=16, layers=1, dtype="bfloat16", **changes)


@pytest.mark.parametrize(
    ("mode", "forward", "backward"),
    [
        ("ring", 3 * 2 * 10 * 2 * 16 * 2, 3 * 2 * 10 * 2 * 16 * 2 + 4 * 2 * 10 * 2 * 16 * 4),
        ("all_gather", 4 * 2 * 10 * 2 * 16 * 2, 4 * 2 * 10 * 2 * 16 * 4),
        ("ulysses", (8 + 4 + 4 + 8) * 10 * 16 * 2, (8 + 4 + 4 + 8) * 10 * 16 * 2),  # two kv heads sent four times
    ],
)
def test_bytes_of_ten_tokens_on_four_ranks(mode, forward, backward):
    sent = list(context_messages(shape(mode), [10]))
    assert sum(m.nbytes for m in sent if m.phase == "forward") == forward
    assert sum(m.nbytes for m in sent if m.phase == "backward") == backward
    again = list(context_messages(shape(mode, recomputes=True), [10]))
    assert sum(m.nbytes for m in again) == 2 * forward + backward


def played_forward(ranks: int, block_s: float, keys_s: float) -> float:
    """A device and a link: the next keys leave when a block begins, the next block when it and they are through."""
    device = link = 0.0
    for step in range(ranks):
        if step < ranks - 1:
            link = max(link, device) + keys_s
        device += block_s
        if step < ranks - 1:
            device = max(device, link)
    return device


def played_backward(ranks: int, block_s: float, keys_s: float, sums_s: float, share: float) -> float:
    """The same with sums that leave after each block and are waited for within the next, all on one link."""
    device = link = 0.0
    arrived = None
    for step in range(ranks):
        keys = None
        if step < ranks - 1:
            link = keys = max(link, device) + keys_s
        device += share * block_s
        if arrived is not None:
            device = max(device, arrived)
        device += (1 - share) * block_s
        link = arrived = max(link, device) + sums_s
        if keys is not None:
            device = max(device, keys)
    return max(device, arrived)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("share", [1.0, QUERY_SHARE, 0.0])
@pytest.mark.parametrize(("block_s", "keys_s", "sums_s"), [(5.0, 1.0, 2.0), (2.5, 1.0, 2.0), (1.0, 2.0, 4.0)])
def test_time_of_a_ring_matches_its_schedule_played(ranks, block_s, keys_s, sums_s, share):
    forward = ring_forward_time(ranks, block_s, keys_s)
    assert forward.seconds == pytest.approx(played_forward(ranks, block_s, keys_s))
    backward = ring_backward_time(ranks, block_s, keys_s, sums_s, share)
    assert backward.seconds == pytest.approx(played_backward(ranks, block_s, keys_s, sums_s, share))
    assert forward.exposed_s == pytest.approx(forward.seconds - ranks * block_s)
    if block_s >= keys_s + sums_s and share * block_s >= sums_s:  # all is hidden but the last sums' way home
        assert (forward.exposed_s, backward.exposed_s) == pytest.approx((0.0, sums_s))


def test_one_rank_sends_and_waits_for_nothing():
    assert ring_forward_time(1, 3.0, 9.0).exposed_s == ring_backward_time(1, 3.0, 9.0, 9.0).exposed_s == 0.0
