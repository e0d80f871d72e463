"""Where a step's time goes, by module and phase, read from a torch.profiler trace with the ranges of StepRanges.

Each moment of the host's time counts once, for the innermost event that holds it; so the rows add up to the step. A
GPU's kernels count for the range in which the host launched them, whenever they ran; kernels on several streams may add
up to more than the step. Backward modules reach from one mark to the next.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from llm.training_profile_ranges import BACKWARD, NO_MODULE

PHASES = ("data", "forward", "backward", "graph", "communication", "gradient norm", "optimizer")
STEP = re.compile(r"step \d+")
HOST_KINDS = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
BACKWARD_TRACK = 1_000_000_000  # a thread id of its own, for the drawn ranges
SHOWN_OPERATIONS = 20
Label = tuple[str | None, str | None]  # phase and module
Event = dict[str, Any]


@dataclass
class Frame:
    """An event of the host that is open in the sweep."""

    event: Event
    phase: str | None
    module: str | None  # by a range around it
    label: Label  # module by a range or, in backward, by the last mark
    self_us: float

    @property
    def end(self) -> float:
        return self.event["ts"] + self.event["dur"]


@dataclass
class HostTimes:
    """What a sweep over the host's events found, in microseconds."""

    by_label: Counter = field(default_factory=Counter)
    by_operation: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0, 0.0]))  # calls, us
    launches: dict[int, Label] = field(default_factory=dict)  # label of each launch of the GPU, by correlation
    steps: list[Event] = field(default_factory=list)
    marks: list[tuple[float, str | None, float]] = field(default_factory=list)  # start, module, end of its phase


def sweep_host(events: list[Event], modules: set[str]) -> HostTimes:
    """Go through the events of the threads that run steps, outermost first, and give each its own time and label."""
    steps = [event for event in events if is_step(event)]
    threads = {(event["pid"], event["tid"]) for event in events if is_step(event) or is_backward(event)}
    own = [e for e in events if e.get("cat") in HOST_KINDS and (e["pid"], e["tid"]) in threads and "dur" in e]
    own.sort(key=lambda event: (event["ts"], -event["dur"]))
    times, stack = HostTimes(steps=steps), []
    module: str | None = None  # of the backward pass
    for event in own:
        while stack and stack[-1].end <= event["ts"]:
            close(stack.pop(), times)
        if not stack and not is_step(event):
            continue  # between steps
        phase = next((frame.event for frame in reversed(stack) if is_phase(frame.event)), None)
        if is_mark(event):
            name = event["name"].removeprefix(BACKWARD)
            module = None if name == NO_MODULE else name
            if phase is not None:
                times.marks.append((event["ts"], module, phase["ts"] + phase["dur"]))
        if is_phase(event):
            module = None
        stack.append(open_frame(event, stack[-1] if stack else None, modules, module))
        label = stack[-1].label
        correlation = event.get("args", {}).get("correlation")
        if correlation is not None:
            times.launches[correlation] = label
    while stack:
        close(stack.pop(), times)
    return times


def is_step(event: Event) -> bool:
    return event.get("cat") == "user_annotation" and STEP.fullmatch(event["name"]) is not None


def is_phase(event: Event) -> bool:
    return event.get("cat") == "user_annotation" and event["name"] in PHASES


def is_backward(event: Event) -> bool:
    """Whether autograd runs a node here: on a GPU a thread of its own does, while the step's thread waits."""
    return event.get("cat") == "cpu_op" and event["name"].startswith("autograd::engine")


def is_mark(event: Event) -> bool:
    return event.get("cat") == "user_annotation" and event["name"].startswith(BACKWARD)


def open_frame(event: Event, outer: Frame | None, modules: set[str], backward_module: str | None) -> Frame:
    """The frame of an event, whose time is taken from the one around it."""
    phase, module = (outer.phase, outer.module) if outer is not None else (None, None)
    if is_phase(event):
        phase, module = event["name"], None
    elif event["cat"] == "user_annotation" and event["name"] in modules:
        module = event["name"]  # within backward: it is being recomputed
    if outer is not None:
        outer.self_us -= event["dur"]
    label = (phase, module or backward_module) if phase == "backward" else (phase, module)
    return Frame(event, phase, module, label, event["dur"])


def close(frame: Frame, times: HostTimes) -> None:
    own_us = max(0.0, frame.self_us)
    times.by_label[frame.label] += own_us
    if frame.event["cat"] == "cpu_op":
        entry = times.by_operation[frame.event["name"]]
        entry[0], entry[1] = entry[0] + 1, entry[1] + own_us


def sweep_device(events: list[Event], launches: dict[int, Label]) -> tuple[Counter, dict[str, list[float]], float]:
    """Kernel time by label and by kernel, and the time in which any kernel ran; microseconds."""
    by_label: Counter = Counter()
    by_kernel: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    spans = []
    for event in events:
        label = launches.get(event.get("args", {}).get("correlation"))
        if event.get("cat") not in DEVICE_KINDS or label is None:
            continue
        if event["name"].startswith("nccl"):
            label = ("communication", None)
        by_label[label] += event["dur"]
        entry = by_kernel[event["name"]]
        entry[0], entry[1] = entry[0] + 1, entry[1] + event["dur"]
        spans.append((event["ts"], event["ts"] + event["dur"]))
    return by_label, by_kernel, union_length(spans)


def union_length(spans: list[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def kind_of(module: str) -> str:
    """Layers have one row: blocks.3.ffn -> blocks.*.ffn."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", module)


def rows_of(host: Counter, device: Counter, steps: int) -> list[dict[str, Any]]:
    """A row a kind of module: host and device ms a step, by phase; what ran in no module goes by its phase."""
    rows: dict[str, dict[str, Any]] = {}
    for times, name in ((host, "host_ms"), (device, "device_ms")):
        for (phase, module), us in times.items():
            key = kind_of(module) if module else f"({phase or 'between phases'})"
            row = rows.setdefault(key, {"module": key, "host_ms": {}, "device_ms": {}})
            row[name][phase or ""] = row[name].get(phase or "", 0.0) + 1e-3 * us / steps
    return list(rows.values())


def breakdown(events: list[Event], modules: Iterable[str]) -> dict[str, Any]:
    """breakdown.json, averages over the traced steps; "device" says whose time orders the rows."""
    host = sweep_host(events, set(modules))
    by_label, by_kernel, busy_us = sweep_device(events, host.launches)
    steps = max(1, len(host.steps))
    device = "cuda" if by_label else "cpu"
    rows = rows_of(host.by_label, by_label, steps)
    rows.sort(key=lambda row: -sum(row["device_ms" if by_label else "host_ms"].values()))
    operations = sorted((by_kernel or host.by_operation).items(), key=lambda item: -item[1][1])[:SHOWN_OPERATIONS]
    return {
        "device": device,
        "steps": len(host.steps),
        "step_ms": 1e-3 * sum(event["dur"] for event in host.steps) / steps,
        "busy_ms": 1e-3 * busy_us / steps if by_label else None,
        "rows": rows,
        "operations": [
            {"name": name, "calls": calls / steps, "ms": 1e-3 * us / steps} for name, (calls, us) in operations
        ],
    }


def backward_track(events: list[Event], modules: Iterable[str]) -> list[Event]:
    """Ranges of the backward modules as events of a thread of their own, to be added to the trace for its viewer."""
    host = sweep_host(events, set(modules))
    if not host.marks:
        return []
    pid = host.steps[0]["pid"]
    common = {"pid": pid, "tid": BACKWARD_TRACK}
    track = [{"ph": "M", "name": "thread_name", "ts": host.steps[0]["ts"], "args": {"name": "backward of"}, **common}]
    following = [*(start for start, _, _ in host.marks[1:]), float("inf")]
    for (start, module, phase_end), next_start in zip(host.marks, following, strict=True):
        if module is not None:
            dur = min(next_start, phase_end) - start
            track.append({"ph": "X", "cat": "backward", "name": module, "ts": start, "dur": dur, **common})
    return track
