"""profile=true: a few named steps of a run, traced by module and phase, and the memory of one step, block by block.

After `profile_start` ordinary steps come one of warm-up, `profile_steps` in torch.profiler's trace, and one whose
memory is recorded; then every hook is gone. All of it goes to runs/<name>/profile/ and into report.html
(docs/profiling.md). With profile_tool=nsys the ranges alone are there, as NVTX, between cudaProfilerStart and Stop.
Rank 0 profiles itself.
"""

import gzip
import json
import pickle
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from configs.errors import UserError
from configs.run_dir import write_bytes_atomic, write_json_atomic
from llm.args import TrainConfig
from llm.metrics_memory import held_tensors
from llm.training_profile_allocator import AllocatorRecorder
from llm.training_profile_breakdown import backward_track, breakdown
from llm.training_profile_memory import Owners, TensorRecorder
from llm.training_profile_ranges import NvtxSink, Sink, StepRanges, TraceSink, named_parts
from llm.training_profile_timeline import memory_summary
from llm.training_setup import Trainer

FOLDER = "profile"
# The first steps of a process count tensors for the memory's prediction (llm/training_measure), which slows them.
FIRST_STEPS = 2
OWNERS_CHANGE = ("communication", "optimizer")  # phases after which gradients and optimizer state may lie elsewhere


def check_profile(config: TrainConfig, device: torch.device, steps_left: int) -> None:
    """Refuse what cannot be profiled, before the first step."""
    needed = config.profile_start + config.profile_steps + 2
    if config.profile_start < FIRST_STEPS:
        raise UserError(
            f"profile_start={config.profile_start} must be at least {FIRST_STEPS}, since the first steps are measured "
            f"for the report; use profile_start={FIRST_STEPS}"
        )
    if steps_left < needed:
        raise UserError(
            f"profile=true takes profile_start + profile_steps + 2 = {needed} steps, but {steps_left} are left up to "
            f"max_steps={config.max_steps}; raise max_steps or use another name"
        )
    if config.profile_tool == "nsys" and device.type != "cuda":
        raise UserError(f"profile_tool=nsys needs a CUDA device, not {device}; use profile_tool=torch")


class StepProfiler:
    """`with profiler.step():` around each step; does nothing unless the config asks, and but for its own few steps."""

    def __init__(self, trainer: Trainer):
        self.trainer, self.config, self.done = trainer, trainer.config, 0
        self.was_profiled = False
        self.is_on = self.config.profile and trainer.mesh.is_main
        self.device = trainer.mesh.device
        self.folder = trainer.run_dir.path / FOLDER
        self.open = ExitStack()  # what the traced steps share
        self.profiler: profile | None = None
        self.parts = named_parts(trainer.model, trainer.loss) if self.is_on else []
        if self.config.profile:
            check_profile(self.config, self.device, self.config.max_steps - trainer.step)
        if self.is_on and self.config.compile == "model":
            print("note: compile=model is one range in the profile; compile=block shows each block")
        if self.is_on and self.config.kernels.cuda_graph:
            print("note: a replayed CUDA graph tells neither modules nor memory; profile with kernels.cuda_graph=false")

    def __enter__(self) -> "StepProfiler":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.open.close()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Surrounds one step of the loop."""
        index = self.done - self.config.profile_start  # 0: the warm-up
        self.done += 1
        if not self.is_on or not 0 <= index <= self.config.profile_steps + 1:
            yield
            return
        if index == 0:
            self.start_trace()
        if index <= self.config.profile_steps:
            with self.named_step():
                yield
            self.next_traced(index)
        else:
            with self.memory_of_step():
                yield
        self.was_profiled = True

    def count(self) -> None:
        """Called after each step: the time of a profiled one is dropped."""
        if self.was_profiled:
            self.was_profiled = False
            self.trainer.throughput.forget()

    def sinks(self) -> list[Sink]:
        return [*([TraceSink()] if self.config.profile_tool == "torch" else []), *self.nvtx()]

    def nvtx(self) -> list[Sink]:
        return [NvtxSink()] if self.device.type == "cuda" else []

    @contextmanager
    def named_step(self) -> Iterator[None]:
        name = f"step {self.trainer.step + 1}"
        with record_function(name):
            for sink in self.nvtx():
                sink.push(name)
            yield
            for sink in self.nvtx():
                sink.pop()

    def start_trace(self) -> None:
        """Hooks from here on; the profiler's first step is its own warm-up."""
        self.open.enter_context(self.attached(StepRanges(self.sinks())))
        if self.config.profile_tool == "torch":
            activities = [ProfilerActivity.CPU]
            if self.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            steps = schedule(wait=0, warmup=1, active=self.config.profile_steps, repeat=1)
            self.profiler = profile(activities=activities, schedule=steps, on_trace_ready=self.write_trace)
            self.open.enter_context(self.profiler)

    def next_traced(self, index: int) -> None:
        """After a traced step: go on to the next, or close the trace after the last."""
        if self.profiler is not None:
            self.profiler.step()
        elif index == 0:
            torch.cuda.profiler.start()
            self.open.callback(torch.cuda.profiler.stop)
        if index == self.config.profile_steps:
            self.open.close()

    @contextmanager
    def attached(self, ranges: StepRanges) -> Iterator[None]:
        """Ranges around modules and phases, gone at the end."""
        step = self.trainer.training_step
        ranges.attach(self.parts, self.config.compile)
        before, step.phase = step.phase, ranges.phase
        try:
            yield
        finally:
            step.phase = before
            ranges.detach()

    def write_trace(self, profiler: profile) -> None:
        """trace.json.gz, with the backward modules drawn on a track of their own, and breakdown.json."""
        self.folder.mkdir(parents=True, exist_ok=True)
        plain = self.folder / ".trace.json"
        try:
            profiler.export_chrome_trace(str(plain))
            trace = json.loads(plain.read_text(encoding="utf-8"))
        finally:
            plain.unlink(missing_ok=True)
        events = trace["traceEvents"]
        modules = self.range_names()
        write_json_atomic(self.folder / "breakdown.json", breakdown(events, modules))
        events += backward_track(events, modules)
        write_gzip(self.folder / "trace.json.gz", trace)

    def range_names(self) -> list[str]:
        """Every name that a module's range may have."""
        from llm.training_profile_ranges import SEAMS

        return [name + ending for name, _ in self.parts for ending in {"", *SEAMS.values()}]

    @contextmanager
    def memory_of_step(self) -> Iterator[None]:
        """memory.json of one step; on a GPU the allocator's own snapshot beside it, for PyTorch's viewer."""
        trainer = self.trainer
        on_gpu = self.device.type == "cuda"
        owners = Owners(trainer.model, trainer.optimizer, trainer.training_step.strategy.parameters)
        if on_gpu:  # the peak counter is about to start anew
            trainer.peak_bytes = max(trainer.peak_bytes, torch.cuda.max_memory_allocated(self.device))
            recorder: Any = AllocatorRecorder(self.device)
        ranges = StepRanges([recorder] if on_gpu else [], on_module=owners.mark_module)
        if on_gpu:
            recorder.where = lambda: ranges.where
        else:
            recorder = TensorRecorder(
                [*held_tensors(trainer.model, trainer.optimizer), *owners.held], lambda: ranges.where
            )
        spans = PhaseSpans(ranges, owners, recorder)
        with self.attached(ranges), recorder:
            trainer.training_step.phase = spans.phase
            owners.attach(recorder)
            try:
                yield
                owners.mark()
            finally:
                owners.detach()
        trace = recorder.trace()
        trace.phases = spans.spans
        write_json_atomic(self.folder / "memory.json", memory_summary(trace))
        if on_gpu:
            write_snapshot(self.folder, recorder.snapshot)
        print(f"profile written to {self.folder}; its tables and figure join {trainer.run_dir.path}/report.html")


class PhaseSpans:
    """Phases of a recorded step with their times, after some of which owners are looked at again."""

    def __init__(self, ranges: StepRanges, owners: Owners, recorder: Any):
        self.ranges, self.owners, self.recorder = ranges, owners, recorder
        self.spans: list[tuple[str, float, float]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start_s = time.time()
        with self.ranges.phase(name):
            yield
        if name in OWNERS_CHANGE:
            self.owners.mark()
        self.spans.append((name, start_s - self.recorder.start_s, time.time() - self.recorder.start_s))


def write_gzip(path: Path, value: Any) -> None:
    write_bytes_atomic(path, gzip.compress(json.dumps(value).encode("utf-8"), compresslevel=6))


def write_snapshot(folder: Path, snapshot: dict[str, Any]) -> None:
    """The allocator's record for https://pytorch.org/memory_viz, which reads a pickle, and the same as JSON.

    We read neither again: a pickle from elsewhere may run code.
    """
    write_bytes_atomic(folder / "memory_snapshot.pickle", pickle.dumps(snapshot))
    write_gzip(folder / "memory_snapshot.json.gz", json.loads(json.dumps(snapshot, default=str)))
