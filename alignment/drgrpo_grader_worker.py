"""A pool of processes that grade what could hang, each killed and replaced when a request takes too long.

A process reads requests from a pipe and imports nothing of torch, so it starts in a second, is not forked from a
process that holds a GPU, and can be killed from any thread: no signal is used here. Text crosses the pipe as JSON data,
never as code.
"""

import contextlib
import json
import queue
import selectors
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

from configs.errors import check_positive, missing_extra

START_TIMEOUT_S = 60.0  # importing sympy and Math-Verify takes about a second, many on a busy machine
READY = b'"ready"'
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from alignment.drgrpo_grader_sympy import serve; serve()"
)


class Worker:
    """One process, started when first asked and again after it was killed. One thread uses it at a time.

    One that does not come up is not tried again: its questions stay without a verdict instead of waiting a minute each.
    """

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self.process: subprocess.Popen | None = None
        self.pending = b""
        self.is_broken = False

    def ask(self, given: str, truth: str) -> bool | str:
        """True, False, or why there is no verdict: "timeout", "no worker", "worker died", an error's name."""
        if self.is_broken or (self.process is None and not self.start()):
            return "no worker"
        try:
            self.process.stdin.write(json.dumps([given, truth]).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self.kill()
            return "worker died"
        reply = self.read_line(self.timeout_s)
        if reply is None:
            died = self.process.poll() is not None
            self.kill()
            return "worker died" if died else "timeout"
        return json.loads(reply)

    def start(self) -> bool:
        """Start the process and wait until it has imported what it needs; False when it does not come up."""
        command = [sys.executable, "-c", BOOT, json.dumps(sys.path)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        # A session of its own: Ctrl-C asks a run to finish its batch, whose grading must not lose its workers to it.
        self.process, self.pending = subprocess.Popen(command, start_new_session=True, **pipes), b""
        if self.read_line(START_TIMEOUT_S) != READY:
            self.kill()
            self.is_broken = True
        return not self.is_broken

    def read_line(self, timeout_s: float) -> bytes | None:
        """The next line of the process, or None after the timeout or at its end."""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self.pending:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                piece = self.process.stdout.read1(65_536)
                if not piece:
                    return None
                self.pending += piece
        line, _, self.pending = self.pending.partition(b"\n")
        return line

    def kill(self) -> None:
        """End the process at once; the next request starts another."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            with contextlib.suppress(BrokenPipeError):  # a request that it did not take is still in the buffer
                self.process.stdin.close()
            self.process.stdout.close()
            self.process = None


class WorkerPool:
    """`num_workers` workers; `ask_all` spreads questions over them. Safe to use from several threads.

    Raises UserError at once when Math-Verify is not installed, not when the first integral comes by.
    """

    def __init__(self, num_workers: int, timeout_s: float):
        check_positive(num_workers=num_workers, timeout_s=timeout_s)
        if find_spec("math_verify") is None:
            raise missing_extra("math-verify", "align")
        self.workers = [Worker(timeout_s) for _ in range(num_workers)]
        self.idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self.workers:
            self.idle.put(worker)
        self.lock = threading.Lock()
        self.threads: ThreadPoolExecutor | None = None

    def ask(self, given: str, truth: str) -> bool | str:
        worker = self.idle.get()
        try:
            return worker.ask(given, truth)
        finally:
            self.idle.put(worker)

    def ask_all(self, pairs: list[tuple[str, str]]) -> list[bool | str]:
        """A reply for each (given, truth), in order."""
        if len(pairs) < 2 or len(self.workers) == 1:
            return [self.ask(*pair) for pair in pairs]
        with self.lock:
            if self.threads is None:
                self.threads = ThreadPoolExecutor(len(self.workers), "grader")
        return list(self.threads.map(lambda pair: self.ask(*pair), pairs))

    def close(self) -> None:
        """End all processes. A question asked later starts them again."""
        if self.threads is not None:
            self.threads.shutdown()
            self.threads = None
        for worker in self.workers:
            worker.kill()
