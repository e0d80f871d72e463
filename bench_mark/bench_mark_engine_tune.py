"""Leaves the quickest configuration of a step's kernels in force in an engine, and prints the ones that it timed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from llm.engine import Engine


def timed_each(engine: Engine, set_config: Callable[[Any], None], configs: list[Any], run: Callable[[], float]) -> list:
    """(seconds, config) of each; graphs are recorded anew."""
    found = []
    for config in configs:
        set_config(config)
        engine.runner.graphs.captured.clear()
        found.append((run(), config))
        print(f"  {1e3 * found[-1][0]:.1f} ms: {config}", flush=True)
    return found


def tune_single(engine: Engine, device: torch.device, run: Callable[[], float]) -> None:
    """The matrix-vector kernels of one request."""
    from kernel.matvec import matvec_candidates

    set_config = lambda config: setattr(engine.runner.single, "config", config)  # noqa: E731
    set_config(min(timed_each(engine, set_config, matvec_candidates(device), run), key=lambda pair: pair[0])[1])
    engine.runner.graphs.captured.clear()


def tune_few(engine: Engine, run: Callable[[], float]) -> Any:
    """The kernels of a few rows: the quickest products with the quickest attention, if they are quickest together."""
    from kernel.few_rows import few_rows_candidates

    def set_config(config: Any) -> None:
        engine.runner.few.config, engine.runner.few.sums = config, None

    def quickest(pairs: list) -> Any:
        return min(pairs, key=lambda pair: pair[0])[1]

    default = engine.runner.few.config
    products, attention = few_rows_candidates(default)
    first = timed_each(engine, set_config, [default], run)
    by_products = first + timed_each(engine, set_config, products, run)
    by_attention = first + timed_each(engine, set_config, attention, run)
    best = quickest(by_attention)
    places = {name: getattr(best, name) for name in ("block_s", "attend_warps", "attend_registers")}
    together = replace(quickest(by_products), **places)
    found = by_products + by_attention[1:]
    if together not in [config for _, config in found]:
        found += timed_each(engine, set_config, [together], run)
    set_config(quickest(found))
    engine.runner.graphs.captured.clear()
    return engine.runner.few.config
