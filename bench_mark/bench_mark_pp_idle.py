"""How long the ranks of a step of bench_mark_pp were idle, and how long the schedule's table says that they must be.

A rank is idle in what a step has left beside its operations and beside what no schedule knows of: work before the first
and after the last of them, which delays the table on paper as it delays the rank. The table is run twice for each
step: with the mean of each kind of operation and messages as predicted, which is the formula, and with every
operation's own seconds and messages as measured. What the second leaves is waiting for launches and for messages that
took longer than alone.
"""

import statistics
from typing import Any

from bench_mark.bench_mark_pp_tracer import StepTimes
from parallel.pipeline_schedules import Operation, Schedule
from parallel.pipeline_schedules_simulation import Simulation, replay


def idle_of(
    schedule: Schedule, seconds: list[float], steps: list[list[StepTimes]], send_s: float, message_s: float
) -> dict[str, float]:
    """Medians over steps, each with its `seconds` by the clock and the times of all ranks.

    Shares of the step: `idle` as measured, `formula_idle` by the formula, `paper_idle` by the table with the step's own
    operations, which lasts `paper_step_s`. `idle_s` are seconds of a rank on average.
    """
    found: dict[str, list[float]] = {}
    for taken, ranks in zip(seconds, steps, strict=True):
        idle_s = taken - statistics.mean(rank.work_s for rank in ranks)
        formula, paper = by_formula(schedule, ranks, send_s), on_paper(schedule, ranks, message_s)
        values = {
            "idle": idle_s / taken, "idle_s": idle_s, "formula_idle": formula.bubble, "paper_idle": paper.bubble,
            "paper_step_s": paper.total,
        }  # fmt: skip
        for key, value in values.items():
            found.setdefault(key, []).append(value)
    return {key: statistics.median(values) for key, values in found.items()}


def by_formula(schedule: Schedule, ranks: list[StepTimes], send_s: float) -> Simulation:
    """The table with the mean of each kind of operation of a stage."""
    means = {kind: seconds for rank in ranks for kind, seconds in rank.means.items()}
    operations = [op for row in schedule.table for op in row]
    return replayed(schedule, ranks, {op: means[f"{op.kind}{op.stage}"] for op in operations}, send_s)


def on_paper(schedule: Schedule, ranks: list[StepTimes], message_s: float) -> Simulation:
    """The table with the seconds that every operation took."""
    return replayed(schedule, ranks, {op: s for rank in ranks for op, s in rank.seconds.items()}, message_s)


def replayed(schedule: Schedule, ranks: list[StepTimes], seconds: dict[Operation, float], send_s: float) -> Simulation:
    return replay(schedule, seconds.__getitem__, [send_s] * schedule.stages, [rank.outside for rank in ranks])


def rank_summary(steps: list[StepTimes]) -> dict[str, Any]:
    """A rank's medians over its steps: seconds in operations, before and after them, and of each kind of operation."""
    means = [step.means for step in steps]
    return {
        "busy_s": statistics.median(sum(step.seconds.values()) for step in steps),
        "before_s": statistics.median(step.before_s for step in steps),
        "after_s": statistics.median(step.after_s for step in steps),
        "operations_s": {kind: statistics.median(mean[kind] for mean in means) for kind in means[0]},
    }
