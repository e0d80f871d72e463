"""Streaming clients of an OpenAI-compatible server, light enough not to be what is measured, and what they saw.

Each client opens a connection, asks for a chat as a stream, and notes when data came. Sockets and a few string
searches only: a general HTTP client takes longer for an event than a fast server does.
"""

import asyncio
import json
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Seen:
    """One client's times in seconds since all began, and its tokens."""

    first_s: float
    last_s: float
    tokens: int


@dataclass
class Load:
    """What a crowd of clients saw of one server."""

    wall_s: float
    cpu_s: float  # of the server's processes
    seen: list[Seen]

    @property
    def tokens(self) -> int:
        return sum(one.tokens for one in self.seen)

    def first_ms(self, share: float) -> float:
        """Time to first token: `share` of the clients had it by then."""
        return 1e3 * quantile([one.first_s for one in self.seen], share)

    def token_ms(self, share: float) -> float:
        """A client's mean time from one token to the next; for `share` of the clients it was no longer."""
        return 1e3 * quantile([(one.last_s - one.first_s) / max(1, one.tokens - 1) for one in self.seen], share)


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def one_client(port: int, body: bytes, start_s: float) -> Seen:
    """Run one request to its end; RuntimeError if the server refuses it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Length: {len(body)}\r\n"
        "Content-Type: application/json\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + body)
    first_s = last_s = 0.0
    received, events = b"", 0
    while piece := await reader.read(1 << 16):
        events += piece.count(b"data: {")
        if not received and b" 200 " not in piece[:40]:
            raise RuntimeError(piece.decode("utf-8", "replace")[:400])
        # The first event may hold the role alone; a finish_reason comes with or after the last token.
        if events >= 2 and not first_s:
            first_s = time.perf_counter() - start_s
        if b"data: {" in piece:
            last_s = time.perf_counter() - start_s
        received = received[-2000:] + piece
    writer.close()
    return Seen(first_s, last_s, completion_tokens(received))


def completion_tokens(tail: bytes) -> int:
    """From the usage at the end of a stream."""
    place = tail.rfind(b'"completion_tokens":')
    if place < 0:
        raise RuntimeError(f"no usage at the end of the stream: {tail[-300:]!r}")
    digits = tail[place + 20 : place + 40].lstrip()
    return int(digits[: next(i for i, byte in enumerate(digits) if not 48 <= byte < 58)])


def run_clients(port: int, pid: int, bodies: list[dict]) -> Load:
    """All requests at once; the processor time is that of process `pid` and its children."""

    async def run() -> tuple[float, list[Seen]]:
        encoded = [json.dumps(body).encode() for body in bodies]
        start = time.perf_counter()
        seen = await asyncio.gather(*(one_client(port, body, start) for body in encoded))
        return time.perf_counter() - start, list(seen)

    before = processor_seconds(pid)
    wall_s, seen = asyncio.run(run())
    return Load(wall_s, processor_seconds(pid) - before, seen)


def processor_seconds(pid: int) -> float:
    """User and system time of a process, its living children included."""
    total = 0.0
    for path in [Path(f"/proc/{pid}"), *children(pid)]:
        fields = (path / "stat").read_text().rsplit(")", 1)[1].split()
        total += (int(fields[11]) + int(fields[12])) / CLOCK_TICKS
    return total


def children(pid: int) -> list[Path]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [Path(f"/proc/{child}") for child in text.split()]


def median_load(loads: list[Load]) -> Load:
    """The one with the median wall time."""
    middle = statistics.median_low([load.wall_s for load in loads])
    return next(load for load in loads if load.wall_s == middle)
