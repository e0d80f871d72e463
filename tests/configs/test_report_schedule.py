"""A pipeline's schedule in the report: one bar an operation, in its rank's row, and what is told of idle time."""

import re
from itertools import pairwise

from configs.report_schedule import MOST_BARS, schedule_section
from parallel.pipeline_schedules import build_schedule
from parallel.pipeline_schedules_simulation import simulate


def report_of(name: str, ranks: int, micro_batches: int, chunks: int = 1, **measured) -> dict:
    simulation = simulate(build_schedule(name, ranks, micro_batches, chunks))
    schedule = {"name": name, "ranks": ranks, "micro_batches": micro_batches, "seconds": simulation.total}
    predicted = {"schedule": schedule | {"rows": simulation.rows()}, "bubble": simulation.bubble}
    return {"predicted": predicted, "measured": measured}


def test_every_operation_is_a_bar_in_the_row_of_its_rank():
    page = schedule_section(report_of("zero_bubble", 2, 3, bubble=0.25))
    bars = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"', page)
    assert len(bars) == 2 * 3 * 3 and len({y for _, y, _ in bars}) == 2
    assert max(float(x) + float(width) for x, _, width in bars) <= 1040.1
    assert "backward of the weights, stage 1, micro-batch 2" in page and "rank 1" in page
    assert "zero_bubble, 2 ranks, 3 micro-batches" in page and "was seen to wait 25.0%" in page
    for _, row, _ in bars:  # bars of one rank do not overlap
        spans = sorted((float(x), float(x) + float(width)) for x, y, width in bars if y == row)
        assert all(a[1] <= b[0] + 0.11 for a, b in pairwise(spans))


def test_stages_of_one_rank_look_different_and_long_steps_are_cut():
    assert 'fill-opacity="0.6"' in schedule_section(report_of("interleaved", 2, 4, 2))
    long = schedule_section(report_of("1f1b", 4, 400))
    assert long.count("<rect") <= MOST_BARS and "was seen" not in long


def test_a_run_without_a_pipeline_has_no_drawing():
    assert schedule_section({}) == "" and schedule_section({"predicted": {"bubble": None}}) == ""
