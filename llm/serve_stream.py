"""Sending an answer while watching whether its client is still there.

uvicorn tells of a client that went away through `receive`, also while nothing is being sent, as for a request that
waits for its turn. Whoever leaves takes the request's sequences out of the engine, and their pages return.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from llm.engine_request import TokenEvent
from llm.serve_answer import Answer, Choice, encode_json
from llm.serve_errors import ApiError
from llm.serve_metrics import ServeMetrics
from llm.serve_worker import Delivery, EngineWorker, Job

LOG = logging.getLogger("mew.serve")
KEEP_ALIVE_S = 15.0  # a comment this often while nothing else is sent, for proxies that close quiet connections
MIN_PAUSE_S = 0.001  # a shorter one costs more than it saves
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


async def gone(receive: Receive) -> None:
    """Return once the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(work: Awaitable[Any], receive: Receive) -> Any:
    """The result of `work`; ClientGone, with the work cancelled, if the client leaves before."""
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


class Collector:
    """Takes a job's deliveries in, keeps its choices and counts for the metrics."""

    def __init__(self, job: Job, metrics: ServeMetrics, started_s: float, keep: bool):
        self.job, self.metrics, self.started_s = job, metrics, started_s
        self.keep = keep  # whether text and events are wanted at the end
        self.choices = [Choice(index) for index in range(len(job.sequences))]
        self.last_s: list[float | None] = [None] * len(self.choices)
        self.remaining = len(self.choices)

    def take(self, delivery: Delivery) -> tuple[Choice, int]:
        """Note one delivery; returns its choice and the characters before it. Raises the error that it carries."""
        if delivery.error is not None:
            raise delivery.error
        choice, event = self.choices[delivery.index], delivery.event
        if event.finish_reason not in (None, "stop", "length"):
            raise ApiError(500, f"the engine ended the answer: {event.finish_reason}", "engine_error")
        before = choice.num_chars
        choice.add(event, self.keep)
        self.observe(delivery)
        if event.finish_reason is not None:
            self.remaining -= 1
            if not self.remaining:
                self.metrics.request_time.observe(delivery.time_s - self.started_s)
        return choice, before

    def observe(self, delivery: Delivery) -> None:
        last = self.last_s[delivery.index]
        if last is None:
            self.metrics.time_to_first_token.observe(delivery.time_s - self.started_s)
        else:
            self.metrics.time_per_token.observe(delivery.time_s - last)
        self.last_s[delivery.index] = delivery.time_s
        self.metrics.completion_tokens += 1


@dataclass
class Pace:
    """How often an answer is looked at: all together at most `max_pieces_per_s` times a second.

    A piece costs the event loop about the same whatever it holds, and its time is the engine's: they share Python's
    lock. So with many answers under way several tokens of one go out together.
    """

    max_pieces_per_s: float
    answers: int = 0  # under way

    async def wait(self) -> None:
        """Let the tokens of an answer gather until it is its turn again."""
        seconds = self.answers / self.max_pieces_per_s
        if seconds >= MIN_PAUSE_S:
            await asyncio.sleep(seconds)


async def arrivals(deliveries: asyncio.Queue[Delivery]) -> list[Delivery]:
    """All that has come, at least one; none after KEEP_ALIVE_S in which nothing came."""
    try:
        async with asyncio.timeout(KEEP_ALIVE_S):
            arrived = [await deliveries.get()]
    except TimeoutError:
        return []
    while not deliveries.empty():
        arrived.append(deliveries.get_nowait())
    return arrived


async def collect(collector: Collector, pace: Pace) -> list[Choice]:
    """Wait for all of a job's sequences to end."""
    while collector.remaining:
        for delivery in await arrivals(collector.job.deliveries):
            collector.take(delivery)
        if collector.remaining:
            await pace.wait()
    return collector.choices


def data_line(value: dict[str, Any]) -> bytes:
    """One event of the stream."""
    return f"data: {encode_json(value)}\n\n".encode()


async def stream_events(collector: Collector, answer: Answer, pace: Pace, with_usage: bool) -> AsyncIterator[bytes]:
    """The server-sent events of a job; what came since the last piece goes out as one.

    An error after the beginning becomes an event {"error": ...} before the end, since the status is sent already.
    """
    yield answer.event_lines(answer.opening(len(collector.choices)), with_usage)
    while collector.remaining:
        arrived = await arrivals(collector.job.deliveries)
        taken: list[tuple[Choice, TokenEvent, int]] = []
        try:
            for delivery in arrived:
                choice, before = collector.take(delivery)
                taken.append((choice, delivery.event, before))
        except ApiError as error:
            yield answer.event_lines(answer.deltas(taken), with_usage) + data_line(error.body()) + DONE
            return
        yield answer.event_lines(answer.deltas(taken), with_usage) if arrived else b": still waiting\n\n"
        if collector.remaining:
            await pace.wait()
    yield (data_line(answer.usage_chunk(collector.choices)) if with_usage else b"") + DONE


class EventStream(StreamingResponse):
    """Streams a job's events and calls `finish` however that ends."""

    def __init__(self, pieces: AsyncIterator[bytes], send_timeout_s: float, finish: Callable[[], None]):
        # Proxies such as nginx would hold a stream back until they have a buffer full of it.
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(pieces, media_type="text/event-stream", headers=headers)
        self.send_timeout_s, self.finish = send_timeout_s, finish

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(self.stream_in_time(send), receive)
        except ClientGone:
            LOG.info("a client left its stream")
        finally:
            self.finish()

    async def stream_in_time(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self.body_iterator:
            if piece:
                await self.send_in_time(send, {"type": "http.response.body", "body": piece, "more_body": True})
        await self.send_in_time(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def send_in_time(self, send: Send, message: dict[str, Any]) -> None:
        """Send, or treat a client that takes nothing for `send_timeout_s` as gone."""
        try:
            async with asyncio.timeout(self.send_timeout_s):
                await send(message)
        except (TimeoutError, OSError) as error:
            raise ClientGone from error


def finish_job(worker: EngineWorker, job: Job, metrics: ServeMetrics) -> None:
    """Take what is left of a job out of the engine; nothing, if it ran to its end."""
    if job.open and not job.cancelled:
        metrics.cancelled += job.open
        worker.cancel(job)
