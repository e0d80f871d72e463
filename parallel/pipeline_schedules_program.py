"""From a schedule to what each rank does: its operations, and between them the messages that it sends and receives.

All messages of all ranks stand in one order, that of the simulated time at which they are sent, and each rank posts its
own in that order, batched where they are sent at one time. So whatever the real durations are, and even where a send
lasts until it is received (NCCL), two ranks never wait for each other: what the first message in the order waits for
are operations before it, whose messages stand before it too.
"""

from typing import NamedTuple

from parallel.pipeline_schedules import BACKWARD, FORWARD, INPUT, Operation, Schedule
from parallel.pipeline_schedules_simulation import simulate


class Message(NamedTuple):
    """A micro-batch's activations (target = source + 1) or their gradient (target = source - 1)."""

    source: int  # stage
    target: int
    micro_batch: int


class Exchange(NamedTuple):
    """Messages that a rank posts at once."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


Program = tuple[Operation | Exchange, ...]


def message_of(op: Operation, stages: int) -> Message | None:
    """What an operation's result is sent as, if a neighbour waits for it."""
    if op.kind == FORWARD and op.stage + 1 < stages:
        return Message(op.stage, op.stage + 1, op.micro_batch)
    if op.kind in (BACKWARD, INPUT) and op.stage > 0:
        return Message(op.stage, op.stage - 1, op.micro_batch)
    return None


def program_of(schedule: Schedule, rank: int) -> Program:
    """A rank's operations and exchanges in order; ScheduleError where the table cannot run."""
    simulation = simulate(schedule)
    steps: dict[float, list] = {}
    for op in simulation.order():
        own, sends, receives = steps.setdefault(simulation.times[op][1], ([], [], []))
        if op.stage % schedule.ranks == rank:
            own.append(op)
        message = message_of(op, schedule.stages)
        if message is not None and message.source % schedule.ranks == rank:
            sends.append(message)
        if message is not None and message.target % schedule.ranks == rank:
            receives.append(message)
    program: list[Operation | Exchange] = []
    for own, sends, receives in steps.values():
        program += own
        if sends or receives:
            program.append(Exchange(tuple(sends), tuple(receives)))
    return tuple(program)
