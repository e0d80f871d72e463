"""The clocks of bench_mark_pp: one step's operations and what a rank does around them, and a message on an idle link.

On a GPU events are recorded in the stream in which the work is, elsewhere the host's clock is read.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parallel.collectives import all_gather_json, barrier, exchange
from parallel.mesh import Mesh
from parallel.pipeline_schedules import Operation

MESSAGES, MESSAGES_WARM_UP = 15, 5
AHEAD, AHEAD_WIDTH = 4, 8192  # matrix products that keep a GPU busy for 5 ms, while the host issues a message


@dataclass(frozen=True)
class StepTimes:
    """One step of one rank, in seconds since it began; lists of plain numbers, so that they travel as JSON."""

    before_s: float  # until its first operation could have started: gradients set to zero, weights cast
    after_s: float  # from the end of its last operation and message to the end of the step: the loss summed up
    operations: list[tuple[str, int, int, float, float]] = field(default_factory=list)  # kind, stage, index, start, end

    @property
    def outside(self) -> tuple[float, float]:
        return self.before_s, self.after_s

    @property
    def seconds(self) -> dict[Operation, float]:
        return {Operation(kind, stage, index): end - start for kind, stage, index, start, end in self.operations}

    @property
    def work_s(self) -> float:
        """Neither idle nor waiting."""
        return sum(self.seconds.values()) + self.before_s + self.after_s

    @property
    def means(self) -> dict[str, float]:
        """Seconds of an operation of each kind and stage, such as "F0": times their number they are the busy time."""
        kinds: dict[str, list[float]] = {}
        for op, seconds in self.seconds.items():
            kinds.setdefault(f"{op.kind}{op.stage}", []).append(seconds)
        return {kind: statistics.mean(seconds) for kind, seconds in sorted(kinds.items())}

    def lines(self) -> list[str]:
        """An operation each, stage and micro-batch, start and end in milliseconds: "F0.3 27.112 36.014"."""
        return [
            f"{kind}{at}.{index} {1e3 * start:.3f} {1e3 * end:.3f}" for kind, at, index, start, end in self.operations
        ]


@dataclass
class Tracer:
    """Times a step (`with tracer.step()`) and each operation where it runs (as PipelineRunner.observe)."""

    device: torch.device
    issued: float = 0.0  # when the host had issued the last operation
    whole: tuple[Any, Any] | None = None
    program: tuple[Any, Any] | None = None  # all operations and messages
    spans: list[tuple[Operation, Any, Any]] = field(default_factory=list)

    @contextmanager
    def step(self) -> Iterator[None]:
        self.spans = []
        began = self.mark()
        yield
        self.whole = (began, self.mark())

    @contextmanager
    def __call__(self, op: Operation | None) -> Iterator[None]:
        began = self.mark()
        yield
        if op is None:
            self.program = (began, self.mark())
        else:
            self.spans.append((op, began, self.mark()))
            self.issued = time.perf_counter()

    def mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, began: Any, ended: Any) -> float:
        return ended - began if self.device.type != "cuda" else began.elapsed_time(ended) / 1e3

    def drain(self) -> StepTimes:
        """The step that was timed last; the device is done with it."""
        (began, ended), (first, last), spans = self.whole, self.program, self.spans
        self.whole, self.program, self.spans = None, None, []
        times = [(*op, self.seconds(began, start), self.seconds(began, end)) for op, start, end in spans]
        return StepTimes(self.seconds(began, first), self.seconds(last, ended), times)


def message_seconds_measured(states: Tensor, mesh: Mesh) -> float:
    """Seconds of a stage's output on its way to a neighbour while another comes back, nothing else being under way.

    Of both ranks of a pair the shorter time counts, since the other one has waited; then the median, and the slowest
    pair's. Called by all ranks; equal on all.
    """
    tracer, received, partner = Tracer(mesh.device), torch.empty_like(states), mesh.rank_in("pp") ^ 1
    square = torch.ones(AHEAD_WIDTH, AHEAD_WIDTH, device=mesh.device, dtype=torch.bfloat16) if states.is_cuda else None
    taken = []
    for _ in range(MESSAGES_WARM_UP + MESSAGES):
        barrier(mesh, "pp")
        for _ in range(AHEAD if square is not None else 0):
            square @ square
        began = tracer.mark()
        if partner < mesh.size("pp"):
            exchange([(states, partner)], [(received, partner)], mesh, "pp").wait()
        ended = tracer.mark()
        if states.is_cuda:
            torch.cuda.synchronize()
        taken.append(tracer.seconds(began, ended))
    return of_slowest_pair(all_gather_json(taken[MESSAGES_WARM_UP:], mesh, "pp"))


def of_slowest_pair(ranks: list[list[float]]) -> float:
    """From each rank's seconds of the same messages; the last of an odd number of ranks has no partner."""
    pairs = zip(ranks[0::2], ranks[1::2], strict=False)
    return max(statistics.median(map(min, *pair)) for pair in pairs)
