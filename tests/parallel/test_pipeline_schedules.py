"""Schedules on paper: complete, free of deadlock, as idle as the formulas say; programs that always end."""

from dataclasses import replace

import pytest

from configs.errors import UserError
from parallel.pipeline_schedules import FORWARD, Operation, Schedule, build_schedule
from parallel.pipeline_schedules_figure import as_text, draw, summary
from parallel.pipeline_schedules_program import Exchange, Message, message_of, program_of
from parallel.pipeline_schedules_simulation import Durations, ScheduleError, bubble_time, replay, simulate, waits_for

KINDS = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero_bubble", 1), ("zero_bubble_h2", 1)]
UNEVEN = Durations(forward=1.0, input_gradient=1.25, weight_gradient=0.75)


@pytest.mark.parametrize(("name", "chunks"), KINDS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_idle_time_equals_the_closed_formula(name, chunks, ranks):
    for micro_batches in (ranks, 2 * ranks, 5 * ranks):
        if name == "zero_bubble_h2" and micro_batches < 2 * ranks - 1:
            continue
        simulation = simulate(build_schedule(name, ranks, micro_batches, chunks), UNEVEN)
        # ZB-H1's first rank is never kept waiting; its last ones fill their time with weight gradients.
        assert simulation.idle[0] == pytest.approx(bubble_time(name, ranks, UNEVEN), rel=1e-12)
        if name != "zero_bubble":
            assert simulation.idle == pytest.approx([simulation.idle[0]] * ranks, rel=1e-12)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zero_bubble_idles_at_most_half_as_long_as_1f1b_and_holds_no_more(ranks):
    for micro_batches in (ranks, 3 * ranks, 3 * ranks + 1):
        ours = simulate(build_schedule("zero_bubble", ranks, micro_batches))
        other = simulate(build_schedule("1f1b", ranks, micro_batches))
        assert max(ours.idle) <= 0.5 * min(other.idle)
        assert max(ours.peak) <= max(other.peak) == ranks


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("slow_input", [1.0, 2.0, 2.4])
def test_zero_bubble_h2_idles_for_no_more_than_its_first_input_takes_where_h1_waits_for_gradients(ranks, slow_input):
    durations = Durations(1.2, slow_input, 1.0)
    schedule = build_schedule("zero_bubble_h2", ranks, 4 * ranks)
    ours, h1 = simulate(schedule, durations), simulate(build_schedule("zero_bubble", ranks, 4 * ranks), durations)
    expected = [bubble_time("zero_bubble_h2", ranks, durations)] * ranks
    assert ours.idle == pytest.approx(expected, rel=1e-12)
    assert max(ours.idle) <= min(h1.idle) + 1e-9 and ours.peak == [2 * ranks - 1] * ranks


def test_work_outside_the_operations_delays_them_and_is_not_idle():
    schedule, seconds = build_schedule("1f1b", 2, 2), {"F": 1.0, "B": 2.0}
    alone = replay(schedule, lambda op: seconds[op.kind], [0.0, 0.0])
    assert alone.times == simulate(schedule).times and alone.idle == [3.0, 3.0]
    # All is later by what the first rank does before; the second one does its part while it would have waited.
    before = replay(schedule, lambda op: seconds[op.kind], [0.0, 0.0], [(0.5, 0.0), (0.75, 0.0)])
    assert before.times == {op: (start + 0.5, end + 0.5) for op, (start, end) in alone.times.items()}
    assert before.total == 9.5 and before.idle == [3.0, 2.75]
    # The second rank is done 2.0 before the first one: what it does then ends first, until it is longer than that.
    for after, total in ((1.5, 9.0), (2.5, 9.5)):
        late = replay(schedule, lambda op: seconds[op.kind], [0.0, 0.0], [(0.0, 0.0), (0.0, after)])
        assert late.total == total and late.idle == [total - 6.0, total - 6.0 - after]
    assert late.bubble == sum(late.idle) / 19.0


def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank():
    # Stages half as long: the same model on as many ranks.
    half = Durations(0.5, 0.5, 0.5)
    plain, interleaved = (
        simulate(build_schedule("1f1b", 4, 8)),
        simulate(build_schedule("interleaved", 4, 8, 2), half),
    )
    assert interleaved.idle[0] == pytest.approx(plain.idle[0] / 2)


@pytest.mark.parametrize(("name", "expected"), [("gpipe", [9, 9, 9, 9]), ("1f1b", [4, 3, 2, 1])])
def test_held_activations_are_all_micro_batches_or_as_many_as_ranks_follow(name, expected):
    assert simulate(build_schedule(name, 4, 9)).peak == expected


@pytest.mark.parametrize(("name", "chunks"), KINDS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("micro_batches", range(1, 10))
def test_programs_end_even_when_a_send_lasts_until_it_is_received(name, chunks, ranks, micro_batches):
    """Every rank runs its program step by step, and an exchange ends only when all its peers stand at theirs."""
    schedule = build_schedule(name, ranks, micro_batches, chunks)
    programs = [list(program_of(schedule, rank)) for rank in range(ranks)]
    done: set[Operation] = set()
    delivered: set[Message] = set()
    posted: set[tuple[int, Message]] = set()
    while any(programs):
        moved = False
        for rank, program in enumerate(programs):
            if not program:
                continue
            step = program[0]
            if isinstance(step, Exchange):
                own = {(rank, message) for message in (*step.sends, *step.receives)}
                moved |= not own <= posted
                posted |= own
                peers = [(m.target % ranks, m) for m in step.sends] + [(m.source % ranks, m) for m in step.receives]
                if all(peer in posted for peer in peers):
                    delivered |= set(step.sends) | set(step.receives)
                    program.pop(0)
                    moved = True
                continue
            for other in waits_for(step, schedule.stages):
                message = message_of(other, schedule.stages)
                assert other in done, f"{step} runs before {other}"
                assert other.stage == step.stage or message in delivered, f"{step} runs before {message} is there"
            done.add(step)
            program.pop(0)
            moved = True
        assert moved, f"all ranks wait: {[program[0] for program in programs if program]}"
    assert done == {op for row in schedule.table for op in row}


def test_a_deadlock_is_found_and_names_who_waits():
    schedule = build_schedule("1f1b", 2, 2)
    row = list(schedule.table[0])
    row[1], row[2] = row[2], row[1]  # F0 F1 B0 -> F0 B0 F1 is still fine
    assert simulate(replace(schedule, table=(tuple(row), schedule.table[1]))).total > 0
    last = schedule.table[1]  # F0 B0 F1 B1 -> B0 needs its own F0
    stuck = replace(schedule, table=(schedule.table[0], (last[1], last[0], *last[2:])))
    with pytest.raises(ScheduleError, match=r"deadlocks: rank 0 at B0.0 waits for B0.1; rank 1 at B0.1 waits for F0.1"):
        simulate(stuck)


def test_an_incomplete_table_is_refused():
    schedule = build_schedule("zero_bubble", 2, 3)
    with pytest.raises(ScheduleError, match=r"rank 1 .*W2.1 missing"):
        simulate(replace(schedule, table=(schedule.table[0], schedule.table[1][:-1])))
    with pytest.raises(ScheduleError, match=r"rank 0 runs F0.0 twice"):
        simulate(replace(schedule, table=((schedule.table[0][0], *schedule.table[0]), schedule.table[1])))
    with pytest.raises(ScheduleError, match=r"not its own"):
        simulate(Schedule("mine", 2, 1, 1, ((Operation(FORWARD, 1, 0),), ())))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("dualpipe", 2, 4, 1), "parallel.pp_schedule"),
        (("1f1b", 2, 4, 2), "pp_chunks=2 does not fit"),
        (("interleaved", 2, 4, 1), "pp_chunks=1 does not fit"),
        (("gpipe", 2, 0, 1), "micro_batches=0"),
    ],
)
def test_bad_schedules_are_refused_with_the_value(arguments, message):
    with pytest.raises(UserError, match=message):
        build_schedule(*arguments)


def test_a_schedule_is_printed_a_line_a_rank_and_drawn(tmp_path):
    simulation = simulate(build_schedule("1f1b", 2, 2))
    assert as_text(simulation).splitlines() == [
        "rank 0  F0 F1 .. .. B0 ++ .. B1 ++",
        "rank 1  .. F0 B0 ++ F1 B1 ++ .. ..",
    ]
    assert summary(simulation) == "1f1b: 2 ranks, 2 micro-batches, bubble 33.3%, most held on a rank 2"
    draw([simulation], str(tmp_path / "schedule.png"))
    assert (tmp_path / "schedule.png").stat().st_size > 5000
