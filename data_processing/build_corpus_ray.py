"""engine=ray: blocks as Ray tasks, near-duplicate band keys shuffled by Ray Data; the same documents as engine=local.

Uses the cluster that RAY_ADDRESS names (ray.init's own rule), else starts a local one with `workers` processes; install
it with pip install -e '.[ray]'. All nodes must see the output directory: the near-duplicate stage reads blocks there.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from configs.errors import missing_extra
from data_processing.build_corpus_engine import AHEAD, in_order

ROWS_A_BLOCK = 200_000  # (key, index) rows of a Ray Data block


def import_ray():
    """ray with ray.data, or the UserError that names the install command."""
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise missing_extra("ray", "ray") from error
    return ray


def _members(group: dict[str, np.ndarray]) -> dict[str, list]:
    """One row with a bucket's document indices; no row for a bucket of one."""
    index = np.sort(group["index"])
    return {"members": [index] if index.size > 1 else []}


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
        parts = range(0, flat.size, ROWS_A_BLOCK)
        blocks = [{"key": flat[i : i + ROWS_A_BLOCK], "index": index[i : i + ROWS_A_BLOCK]} for i in parts]
        import pyarrow

        rows = self.ray.data.from_arrow([pyarrow.table(block) for block in blocks])
        grouped = rows.groupby("key").map_groups(_members, batch_format="numpy")
        for row in grouped.iter_rows():
            yield np.asarray(row["members"], dtype=np.int64)


@contextmanager
def open_ray(workers: int) -> Iterator[RayEngine]:
    """A connected engine; a cluster that was started here is stopped at the end."""
    ray = import_ray()
    started = not ray.is_initialized()
    if started:
        ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        yield RayEngine(ray, workers)
    finally:
        if started:
            ray.shutdown()
