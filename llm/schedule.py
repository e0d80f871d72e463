"""Learning-rate schedules as one pure function of the step, so that a resumed run needs no scheduler state.

Linear warm-up, then cosine (Loshchilov & Hutter 2017), or stable and a late decay (WSD; Hu et al. 2024, whose decay
shapes Hägele et al. 2024 compare), or constant. The result is a factor: every parameter group has a base rate of its
own and llm.optimizer.set_learning_rate multiplies it.
"""

import math
from dataclasses import dataclass

from configs.errors import UserError, check_choice

SCHEDULES = ("cosine", "wsd", "constant")
DECAY_SHAPES = ("linear", "sqrt")


@dataclass
class ScheduleConfig:
    """How the learning rate moves over max_steps."""

    name: str = "cosine"
    warmup_steps: int = 100
    min_factor: float = 0.1  # where the decay ends, as a share of the base rate
    decay_fraction: float = 0.2  # wsd: the last share of max_steps that decays
    decay_shape: str = "sqrt"  # wsd: "linear", or "sqrt" for 1 - sqrt(progress)

    def __post_init__(self) -> None:
        check_choice("schedule.name", self.name, SCHEDULES)
        check_choice("schedule.decay_shape", self.decay_shape, DECAY_SHAPES)
        if self.warmup_steps < 0:
            raise UserError(f"schedule.warmup_steps={self.warmup_steps} must not be negative; use 0 for no warm-up")
        if not 0 <= self.min_factor <= 1:
            raise UserError(f"schedule.min_factor={self.min_factor} must lie in 0..1; it is a share of the base rate")
        if not 0 < self.decay_fraction <= 1:
            raise UserError(
                f"schedule.decay_fraction={self.decay_fraction} must lie above 0 and at most 1; "
                f"use schedule=constant for no decay"
            )


def learning_rate_factor(step: int, config: ScheduleConfig, max_steps: int) -> float:
    """The share of the base learning rate at optimizer step `step`, where 0 is the first one.

    Warm-up gives (step + 1) / warmup_steps, so that no step is spent at a rate of zero; the decay would reach
    min_factor at step max_steps, one after the last, for the same reason; later steps stay there.
    """
    assert step >= 0 and max_steps > 0, f"step={step} of max_steps={max_steps}"
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.name == "constant":
        return 1.0
    start = config.warmup_steps
    if config.name == "wsd":
        start = max(start, max_steps - round(config.decay_fraction * max_steps))
    if step < start:
        return 1.0
    progress = min(1.0, (step - start) / max(1, max_steps - start))
    return config.min_factor + (1.0 - config.min_factor) * remaining_share(progress, config)


def remaining_share(progress: float, config: ScheduleConfig) -> float:
    """The decay's shape: 1 at progress 0, 0 at progress 1."""
    if config.name == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0 - (math.sqrt(progress) if config.decay_shape == "sqrt" else progress)
