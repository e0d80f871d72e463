"""What a run measures about itself: throughput, MFU, peak memory, and the rows that set predictions beside them.

tokens/s is global and its time excludes validation and checkpoints. Memory is max_memory_allocated on a GPU; a CPU has
no such counter, so there it is the bytes of live tensors (llm/metrics_memory.py).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from configs.errors import UserError, missing_extra
from llm.args import TrackingConfig

# quantity in the table, key in both dictionaries, unit
QUANTITIES = [
    ("parameters", "parameters", ""),
    ("peak memory", "memory_peak_bytes", "bytes"),
    ("step time", "step_s", "s"),
    ("tokens/s", "tokens_per_s", ""),
    ("MFU", "mfu", "fraction"),
]


def mfu(flops_per_token: float, tokens_per_s: float, peak_flops: float | None) -> float | None:
    """Model FLOPs utilisation: the counted training FLOPs a second over the dense peak of all devices; None if unknown.

    PaLM's definition (Chowdhery et al. 2022, appendix B) with llm.cost_model's counting.
    """
    return None if not peak_flops else flops_per_token * tokens_per_s / peak_flops


def comparison_rows(predicted: dict[str, Any], measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Predicted beside measured: quantity, unit, predicted, measured, ratio (measured / predicted), note.

    Both map the keys of QUANTITIES to numbers; a missing one is None. predicted["notes"] maps keys to remarks.
    """
    notes = predicted.get("notes", {})
    rows = []
    for quantity, key, unit in QUANTITIES:
        expected, seen = predicted.get(key), measured.get(key)
        ratio = seen / expected if expected and seen is not None else None
        row = {"quantity": quantity, "unit": unit, "predicted": expected, "measured": seen, "ratio": ratio}
        rows.append(row | {"note": notes.get(key, "")})
    return rows


@dataclass
class Window:
    """What ran between two readings of a Throughput, pauses excluded."""

    tokens: int
    steps: int
    elapsed_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def step_s(self) -> float:
        return self.elapsed_s / self.steps if self.steps else 0.0


class Throughput:
    """A stopwatch over training alone: `resume` starts it, `with paused():` surrounds validation and checkpoints.

    On a GPU each reading waits for the device, so that work still queued counts.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.started_s: float | None = None
        self.current, self.total = Window(0, 0, 0.0), Window(0, 0, 0.0)

    def now_s(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def resume(self) -> None:
        """Start, or go on after a pause."""
        assert self.started_s is None, "the throughput's clock is running already"
        self.started_s = self.now_s()

    def pause(self) -> None:
        """Stop the clock; does nothing when it stands still."""
        if self.started_s is not None:
            self.current.elapsed_s += self.now_s() - self.started_s
            self.started_s = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time that does not count; afterwards the clock goes on if it ran before."""
        running = self.started_s is not None
        self.pause()
        yield
        if running:
            self.resume()

    def add_step(self, tokens: int) -> None:
        """Count one optimizer step of `tokens` tokens of the global batch."""
        self.current.tokens += tokens
        self.current.steps += 1

    def read(self) -> Window:
        """The window since the last reading, added to `total`; the clock goes on if it ran."""
        with self.paused():
            window, self.current = self.current, Window(0, 0, 0.0)
        self.total.tokens += window.tokens
        self.total.steps += window.steps
        self.total.elapsed_s += window.elapsed_s
        return window

    def forget(self) -> None:
        """Drop the current window: the first steps, in which kernels are compiled and memory is first touched."""
        with self.paused():
            self.current = Window(0, 0, 0.0)


class Tracker:
    """Sends the metrics to W&B as well; does nothing when tracking.wandb is off. For rank 0 alone.

    Raises UserError when wandb is not installed, or refuses (no key and no terminal to ask for one).
    """

    def __init__(self, config: TrackingConfig, name: str, run_config: dict[str, Any], directory: str | Path = "runs"):
        self.run: Any = None
        if config.wandb == "off":
            return
        try:
            import wandb
        except ImportError as error:
            raise missing_extra("wandb", "track") from error
        Path(directory).mkdir(parents=True, exist_ok=True)
        try:
            self.run = wandb.init(
                project=config.project, name=name, config=run_config, mode=config.wandb, dir=str(directory)
            )
        except (wandb.Error, wandb.errors.UsageError) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"tracking.wandb={config.wandb} was refused ({reason}); run `wandb login` or use tracking=offline"
            ) from error

    def log(self, record: dict[str, Any]) -> None:
        """One line of metrics; `step` is the x axis."""
        if self.run is not None:
            self.run.log({key: value for key, value in record.items() if key != "step"}, step=record["step"])

    def finish(self) -> None:
        if self.run is not None:
            self.run.finish()
