"""The engine's thread, and the door between it and the event loop.

The engine is single-threaded; its thread takes submissions and cancellations from a queue, steps while there is work
and sleeps when there is none. What a step gave goes to the event loop in one call, and from there to the queue of each
request (`Job`). Sequences are counted on the event loop from admission until the engine has let go of them, so the
bound on them holds whatever clients do.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from configs.errors import UserError
from llm.engine import Engine
from llm.engine_request import RequestParams, TokenEvent
from llm.serve_errors import ApiError

LOG = logging.getLogger("mew.serve")


@dataclass(slots=True)
class Delivery:
    """What a job's queue holds: an event of sequence `index`, or the error that ended it, and when it came."""

    index: int
    event: TokenEvent | None
    error: ApiError | None = None
    time_s: float = 0.0


@dataclass(eq=False)
class Job:
    """The sequences of one HTTP request."""

    sequences: list[tuple[list[int], RequestParams]]
    deliveries: asyncio.Queue[Delivery] = field(default_factory=asyncio.Queue)
    open: int = 0  # sequences that the engine still has
    cancelled: bool = False


class EngineWorker:
    """Runs an engine in a thread of its own. Everything but `_run` and what it calls belongs to the event loop."""

    def __init__(self, engine: Engine, max_sequences: int):
        self.engine = engine
        self.max_sequences = max_sequences
        self.in_flight = 0  # sequences admitted and not let go of
        self.stats = engine.stats()
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self._inbox: SimpleQueue[tuple[str, Job | None]] = SimpleQueue()
        self._ids: dict[int, tuple[Job, int]] = {}  # the engine's request -> whose it is (the thread's own)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin; called on the running event loop that the deliveries go to."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> None:
        """Cancel everything and wait for the thread to end."""
        self._inbox.put(("stop", None))
        self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        return self.failure is None and self._thread.is_alive()

    def room_for(self, count: int) -> bool:
        return self.in_flight + count <= self.max_sequences

    def submit(self, job: Job) -> None:
        """Hand a job over. The caller has asked `room_for` in the same turn of the event loop."""
        job.open = len(job.sequences)
        self.in_flight += job.open
        if self.alive:
            self._inbox.put(("submit", job))
        else:
            self._deliver([(job, Delivery(i, None, engine_failed())) for i in range(job.open)])

    def cancel(self, job: Job) -> None:
        """Ask the engine to drop what is left of a job; done when job.open is 0."""
        if job.open and not job.cancelled:
            job.cancelled = True
            self._inbox.put(("cancel", job))

    def _deliver(self, batch: list[tuple[Job, Delivery]]) -> None:
        for job, delivery in batch:
            if delivery.event is None or delivery.event.finish_reason is not None:
                job.open -= 1
                self.in_flight -= 1
            job.deliveries.put_nowait(delivery)

    def _after_failure(self) -> None:
        """Refuse what was put into the queue too late for the thread; from here on `submit` refuses by itself."""
        while not self._inbox.empty():
            kind, job = self._inbox.get_nowait()
            if kind == "submit":
                self._deliver([(job, Delivery(index, None, engine_failed())) for index in range(job.open)])
        self.on_failure()

    # From here on: the engine's thread.

    def _run(self) -> None:
        try:
            while self._take_messages(wait=not self.engine.has_work):
                if self.engine.has_work:
                    self._send(self._own(self.engine.step()))
                self.stats = self.engine.stats()
        except BaseException as error:
            # The engine's state is unknown now: nothing more is asked of it, and the server ends (on_failure).
            LOG.exception("the engine failed; the server stops")
            self.failure = error
            self._send([(job, Delivery(index, None, engine_failed())) for job, index in self._ids.values()])
            self._call_loop(self._after_failure)

    def _take_messages(self, wait: bool) -> bool:
        """Act on all messages in the queue, waiting for the first if there is nothing else to do; False: stop."""
        while True:
            try:
                kind, job = self._inbox.get(block=wait)
            except Empty:
                return True
            wait = False
            if kind == "stop":
                self._cancel(list(self._ids))
                return False
            if kind == "submit":
                self._submit(job)
            else:
                self._cancel([number for number, (owner, _) in self._ids.items() if owner is job])

    def _submit(self, job: Job) -> None:
        refused = []
        for index, (prompt_ids, params) in enumerate(job.sequences):
            try:
                self._ids[self.engine.submit(prompt_ids, params)] = (job, index)
            except UserError as error:
                refused.append((job, Delivery(index, None, ApiError(400, str(error)), time.perf_counter())))
        self._send(refused)

    def _cancel(self, numbers: list[int]) -> None:
        now = time.perf_counter()
        gone = []
        for number in numbers:
            self.engine.cancel(number)
            job, index = self._ids.pop(number)
            gone.append((job, Delivery(index, None, ApiError(499, "cancelled"), now)))
        self._send(gone)

    def _own(self, events: list[TokenEvent]) -> list[tuple[Job, Delivery]]:
        """Events with the job that each belongs to; those of cancelled sequences are dropped."""
        now = time.perf_counter()
        owned = []
        for event in events:
            if event.request_id in self._ids:
                job, index = self._ids[event.request_id]
                owned.append((job, Delivery(index, event, None, now)))
                if event.finish_reason is not None:
                    del self._ids[event.request_id]
        return owned

    def _send(self, batch: list[tuple[Job, Delivery]]) -> None:
        if batch:
            self._call_loop(self._deliver, batch)

    def _call_loop(self, call: Callable, *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            LOG.info("the event loop has ended; nobody is left to tell")


def engine_failed() -> ApiError:
    return ApiError(500, "the engine failed and the server stops; its log says why", "engine_failed")
