"""Counters and histograms of the server, written out in Prometheus' text format (version 0.0.4).

All names begin with mew_. Gauges are read when somebody asks; everything else is counted as it happens, on the event
loop's thread alone, so no lock is needed.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

Labels = tuple[tuple[str, str], ...]
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """Observations counted by upper bound, with their sum."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """The mean of all observations, 0 before the first."""
        return self.total / self.count if self.count else 0.0

    def lines(self, name: str) -> Iterable[str]:
        below = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            below += count
            yield f'{name}_bucket{{le="{bound}"}} {below}'
        yield f"{name}_sum {self.total:.9g}"
        yield f"{name}_count {below}"


class ServeMetrics:
    """What the server counts: requests by path and status, tokens, cancelled sequences, and where time went."""

    def __init__(self) -> None:
        self.requests: defaultdict[Labels, int] = defaultdict(int)
        self.cancelled = self.prompt_tokens = self.completion_tokens = 0
        self.time_to_first_token, self.time_per_token, self.request_time = Histogram(), Histogram(), Histogram()

    def count_request(self, path: str, status: int) -> None:
        self.requests[(("path", path), ("status", str(status)))] += 1

    def render(self, gauges: dict[str, tuple[str, float]]) -> str:
        """The page for Prometheus; `gauges` maps a name to its meaning and its value now."""
        lines = ["# HELP mew_requests_total Answers by path and status.", "# TYPE mew_requests_total counter"]
        for labels, count in sorted(self.requests.items()):
            text = ",".join(f'{name}="{escape(value)}"' for name, value in labels)
            lines.append(f"mew_requests_total{{{text}}} {count}")
        for name, meaning, value in [
            ("cancelled_total", "Sequences cancelled before their end, as when a client goes away.", self.cancelled),
            ("prompt_tokens_total", "Prompt tokens of accepted requests.", self.prompt_tokens),
            ("completion_tokens_total", "Tokens sampled.", self.completion_tokens),
        ]:
            lines += [f"# HELP mew_{name} {meaning}", f"# TYPE mew_{name} counter", f"mew_{name} {value}"]
        for name, (meaning, number) in gauges.items():
            lines += [f"# HELP mew_{name} {meaning}", f"# TYPE mew_{name} gauge", f"mew_{name} {number:g}"]
        for name, meaning, histogram in [
            ("time_to_first_token_seconds", "From the request to its first token.", self.time_to_first_token),
            ("time_per_token_seconds", "From one token of a sequence to its next.", self.time_per_token),
            ("request_seconds", "From the request to the end of its answer.", self.request_time),
        ]:
            lines += [f"# HELP mew_{name} {meaning}", f"# TYPE mew_{name} histogram", *histogram.lines(f"mew_{name}")]
        return "\n".join(lines) + "\n"


def escape(value: str) -> str:
    """A label's value as the text format wants it."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def resident_bytes() -> int:
    """Memory of this process that is in RAM, from /proc; 0 where there is none."""
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * 4096 if path.exists() else 0
