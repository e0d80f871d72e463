"""Says which collective hangs and which ranks are missing from it, instead of silence.

A thread on every rank looks at the calls in flight. When one is older than the timeout, the rank asks all others
through the rendezvous store where they are: each thread answers for its rank, also while that rank computes, sleeps or
waits elsewhere; a rank that does not answer is dead or cut off. The watchdog only reports; the backend, whose own
timeout is a little longer, then ends the wait with an error, which carries the same report (CollectiveError).
"""

import json
import sys
import threading
import time
from typing import Any

from torch import distributed as dist

from parallel.collectives_log import Call, CommLog

POLL_S = 0.5  # how often a rank looks whether it is asked: one small message to the store
ANSWER_S = 4 * POLL_S  # how long a living rank may take to answer
ASKED = "mew_watchdog/asked"


class Watchdog:
    """The watching thread of one rank; `axes` gives the ranks along each axis that this rank lies on."""

    def __init__(self, log: CommLog, axes: dict[str, list[int]], rank: int, timeout_s: float):
        self.log, self.axes, self.rank, self.timeout_s = log, axes, rank, timeout_s
        self.store = own_connection(dist.distributed_c10d._get_default_store())
        self.answered = self.store.add(ASKED, 0)
        self.reported: Call | None = None
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.watch, name="collectives watchdog", daemon=True)
        log.explain = self.explain

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        self.log.explain = None
        self.stopping.set()
        self.thread.join(timeout=2 * POLL_S)

    def watch(self) -> None:
        while not self.stopping.wait(POLL_S):
            try:
                self.answer_if_asked()
                self.report_if_late()
            except RuntimeError as error:  # the store is gone, and with it whoever held it
                if not self.stopping.is_set():
                    say(f"rank {self.rank}: the rendezvous store is gone, so a hang would not be explained: {error}")
                return

    def answer_if_asked(self) -> None:
        asked = self.store.add(ASKED, 0)
        for number in range(self.answered + 1, asked + 1):  # several ranks may have asked since
            self.store.set(f"mew_watchdog/{number}/{self.rank}", json.dumps(self.whereabouts()))
        self.answered = max(self.answered, asked)

    def whereabouts(self) -> dict[str, Any]:
        """How many calls of each axis this rank has begun, and the oldest that it is in."""
        oldest = self.oldest()
        return {
            "numbers": dict(self.log.numbers),
            "in": None if oldest is None else {"op": oldest.op, "axis": oldest.axis, "number": oldest.number},
        }

    def oldest(self) -> Call | None:
        return next((call for call in list(self.log.in_flight) if not call.is_over), None)

    def report_if_late(self) -> None:
        call = self.oldest()
        if call is None or call is self.reported:
            return
        waited_s = time.perf_counter() - call.started_s
        if waited_s > self.timeout_s:
            self.reported = call
            say(f"rank {self.rank}: {call} has waited {waited_s:.0f} s; {self.explain(call)}")

    def explain(self, call: Call) -> str:
        """Which ranks of the call's axis are not in it, and where they are instead."""
        try:
            others = self.ask([rank for rank in self.axes[call.axis] if rank != self.rank])
        except RuntimeError as error:
            return f"nobody could be asked, the rendezvous store is gone ({error})"
        missing = [text for rank, state in sorted(others.items()) if (text := describe_rank(rank, state, call))]
        return "missing: " + "; ".join(missing) if missing else "every rank is in it, so the transfer itself hangs"

    def ask(self, ranks: list[int]) -> dict[int, dict[str, Any] | None]:
        """The whereabouts of other ranks, None for those that do not answer."""
        asked = self.store.add(ASKED, 1)
        keys = {rank: f"mew_watchdog/{asked}/{rank}" for rank in ranks}
        self.store.set(f"mew_watchdog/{asked}/{self.rank}", json.dumps(self.whereabouts()))
        deadline = time.perf_counter() + ANSWER_S
        found: dict[int, dict[str, Any] | None] = dict.fromkeys(ranks)
        while time.perf_counter() < deadline and None in found.values():
            for rank in ranks:
                if found[rank] is None and self.store.check([keys[rank]]):
                    found[rank] = json.loads(self.store.get(keys[rank]))
            self.answer_if_asked()  # two ranks may ask at once
            time.sleep(POLL_S / 10)
        return found


def own_connection(store: dist.Store) -> dist.Store:
    """A connection to the store that nobody else blocks; the common one where a store cannot give another."""
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):
        return store


def describe_rank(rank: int, state: dict[str, Any] | None, call: Call) -> str | None:
    """Where a rank is that is not in `call`; None for one that is in it, or past it."""
    if state is None:
        return f"rank {rank} (no answer: it is dead, or cut off)"
    number, inside = state["numbers"].get(call.axis, 0), state["in"]
    where = "outside of any" if inside is None else f"in {inside['op']} over {inside['axis']}, call {inside['number']}"
    if number < call.number:
        return f"rank {rank} (at call {number} of {call.axis}, {where})"
    if inside is not None and inside["axis"] == call.axis and inside["number"] == call.number:
        return None if inside["op"] == call.op else f"rank {rank} (in another operation: {inside['op']})"
    return None


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
