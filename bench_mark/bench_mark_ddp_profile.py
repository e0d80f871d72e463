"""Where a contestant's step goes beside the bare one, by torch.profiler: kernels that differ, idle time, host time.

A step that is slower because its kernels take longer shows in `busy`; one whose device waits for the host or for
another stream shows in `idle`. Profiled steps are not the timed ones.
"""

import time
from collections import defaultdict
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench_mark.bench_mark_fsdp_contestants import Contestant

STEPS = 3
NAME_LENGTH = 100
GAP_NAME_LENGTH, GAPS_SHOWN = 40, 12


def profile_step(contestant: Contestant, device: torch.device) -> dict[str, Any]:
    """Per step: wall_s, busy_s (some kernel runs), idle_s, host_s (until everything is issued), kernels {name: s}.

    On a CPU, where operations are the work, the kernels are operations by their own time.
    """
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    contestant.step()
    if on_gpu:
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    with profile(activities=activities) as prof:
        for _ in range(STEPS):
            contestant.step()
        host_s = time.perf_counter() - began
        if on_gpu:
            torch.cuda.synchronize(device)
        wall_s = time.perf_counter() - began
    kernels: dict[str, float] = defaultdict(float)
    launches: dict[str, int] = defaultdict(int)
    spans = []
    for event in prof.events():
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        if on_device != on_gpu or getattr(event, "is_user_annotation", False):  # an annotation spans idle time too
            continue
        seconds = (event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total) / 1e6
        kernels[event.name[:NAME_LENGTH]] += seconds / STEPS
        launches[event.name[:NAME_LENGTH]] += 1
        spans.append((event.time_range.start, event.time_range.end, event.name[:GAP_NAME_LENGTH]))
    span_s, busy_s = covered(spans)
    return {
        "wall_s": wall_s / STEPS,
        "host_s": host_s / STEPS,
        "span_s": span_s / STEPS,
        "busy_s": busy_s / STEPS,
        "idle_s": (span_s - busy_s) / STEPS,
        "kernels": dict(sorted(kernels.items(), key=lambda item: -item[1])[:60]),
        "gaps": {name: seconds / STEPS for name, seconds in gaps(spans)},
        "launches": {name: count / STEPS for name, count in launches.items()},
    }


def gaps(spans: list[tuple[float, float, str]]) -> list[tuple[str, float]]:
    """The times at which nothing runs, added up by what ends before and what starts after, the longest first."""
    total: dict[str, float] = defaultdict(float)
    end, before = None, ""
    for start, stop, name in sorted(spans):
        if end is not None and start > end:
            total[f"{before} -> {name}"] += (start - end) / 1e6
        if end is None or stop > end:
            end, before = stop, name
    return sorted(total.items(), key=lambda item: -item[1])[:GAPS_SHOWN]


def covered(spans: list[tuple[float, float, str]]) -> tuple[float, float]:
    """Seconds from the first start to the last end, and those of them that lie in some span (microseconds in)."""
    if not spans:
        return 0.0, 0.0
    spans = sorted(spans)
    busy, end = 0.0, spans[0][0]
    for start, stop, _ in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return (end - spans[0][0]) / 1e6, busy / 1e6


def print_difference(name: str, profiled: dict[str, Any], bare: dict[str, Any], most: int = 8) -> None:
    """The step's parts beside the bare one's, and the kernels that differ most, in microseconds."""
    parts = [f"{key[:-2]} {1e6 * (profiled[key] - bare[key]):+.0f}" for key in ("wall_s", "host_s", "busy_s", "idle_s")]
    print(f"{name} over bare, us: {', '.join(parts)}")
    names = profiled["kernels"].keys() | bare["kernels"].keys()
    differences = {n: profiled["kernels"].get(n, 0.0) - bare["kernels"].get(n, 0.0) for n in names}
    for kernel, seconds in sorted(differences.items(), key=lambda item: -abs(item[1]))[:most]:
        print(f"  {1e6 * seconds:+9.1f}  x{profiled['launches'].get(kernel, 0):.0f}  {kernel}")
    names = profiled["gaps"].keys() | bare["gaps"].keys()
    idle = {n: profiled["gaps"].get(n, 0.0) - bare["gaps"].get(n, 0.0) for n in names}
    for place, seconds in sorted(idle.items(), key=lambda item: -abs(item[1]))[:most]:
        print(f"  {1e6 * seconds:+9.1f}  idle  {place}")
