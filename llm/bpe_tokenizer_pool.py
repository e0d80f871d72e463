"""Worker processes for text: an ordered map with a bounded number of batches under way.

Workers come from a fork server (spawned where there is none), never from a fork of the caller: the caller may have
used OpenMP or CUDA, whose threads do not survive a fork.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

BATCHES_PER_WORKER = 3  # under way at a time: one worked on, two waiting
_worker: Callable | None = None


def ordered_map(worker: Callable, batches: Iterable[Any], num_processes: int) -> Iterator[Any]:
    """worker(batch) for each batch, in order; with one process in this one. `worker` must be picklable.

    `worker` is sent once to each process. An exception of a worker is raised here.
    """
    if num_processes == 1:
        yield from map(worker, batches)
        return
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    pool = ProcessPoolExecutor(num_processes, context, initializer=_set_worker, initargs=(worker,))
    try:
        waiting: deque = deque()
        for batch in batches:
            waiting.append(pool.submit(_call_worker, batch))
            if len(waiting) >= BATCHES_PER_WORKER * num_processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)  # after an error or Ctrl-C nobody waits for what has not begun


def _set_worker(worker: Callable) -> None:
    global _worker
    _worker = worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Wait for the caller's end: a worker would outlive a killed caller, waiting for its next batch for ever."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _call_worker(batch: Any) -> Any:
    return _worker(batch)


def group_texts(texts: Iterable[str], chars: int = 1 << 20) -> Iterator[list[str]]:
    """Texts in lists of about `chars` characters."""
    group, size = [], 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= chars:
            yield group
            group, size = [], 0
    if group:
        yield group
