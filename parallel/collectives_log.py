"""What was sent: every collective, summed per operation, axis and dtype until the step drains it into comm.jsonl.

Bytes are the payload of one rank (elements times element size), from shapes alone. Seconds on a GPU come from CUDA
events around the call, read only when the step is drained, so that logging never waits for the device.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


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
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def as_line(self, step: int) -> dict[str, Any]:
        for start, end in self.events:
            end.synchronize()
            self.seconds += start.elapsed_time(end) / 1e3
        fields = ("op", "axis", "dtype", "ranks", "calls", "bytes", "seconds")
        return {"step": step} | {name: getattr(self, name) for name in fields}


class CommLog:
    """Records of the step under way, in the order in which their kinds first occurred."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str, str], CommRecord] = {}

    @contextmanager
    def record(self, op: str, axis: str, ranks: int, tensor: Tensor) -> Iterator[None]:
        """Count and time the collective run inside the `with` block; `tensor` is its payload."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        record = self.records.setdefault((op, axis, dtype), CommRecord(op, axis, dtype, ranks))
        events = cuda_events() if tensor.is_cuda else None
        started = time.perf_counter()
        if events:
            events[0].record()
        yield
        if events:
            events[1].record()
            record.events.append(events)
        else:
            record.seconds += time.perf_counter() - started
        record.calls += 1
        record.bytes += tensor.numel() * tensor.element_size()

    def drain(self, step: int) -> list[dict[str, Any]]:
        """The lines of comm.jsonl for `step`: step and the fields of CommRecord; the log is empty afterwards."""
        lines = [record.as_line(step) for record in self.records.values()]
        self.records = {}
        return lines


def cuda_events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
