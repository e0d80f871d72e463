"""Who runs the stages: this process, a pool of processes, or Ray; all call the same function and give results in order.

`engine.map(function, items)` hands out a bounded number of items ahead, so that memory does not grow with the corpus.
"""

import ctypes
import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from configs.errors import UserError
from data_processing.deduplicate_near import buckets

AHEAD = 1  # items beyond one a worker that are handed out
PR_SET_PDEATHSIG = 1


class Engine(Protocol):
    """Runs a picklable function over items, and groups the band keys of near-duplicates."""

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        """function(item) of each item, in the items' order."""

    def groups(self, keys: np.ndarray) -> Iterator[np.ndarray]:
        """Indices of rows that agree in a column of (N, bands) uint64 keys, for every key that occurs twice or more."""


def group_columns(keys: np.ndarray) -> Iterator[np.ndarray]:
    """Engine.groups in this process, a band at a time."""
    for band in range(keys.shape[1]):
        yield from buckets(np.ascontiguousarray(keys[:, band]))


class SerialEngine:
    """No other process."""

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        return map(function, items)

    def groups(self, keys: np.ndarray) -> Iterator[np.ndarray]:
        return group_columns(keys)


def in_order(
    submit: Callable[[Any], Any], result: Callable[[Any], Any], items: Iterable[Any], ahead: int
) -> Iterator[Any]:
    """Submit items, `ahead` at a time, and yield their results in order."""
    waiting: deque = deque()
    for item in items:
        waiting.append(submit(item))
        if len(waiting) >= ahead:
            yield result(waiting.popleft())
    while waiting:
        yield result(waiting.popleft())


def _die_with_parent() -> None:
    """In a worker: end when the parent is killed (Linux), and leave Ctrl-C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    except (AttributeError, OSError):
        return  # not Linux: a killed parent leaves workers that wait


def _nothing(item: int) -> int:
    return item


class PoolEngine:
    """Processes on this machine."""

    def __init__(self, pool: ProcessPoolExecutor, workers: int):
        self.pool, self.workers = pool, workers

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        try:
            submit = lambda item: self.pool.submit(function, item)  # noqa: E731
            yield from in_order(submit, lambda future: future.result(), items, self.workers + AHEAD)
        except BrokenProcessPool as error:
            raise UserError(
                f"a worker of {self.workers} died (out of memory?); the same command goes on, fewer workers= need less"
            ) from error

    def groups(self, keys: np.ndarray) -> Iterator[np.ndarray]:
        return group_columns(keys)


@contextmanager
def open_engine(name: str, workers: int) -> Iterator[Engine]:
    """The engine that the config names; call it before threads are started, since workers are forked."""
    if name == "ray":
        from data_processing.build_corpus_ray import open_ray

        with open_ray(workers) as engine:
            yield engine
        return
    if workers == 1:
        yield SerialEngine()
        return
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_die_with_parent) as pool:
        list(pool.map(_nothing, range(workers)))  # all workers exist before the progress bar's thread does
        yield PoolEngine(pool, workers)
