"""Where a batch's time goes: seconds by section, the device's work included."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SECTIONS = ("rollout", "reward", "log_prob", "update", "sync", "wait")


class Clock:
    """`with clock.section("update"):` adds to it; on a GPU each border waits for the device."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds = dict.fromkeys(SECTIONS, 0.0)
        self.started_s = self.now_s()

    def now_s(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        started_s = self.now_s()
        yield
        self.seconds[name] += self.now_s() - started_s

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] += seconds

    def take(self) -> dict[str, float]:
        """Seconds of each section since the last call, and "total": the time that passed on this rank."""
        now_s = self.now_s()
        taken = self.seconds | {"total": now_s - self.started_s}
        self.seconds, self.started_s = dict.fromkeys(SECTIONS, 0.0), now_s
        return taken
