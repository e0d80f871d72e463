"""A step's memory as the report shows it: a timeline by category, the blocks that matter, and the peak.

The full trace has an entry an operation; the timeline keeps the lowest and the highest point of each stretch of it, so
the peak stays exact.
"""

import heapq
from typing import Any

from llm.training_profile_memory import CATEGORIES, Block, MemoryTrace

STRETCHES = 300  # of the timeline, two points each
SHOWN_AT_A_POINT = 5  # largest blocks
SHOWN_IN_TABLE = 20


def memory_summary(trace: MemoryTrace) -> dict[str, Any]:
    """memory.json: times in ms since the step's start, sizes in bytes, blocks by their place in "blocks"."""
    by_category = trace.totals()
    totals = [sum(values) for values in zip(*by_category.values(), strict=True)]
    peak = max(range(len(totals)), key=totals.__getitem__)
    points = choose_points(totals)
    table = heapq.nlargest(SHOWN_IN_TABLE, trace.blocks, key=size_of)
    at_points = largest_at(trace.blocks, points)
    shown = unique([*table, *(block for blocks in at_points for block in blocks)])
    places = {id(block): place for place, block in enumerate(shown)}
    return {
        "source": trace.source,
        "measured": trace.measured,
        "changes": len(totals) - 1,
        "phases": [{"name": name, "start_ms": 1e3 * start, "end_ms": 1e3 * end} for name, start, end in trace.phases],
        "times_ms": [round(1e3 * trace.times_s[point], 4) for point in points],
        "categories": {name: [by_category[name][point] for point in points] for name in CATEGORIES},
        "largest": [[places[id(block)] for block in blocks] for blocks in at_points],
        "blocks": [describe(block, trace, peak) for block in shown],
        "table": list(range(len(table))),
        "peak": {
            "ms": 1e3 * trace.times_s[peak],
            "bytes": totals[peak],
            "categories": {name: by_category[name][peak] for name in CATEGORIES},
        },
    }


def size_of(block: Block) -> int:
    return block.nbytes


def choose_points(totals: list[int]) -> list[int]:
    """The first and last index, and those of the lowest and highest total of each stretch."""
    chosen = {0, len(totals) - 1}
    for stretch in range(STRETCHES):
        indices = range(stretch * len(totals) // STRETCHES, (stretch + 1) * len(totals) // STRETCHES)
        if indices:
            chosen |= {min(indices, key=totals.__getitem__), max(indices, key=totals.__getitem__)}
    return sorted(chosen)


def largest_at(blocks: list[Block], points: list[int]) -> list[list[Block]]:
    """The largest live blocks at each of some points, in their order."""
    born = sorted(blocks, key=lambda block: block.born)
    alive: list[Block] = []
    result, taken = [], 0
    for point in points:
        while taken < len(born) and born[taken].born <= point:
            alive.append(born[taken])
            taken += 1
        alive = [block for block in alive if block.died is None or block.died > point]
        result.append(heapq.nlargest(SHOWN_AT_A_POINT, alive, key=size_of))
    return result


def unique(blocks: list[Block]) -> list[Block]:
    """Each block once, in the order of its first place."""
    return list({id(block): block for block in blocks}.values())


def describe(block: Block, trace: MemoryTrace, peak: int) -> dict[str, Any]:
    """One block as a row; died_ms is null for one that outlives the step, phase and module for one from before it."""
    phase, module = block.where
    return {
        "bytes": block.nbytes,
        "category": block.category,
        "phase": phase,
        "module": module,
        "name": block.name,
        "born_ms": 1e3 * trace.times_s[block.born] if block.born else None,
        "died_ms": None if block.died is None else 1e3 * trace.times_s[block.died],
        "at_peak": block.born <= peak and (block.died is None or block.died > peak),
    }
