"""Schedules against formulas written out and against torch's own cosine."""

import math
from itertools import pairwise

import pytest
import torch

from configs.errors import UserError
from llm.schedule import ScheduleConfig, learning_rate_factor


def factors(max_steps, **fields):
    config = ScheduleConfig(**fields)
    return [learning_rate_factor(step, config, max_steps) for step in range(max_steps)]


def test_warm_up_starts_at_step_0_above_zero_and_reaches_one():
    assert factors(10, name="constant", warmup_steps=4) == [0.25, 0.5, 0.75] + [1.0] * 7
    assert factors(3, name="constant", warmup_steps=0) == [1.0] * 3


def test_cosine_matches_torch():
    warmup_steps, max_steps, min_factor = 5, 40, 0.1
    ours = factors(max_steps, name="cosine", warmup_steps=warmup_steps, min_factor=min_factor)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max_steps - warmup_steps, eta_min=min_factor)
    theirs = []
    for _ in range(max_steps - warmup_steps):
        theirs.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert ours[:warmup_steps] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert ours[warmup_steps:] == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize("shape", ["linear", "sqrt"])
def test_wsd_is_stable_then_decays_over_the_last_share(shape):
    values = factors(100, name="wsd", warmup_steps=10, min_factor=0.2, decay_fraction=0.25, decay_shape=shape)
    assert values[9:76] == [1.0] * 67  # step 75 is the first of the last 25, still at progress 0
    for step in range(76, 100):
        progress = (step - 75) / 25
        share = 1 - progress if shape == "linear" else 1 - math.sqrt(progress)
        assert values[step] == pytest.approx(0.2 + 0.8 * share)
    assert all(later < earlier for earlier, later in pairwise(values[75:]))


@pytest.mark.parametrize("name", ["cosine", "wsd"])
def test_the_end_and_beyond_stay_at_the_minimum(name):
    config = ScheduleConfig(name=name, warmup_steps=2, min_factor=0.3)
    assert learning_rate_factor(20, config, 20) == pytest.approx(0.3)
    assert learning_rate_factor(500, config, 20) == pytest.approx(0.3)
    assert learning_rate_factor(19, config, 20) > 0.3


@pytest.mark.parametrize("name", ["cosine", "wsd", "constant"])
def test_a_run_shorter_than_its_warm_up_stays_in_it(name):
    assert factors(3, name=name, warmup_steps=10) == [0.1, 0.2, 0.3]


def test_wsd_that_decays_throughout_starts_after_the_warm_up():
    values = factors(10, name="wsd", warmup_steps=5, min_factor=0.0, decay_fraction=1.0, decay_shape="linear")
    assert values == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "step"}, "schedule.name='step' is unknown; use one of cosine, wsd, constant"),
        ({"decay_shape": "cubic"}, "decay_shape='cubic' is unknown"),
        ({"warmup_steps": -1}, "warmup_steps=-1 must not be negative"),
        ({"min_factor": 1.5}, "min_factor=1.5 must lie in 0..1"),
        ({"decay_fraction": 0.0}, "decay_fraction=0.0 must lie above 0"),
    ],
)
def test_bad_values_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        ScheduleConfig(**fields)
