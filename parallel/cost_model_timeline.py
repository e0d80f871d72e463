"""Step time when collectives overlap with computation: one device and one link, each doing its work in order.

A step is a program of three instructions, as the host issues them: compute for so many seconds, start a message, wait
for one. The link takes messages in the order in which they were started; what the device has to wait for is exposed.
This is all the overlap there is: no contention for memory or multiprocessors is modelled, so a measured step is slower
by what the collectives' kernels take from the computation beside them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from parallel.cost_model_traffic import DataLayout, Message


@dataclass(frozen=True)
class Compute:
    """Seconds of one device without any communication, by stage (embedding, blocks, output) of one micro-batch."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]  # recomputation included
    optimizer_s: float  # of this rank's part
    # Messages within a stage that nothing hides (tensor and context parallelism); empty: none.
    forward_stalls_s: tuple[float, ...] = ()
    backward_stalls_s: tuple[float, ...] = ()

    @property
    def micro_batch_s(self) -> float:
        return sum(self.forward_s) + sum(self.backward_s)

    def forward(self, stage: int) -> "Instruction":
        stalls = self.forward_stalls_s
        return Instruction("compute", self.forward_s[stage], stall_s=stalls[stage] if stalls else 0.0)

    def backward(self, stage: int) -> "Instruction":
        stalls = self.backward_stalls_s
        return Instruction("compute", self.backward_s[stage], stall_s=stalls[stage] if stalls else 0.0)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step; exposed_s of the communication's seconds were not hidden behind computation."""

    step_s: float
    compute_s: float
    communication_s: float

    @property
    def exposed_s(self) -> float:
        return max(0.0, self.step_s - self.compute_s)


class Instruction(NamedTuple):
    """ "compute" for `seconds` and wait within them for `stall_s`, or "start" or "wait" for `message`."""

    kind: str
    seconds: float = 0.0
    message: Message | None = None
    stall_s: float = 0.0


def step_time(
    messages: list[Message], compute: Compute, layout: DataLayout, seconds_of: Callable[[Message], float]
) -> StepTime:
    """Run a step's program; `seconds_of` gives a message's time on an idle link (host messages are not timed)."""
    now = link = busy = 0.0
    computed = 0.0
    ends: dict[int, float] = {}
    for instruction in program(messages, compute, layout):
        if instruction.kind == "compute":
            now += instruction.seconds + instruction.stall_s
            computed += instruction.seconds
            busy += instruction.stall_s
        elif instruction.kind == "start":
            seconds = seconds_of(instruction.message)
            link = max(link, now) + seconds
            busy += seconds
            ends[id(instruction.message)] = link
        else:
            now = max(now, ends[id(instruction.message)])
    return StepTime(now, computed, busy)


def program(messages: list[Message], compute: Compute, layout: DataLayout) -> Iterator[Instruction]:
    """The instructions of one step, in the order in which ddp, sharded_optimizer and fsdp issue them."""
    sent = [message for message in messages if message.phase != "host"]
    by_micro_batch: dict[int, list[Message]] = defaultdict(list)
    for message in sent:
        by_micro_batch[message.micro_batch].append(message)
    for micro_batch in range(layout.micro_batches):
        of = by_micro_batch[micro_batch]
        forward = [message for message in of if message.phase == "forward"]
        backward = [message for message in of if message.phase == "backward"]
        yield from forward_program(forward, compute)
        if layout.is_fsdp:
            yield from fsdp_backward_program(backward, compute)
        elif layout.zero == 0 and not layout.bucketed:
            yield from (compute.backward(stage) for stage in reversed(range(len(compute.backward_s))))
            yield from one_by_one(backward)
        else:
            # ZeRO-1 keeps two messages in flight, so that two buffers are enough; DDP waits for none before the end.
            yield from bucket_program(backward, compute, limit=2 if layout.zero == 1 else len(backward))
    yield from one_by_one(message for message in sent if message.phase == "matrices")
    updates = [message for message in sent if message.phase == "optimizer"]
    for message in updates:  # the gather of one bucket beside the update of the next
        yield work(compute.optimizer_s / len(updates))
        yield Instruction("start", message=message)
    if not updates:
        yield work(compute.optimizer_s)
    yield from (Instruction("wait", message=message) for message in updates)


def work(seconds: float) -> Instruction:
    return Instruction("compute", seconds)


def one_by_one(messages: Iterable[Message]) -> Iterator[Instruction]:
    for message in messages:
        yield Instruction("start", message=message)
        yield Instruction("wait", message=message)


def forward_program(gathers: list[Message], compute: Compute) -> Iterator[Instruction]:
    """Each unit's gather is started when the unit before it begins to compute; the root's is waited for at once."""
    root, blocks = gathers[:1], gathers[1:]
    yield from one_by_one(root)
    waiting = {message.stage: message for message in blocks}
    following = dict(pairwise(blocks))
    yield from (Instruction("start", message=message) for message in blocks[:1])
    for stage in range(len(compute.forward_s)):
        if stage in waiting:
            yield Instruction("wait", message=waiting[stage])
            if waiting[stage] in following:
                yield Instruction("start", message=following[waiting[stage]])
        yield compute.forward(stage)


def bucket_program(messages: list[Message], compute: Compute, limit: int) -> Iterator[Instruction]:
    """Backward with a bucket's reduction started once its last gradient is there, at most `limit` in flight."""
    in_flight: list[Message] = []
    remaining = list(messages)
    for stage in reversed(range(len(compute.backward_s))):
        yield compute.backward(stage)
        while remaining and remaining[0].stage >= stage:
            while len(in_flight) >= limit:
                yield Instruction("wait", message=in_flight.pop(0))
            yield Instruction("start", message=remaining[0])
            in_flight.append(remaining.pop(0))
    yield from (Instruction("wait", message=message) for message in in_flight)


def fsdp_backward_program(messages: list[Message], compute: Compute) -> Iterator[Instruction]:
    """A block's backward starts the gather of the block before it; reductions follow it, one scatter in flight."""
    gathers = {message.stage: message for message in messages if message.op == "all_gather"}
    reductions: dict[int, list[Message]] = defaultdict(list)
    for message in messages:
        if message.op != "all_gather":
            reductions[message.stage].append(message)
    started, in_flight, last_block = set(), [], len(compute.backward_s) - 2
    for stage in reversed(range(len(compute.backward_s))):
        # Its own gather, if nobody started it ahead of time, and then the next one's.
        for wanted in (stage, *([stage - 1] if stage <= last_block else [])):
            if wanted in gathers and wanted not in started:
                yield Instruction("start", message=gathers[wanted])
                started.add(wanted)
            if wanted == stage and stage in gathers:
                yield Instruction("wait", message=gathers[stage])
        yield compute.backward(stage)
        for message in reductions[stage]:
            if message.op.startswith("reduce_scatter"):
                yield from (Instruction("wait", message=earlier) for earlier in in_flight[-1:])
            yield Instruction("start", message=message)
            in_flight.append(message)
    yield from (Instruction("wait", message=message) for message in in_flight)
