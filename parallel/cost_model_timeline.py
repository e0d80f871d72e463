"""Step time when collectives overlap with computation: one device and one link, each doing its work in order.

A step is a program of three instructions, as the host issues them: compute for so many seconds, start a message, wait
for one. The link takes messages in the order in which they were started; what the device has to wait for is exposed.
A message takes processors and memory from the computation that it travels beside, so many seconds a message
(`lost_of`): configs/hardware has a machine's seconds a byte. Nobody loses to a message that is waited for.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
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
    """Seconds of one step; exposed_s of the communication's seconds were not hidden behind computation.

    compute_s is computation with what it loses to the messages beside it.
    """

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


class Travel(NamedTuple):
    """A message on the link, and the share of a computation beside it that is left."""

    start: float
    end: float
    speed: float


SLOWEST = 0.1  # of a computation's speed beside a message


def step_time(
    messages: list[Message],
    compute: Compute,
    layout: DataLayout,
    seconds_of: Callable[[Message], float],
    lost_of: Callable[[Message], float] | None = None,
) -> StepTime:
    """Run a step's program; `seconds_of` gives a message's time on an idle link (host messages are not timed).

    `lost_of` gives the seconds that a computation loses to a whole message beside it; None: nothing.
    """
    now = link = busy = 0.0
    computed = 0.0
    ends: dict[int, float] = {}
    travels: deque[Travel] = deque()
    for instruction in program(messages, compute, layout):
        if instruction.kind == "compute":
            end = end_of_work(now, instruction.seconds, travels)
            computed += end - now
            now = end + instruction.stall_s
            busy += instruction.stall_s
        elif instruction.kind == "start":
            seconds = seconds_of(instruction.message)
            start, link = max(link, now), max(link, now) + seconds
            busy += seconds
            ends[id(instruction.message)] = link
            if lost_of is not None and seconds:
                travels.append(Travel(start, link, max(SLOWEST, 1 - lost_of(instruction.message) / seconds)))
        else:
            now = max(now, ends[id(instruction.message)])
    return StepTime(now, computed, busy)


def end_of_work(now: float, seconds: float, travels: deque[Travel]) -> float:
    """When work of so many seconds that begins now is done, beside messages in the order in which they travel."""
    while travels and travels[0].end <= now:
        travels.popleft()
    for start, end, speed in travels:
        free = min(seconds, max(0.0, start - now))
        now, seconds = now + free, seconds - free
        if not seconds:
            break
        done = min(seconds, (end - now) * speed)
        now, seconds = now + done / speed, seconds - done
    return now + seconds


def with_packing(compute: Compute, messages: list[Message], copy_bytes_per_s: float) -> Compute:
    """The computation with the copies of gradients into the messages that sum them: each byte read and written."""
    backward = list(compute.backward_s)
    for message in messages:
        sums = message.op != "all_gather" and message.axis != "dp_replicate"  # whose shard is summed in place
        if message.phase == "backward" and message.micro_batch == 0 and sums:
            backward[message.stage] += 2 * message.nbytes / copy_bytes_per_s
    return replace(compute, backward_s=tuple(backward))


def program(messages: list[Message], compute: Compute, layout: DataLayout) -> Iterator[Instruction]:
    """The instructions of one step, in the order in which ddp, sharded_optimizer and fsdp issue them."""
    sent = [message for message in messages if message.phase != "host"]
    by_micro_batch: dict[int, list[Message]] = defaultdict(list)
    for message in sent:
        by_micro_batch[message.micro_batch].append(message)
    # A step is taken to begin with its update, so that what this one sends meets the forward pass that comes next.
    updates = [message for message in sent if message.phase == "optimizer"][::-1]
    for message in updates:  # first layers first; the gather of one bucket beside the update of the next
        yield work(compute.optimizer_s / len(updates))
        yield Instruction("start", message=message)
    if not updates:
        yield work(compute.optimizer_s)
    for micro_batch in range(layout.micro_batches):
        of = by_micro_batch[micro_batch]
        forward = [message for message in of if message.phase == "forward"]
        backward = [message for message in of if message.phase == "backward"]
        yield from (
            arrival_program(updates, compute) if updates and not micro_batch else forward_program(forward, compute)
        )
        if layout.is_fsdp:
            yield from fsdp_backward_program(backward, compute)
        elif layout.zero == 0 and not layout.bucketed:
            yield from (compute.backward(stage) for stage in reversed(range(len(compute.backward_s))))
            yield from one_by_one(backward)
        else:
            # ZeRO-1 keeps two messages in flight, so that two buffers are enough; DDP waits for none before the end.
            yield from bucket_program(backward, compute, limit=2 if layout.zero == 1 else len(backward))
    yield from one_by_one(message for message in sent if message.phase == "matrices")


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


def arrival_program(gathers: list[Message], compute: Compute) -> Iterator[Instruction]:
    """ZeRO-1's parameters: each stage waits for those of its own, the last block for those that follow it too."""
    last_block = len(compute.forward_s) - 2
    for stage in range(len(compute.forward_s)):
        needed = [message for message in gathers if min(message.stage, last_block) == stage]
        yield from (Instruction("wait", message=message) for message in needed)
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
