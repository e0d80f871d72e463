"""What was sent: every collective, summed per operation, axis and dtype until the step drains it into comm.jsonl.

Bytes are those of the whole tensor that is reduced, scattered, gathered or exchanged, on one rank and from shapes
alone: for reduce-scatter its input, for all-gather its result. A ring then moves (P - 1) / P of them through a rank,
twice for an all-reduce. Seconds run from the call to the end of the transfer, waiting for slow peers included; exposed
seconds are those in which nothing else could run. On a GPU both come from CUDA events, read only when the step is
drained, so that logging never waits for the device.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

MOST_IN_FLIGHT = 256  # calls kept for the watchdog before those that are over are dropped

Events = tuple[torch.cuda.Event, torch.cuda.Event]


@dataclass
class CommRecord:
    """All calls of one kind since the last drain."""

    op: str
    axis: str
    dtype: str
    ranks: int
    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0
    exposed_seconds: float = 0.0
    events: list[Events] = field(default_factory=list)
    exposed_events: list[Events] = field(default_factory=list)

    def as_line(self, step: int) -> dict[str, Any]:
        self.seconds += sum(elapsed_s(events) for events in self.events)
        self.exposed_seconds += sum(elapsed_s(events) for events in self.exposed_events)
        fields = ("op", "axis", "dtype", "ranks", "calls", "bytes", "seconds", "exposed_seconds")
        return {"step": step} | {name: getattr(self, name) for name in fields}


@dataclass
class Call:
    """One collective under way, as the watchdog sees it; `number` counts the calls of its axis from 1."""

    op: str
    axis: str
    dtype: str
    ranks: int
    bytes: int
    number: int
    started_s: float
    finished_s: float | None = None  # set by the backend's thread
    events: Events | None = None  # around the transfer, on its stream
    works: list[Any] = field(default_factory=list)  # the backend's handles, once it has been started on a CPU
    is_issued: bool = False  # the second event has been recorded

    @property
    def is_over(self) -> bool:
        if self.events is not None:
            return self.is_issued and self.events[1].query()
        return self.finished_s is not None or (bool(self.works) and all(work.is_completed() for work in self.works))

    def issued(self) -> None:
        """Record the second event on the current stream."""
        self.events[1].record()
        self.is_issued = True

    def __str__(self) -> str:
        place = f"call {self.number} over {self.axis} ({self.ranks} ranks)"
        return f"{self.op} of {self.bytes} bytes of {self.dtype}, {place}"


class CollectiveError(RuntimeError):
    """A collective that cannot end: its message names the operation and the ranks that are missing."""


class CommLog:
    """Records of the step under way, in the order in which their kinds first occurred, and the calls in flight."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str, str], CommRecord] = {}
        self.numbers: dict[str, int] = {}  # calls so far of each axis
        self.in_flight: list[Call] = []
        self.explain: Callable[[Call], str] | None = None  # who is missing from a call, if somebody can tell

    def record_of(self, call: Call) -> CommRecord:
        key = (call.op, call.axis, call.dtype)
        record = self.records.get(key)
        if record is None:
            record = self.records[key] = CommRecord(*key, call.ranks)
        return record

    def enter(self, op: str, axis: str, ranks: int, *payload: Tensor) -> Call:
        """Count a collective with this payload; end it with `leave`. Its first event is recorded here."""
        dtype = dtype_name(payload[0].dtype)
        nbytes = sum(tensor.nbytes for tensor in payload)
        number = self.numbers[axis] = self.numbers.get(axis, 0) + 1
        call = Call(op, axis, dtype, ranks, nbytes, number, time.perf_counter())
        if payload[0].is_cuda:
            call.events = cuda_events()
            call.events[0].record()
        record = self.record_of(call)
        record.calls += 1
        record.bytes += nbytes
        if len(self.in_flight) > MOST_IN_FLIGHT:  # not at each call: asking an event takes a microsecond
            self.in_flight = [other for other in self.in_flight if not other.is_over]
        self.in_flight.append(call)
        return call

    def leave(self, call: Call, exposed: float | Events | None) -> None:
        """The call's result was waited for; `exposed` are the seconds of that wait, or its events, or None: all."""
        record = self.record_of(call)
        if call.events is not None:
            record.events.append(call.events)
            record.exposed_events.append(exposed if exposed is not None else call.events)
            return
        call.finished_s = call.finished_s or time.perf_counter()
        seconds = call.finished_s - call.started_s
        record.seconds += seconds
        record.exposed_seconds += min(seconds, exposed) if exposed is not None else seconds

    @contextmanager
    def record(self, op: str, axis: str, ranks: int, tensor: Tensor) -> Iterator[None]:
        """Count and time the collective that runs, and is waited for, inside the `with` block."""
        call = self.enter(op, axis, ranks, tensor)
        with self.failures(call):
            yield
        if call.events is not None:
            call.issued()
        self.leave(call, None)

    @contextmanager
    def failures(self, call: Call) -> Iterator[None]:
        """Turn an error of the backend into a CollectiveError that says which ranks were not there."""
        try:
            yield
        except RuntimeError as error:
            told = self.explain(call) if self.explain is not None else "who is missing is unknown"
            self.in_flight = [other for other in self.in_flight if other is not call]
            raise CollectiveError(f"{call} failed; {told}. The backend said: {str(error).strip()}") from error

    def drain(self, step: int) -> list[dict[str, Any]]:
        """The lines of comm.jsonl for `step`: step and the fields of CommRecord; the log is empty afterwards."""
        lines = [record.as_line(step) for record in self.records.values()]
        self.records = {}
        return lines


@lru_cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cuda_events() -> Events:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def elapsed_s(events: Events) -> float:
    events[1].synchronize()
    return events[0].elapsed_time(events[1]) / 1e3
