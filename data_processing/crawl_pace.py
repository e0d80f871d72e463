"""When a host may be asked again: one request in `delay_s`, later after a Retry-After. All waiting of a crawl is here.

The clock is handed in, so that tests wait for hours without waiting.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime


class Stopped(Exception):
    """The crawl ends while a thread waits for its turn."""


def wait_for(event: threading.Event, seconds: float) -> None:
    event.wait(seconds)


@dataclass(frozen=True)
class Clock:
    """Seconds that only grow, seconds since 1970, and the way to let time pass unless an event ends it."""

    now_s: Callable[[], float] = time.monotonic
    wall_s: Callable[[], float] = time.time
    wait: Callable[[threading.Event, float], None] = wait_for


class Pace:
    """Spaces the requests of each host; safe for threads. Once `stopping` is set, nobody gets a turn."""

    def __init__(self, delay_s: float, clock: Clock):
        self.delay_s, self.clock, self.stopping = delay_s, clock, threading.Event()
        self._next_s: dict[str, float] = {}
        self._delays_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def set_delay(self, host: str, delay_s: float) -> None:
        """Ask a host more rarely than the default (its robots.txt says so); never more often."""
        with self._lock:
            self._delays_s[host] = max(delay_s, self.delay_s)

    def hold(self, host: str, wait_s: float) -> None:
        """No request to the host for `wait_s` seconds from now."""
        with self._lock:
            self._next_s[host] = max(self._next_s.get(host, 0.0), self.clock.now_s() + wait_s)

    def wait(self, host: str) -> None:
        """Sleep until the host may be asked, and take that turn. Raises Stopped."""
        with self._lock:
            now = self.clock.now_s()
            start = max(now, self._next_s.get(host, now))
            self._next_s[host] = start + self._delays_s.get(host, self.delay_s)
        if start > now:
            self.clock.wait(self.stopping, start - now)
        if self.stopping.is_set():
            raise Stopped


def retry_after_s(value: str, wall_s: float) -> float | None:
    """The wait that a Retry-After header asks for, in seconds: a number or an HTTP date; None when it is neither."""
    value = value.strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        when = parsedate_to_datetime(value)
    except (TypeError, ValueError):
        return None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max(0.0, when.timestamp() - wall_s)
