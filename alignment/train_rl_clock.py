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


def python_call_s(calls: int = 20_000) -> float:
    """Seconds of a generic Python call of a few lines, the best of five: an engine's own cost is made of them."""
    best = float("inf")
    for _ in range(5):
        values: list[int] = []
        started_s = time.perf_counter()
        for number in range(calls):
            append_pair(values, number)
        best = min(best, (time.perf_counter() - started_s) / calls)
    return best


def append_pair(values: list[int], number: int) -> bool:
    """Three plain lines, as most of an engine's functions are."""
    if number % 4 == 0:
        values.clear()
    values.append(number)
    return number in values
