"""engine=ray: blocks as Ray tasks, near-duplicate band keys shuffled by Ray Data; the same documents as engine=local.

Uses the cluster that RAY_ADDRESS names (ray.init's own rule), else starts a local one with `workers` processes; install
it with pip install -e '.[ray]'. All nodes must see the output directory: the near-duplicate stage reads blocks there.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from configs.errors import missing_extra
from data_processing.build_corpus_engine import AHEAD, in_order
from data_processing.deduplicate_near import buckets

ROWS_A_BLOCK = 200_000  # (key, index) rows of a Ray Data block
PARTITIONS_A_WORKER = 2


def import_ray():
    """ray with ray.data, or the UserError that names the install command."""
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise missing_extra("ray", "ray") from error
    return ray


def _members(partition: dict[str, np.ndarray]) -> dict[str, list]:
    """A row for every key that occurs twice or more in a partition, with the indices of its documents."""
    index = partition["index"]
    order = np.argsort(index, kind="stable")
    return {"members": [index[order][group] for group in buckets(partition["key"][order])]}


class RayEngine:
    """Runs functions as Ray tasks."""

    def __init__(self, ray, workers: int):
        self.ray, self.workers = ray, workers

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        remote = self.ray.remote(lambda item: function(item))
        yield from in_order(remote.remote, self._get, items, self.workers + AHEAD)

    def _get(self, reference) -> Any:
        """A task's result, or the very exception that it raised."""
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from error

    def groups(self, keys: np.ndarray) -> Iterator[np.ndarray]:
        count, bands = keys.shape
        # The band is part of band_keys' hash, so that all bands can be grouped in one shuffle.
        flat, index = keys.ravel().view(np.int64), np.repeat(np.arange(count, dtype=np.int64), bands)
        if not flat.size:
            return
        import pyarrow

        partitions = PARTITIONS_A_WORKER * self.workers
        columns = {"key": flat, "index": index, "partition": (keys.ravel() % np.uint64(partitions)).astype(np.int64)}
        parts = [
            pyarrow.table({name: column[start : start + ROWS_A_BLOCK] for name, column in columns.items()})
            for start in range(0, flat.size, ROWS_A_BLOCK)
        ]
        # Equal keys meet in one partition; within it NumPy groups them, since a Ray group a key costs a millisecond.
        shuffled = self.ray.data.from_arrow(parts).groupby("partition", num_partitions=partitions)
        for row in shuffled.map_groups(_members, batch_format="numpy").iter_rows():
            yield np.asarray(row["members"], dtype=np.int64)


@contextmanager
def open_ray(workers: int) -> Iterator[RayEngine]:
    """A connected engine; a cluster that was started here is stopped at the end."""
    ray = import_ray()
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    started = not ray.is_initialized()
    if started:
        ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        yield RayEngine(ray, workers)
    finally:
        if started:
            ray.shutdown()
