"""What a schedule costs, and whether it can run at all, found by running its table on paper.

Every rank takes its operations in order, each as soon as the rank is free and what it waits for is there. The result
gives the time of every operation, idle time, and the most activations that a rank holds; a table in which somebody
waits for ever, or in which an operation is missing or there twice, is an error that names it. What a rank does in a
step outside its operations delays the first of them and the end, and is not idle time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from parallel.pipeline_schedules import BACKWARD, FORWARD, INPUT, WEIGHT, Operation, Schedule


class ScheduleError(ValueError):
    """A table that cannot run; the message names the operations."""


@dataclass(frozen=True)
class Durations:
    """Seconds, or any unit, of one micro-batch through one stage; `send` is from one rank to the next."""

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    send: float = 0.0

    def of(self, kind: str) -> float:
        backward = self.input_gradient + self.weight_gradient
        seconds = {FORWARD: self.forward, BACKWARD: backward, INPUT: self.input_gradient, WEIGHT: self.weight_gradient}
        return seconds[kind]


@dataclass
class Simulation:
    """Start and end of every operation; `idle` and `peak` are of each rank."""

    schedule: Schedule
    times: dict[Operation, tuple[float, float]]
    outside: list[tuple[float, float]]  # what each rank does before its first operation and after its last one
    idle: list[float] = field(default_factory=list)  # from 0 to `total`, with neither an operation nor work outside
    peak: list[int] = field(default_factory=list)  # micro-batches, of one stage each, whose activations are held

    @property
    def total(self) -> float:
        """When the last rank is done."""
        ends = (self.times[row[-1]][1] for row in self.schedule.table)
        return max(end + after for end, (_, after) in zip(ends, self.outside, strict=True))

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they are idle."""
        return sum(self.idle) / (len(self.idle) * self.total)

    def rows(self) -> list[list[tuple[str, int, int, float, float]]]:
        """For each rank its operations in order: kind, stage, micro-batch, start and end."""
        return [[(*op, *self.times[op]) for op in row] for row in self.schedule.table]

    def order(self) -> list[Operation]:
        """All operations of all ranks by their end: what each waits for stands before it."""
        return sorted(self.times, key=lambda op: (self.times[op][1], op.stage % self.schedule.ranks))


def waits_for(op: Operation, stages: int) -> list[Operation]:
    """What must be done before an operation, beside the rank's own order; of B and I, one of each pair will exist."""
    kind, stage, index = op
    if kind == FORWARD:
        return [Operation(FORWARD, stage - 1, index)] if stage else []
    if kind == WEIGHT:
        return [Operation(INPUT, stage, index)]
    own = [Operation(FORWARD, stage, index)]
    return own + ([Operation(kind, stage + 1, index)] if stage + 1 < stages else [])


def simulate(
    schedule: Schedule, durations: Durations | list[Durations] | None = None, of_stage: list[float] | None = None
) -> Simulation:
    """Run the table on paper; ScheduleError if it is incomplete or deadlocks.

    Stages that are not alike have `durations` of their own, or `of_stage` multiplies the common ones; of a message
    the sending stage's count.
    """
    each = durations if isinstance(durations, list) else [durations or Durations()] * schedule.stages
    scale = of_stage or [1.0] * schedule.stages
    kinds = {op.kind for row in schedule.table for op in row}
    seconds = {(kind, stage): each[stage].of(kind) * scale[stage] for kind in kinds for stage in range(schedule.stages)}
    return replay(schedule, lambda op: seconds[op.kind, op.stage], [durations.send for durations in each])


def replay(
    schedule: Schedule,
    seconds_of: Callable[[Operation], float],
    send: list[float],
    outside: list[tuple[float, float]] | None = None,
) -> Simulation:
    """The same with the seconds of every single operation; `send` is by the sending stage.

    `outside` is of each rank the work that no schedule knows of: before its first operation, and after its last one.
    """
    outside = outside or [(0.0, 0.0)] * schedule.ranks
    times: dict[Operation, tuple[float, float]] = {}
    free = [before for before, _ in outside]
    for rank, op, needed in runnable_order(schedule):
        start = free[rank]
        for other in needed:
            ready = times[other][1]
            if other.stage % schedule.ranks != rank:
                ready += send[other.stage]
            start = max(start, ready)
        free[rank] = start + seconds_of(op)
        times[op] = (start, free[rank])
    return summed_up(Simulation(schedule, times, outside))


@lru_cache(maxsize=256)
def runnable_order(schedule: Schedule) -> list[tuple[int, Operation, list[Operation]]]:
    """Every operation with its rank, after all that it waits for, which stands beside it; ScheduleError as simulate."""
    check_complete(schedule)
    order, done = [], set()
    position = [0] * schedule.ranks
    remaining = sum(map(len, schedule.table))
    while remaining:
        before = remaining
        for rank, row in enumerate(schedule.table):
            while position[rank] < len(row):
                op = row[position[rank]]
                needed = waits_for(op, schedule.stages)
                if any(other not in done for other in needed):
                    break
                order.append((rank, op, needed))
                done.add(op)
                position[rank] += 1
                remaining -= 1
        if remaining == before:
            raise ScheduleError(explain_deadlock(schedule, position, done))
    return order


def summed_up(result: Simulation) -> Simulation:
    """With each rank's idle time and peak."""
    total, times = result.total, result.times
    for row, around in zip(result.schedule.table, result.outside, strict=True):
        held = peak = 0
        for op in row:
            held += (op.kind == FORWARD) - (op.kind in (BACKWARD, WEIGHT))
            peak = max(peak, held)
        result.peak.append(peak)
        result.idle.append(total - sum(around) - sum(times[op][1] - times[op][0] for op in row))
    return result


def check_complete(schedule: Schedule) -> None:
    """Every stage has each micro-batch's forward once, and its backward once, whole or in two parts."""
    for rank, row in enumerate(schedule.table):
        found = {(op.kind, op.stage, op.micro_batch) for op in row}
        if len(found) != len(row):
            twice = next(op for op in row if row.count(op) > 1)
            raise ScheduleError(f"rank {rank} runs {twice} twice")
        expected = set()
        for stage in schedule.stages_of(rank):
            for index in range(schedule.micro_batches):
                backward = (BACKWARD,) if (BACKWARD, stage, index) in found else (INPUT, WEIGHT)
                expected |= {(kind, stage, index) for kind in (FORWARD, *backward)}
        if found != expected:
            wrong = ", ".join(str(Operation(*op)) for op in sorted(found ^ expected)[:4])
            raise ScheduleError(f"rank {rank} of schedule {schedule.name}: {wrong} missing or not its own")


def explain_deadlock(schedule: Schedule, position: list[int], done: set[Operation]) -> str:
    stuck = []
    for rank, row in enumerate(schedule.table):
        if position[rank] < len(row):
            op = row[position[rank]]
            missing = [str(other) for other in waits_for(op, schedule.stages) if other not in done]
            stuck.append(f"rank {rank} at {op} waits for {' and '.join(missing)}")
    return f"schedule {schedule.name} deadlocks: " + "; ".join(stuck)


def bubble_time(name: str, ranks: int, durations: Durations) -> float:
    """Idle time of a rank by the closed formula, for equal stages, no sending time, and enough micro-batches.

    Of a stage: GPipe and 1F1B (P - 1)(F + B), interleaved the same with the shorter F and B of its stages, ZB-H1
    (P - 1)(F + I - W) as long as I is not shorter than W, ZB-H2 (P - 1)(F + max(0, I - 2 W)).
    """
    if name == "zero_bubble_h2":
        wait = max(0.0, durations.input_gradient - 2 * durations.weight_gradient)
        return (ranks - 1) * (durations.forward + wait)
    if name == "zero_bubble":
        return (ranks - 1) * (durations.forward + durations.input_gradient - durations.weight_gradient)
    return (ranks - 1) * (durations.forward + durations.of(BACKWARD))
