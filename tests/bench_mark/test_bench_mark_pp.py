"""bench_mark_pp's table from made-up clocks: a step that runs as on paper idles as the formula says."""

import time
from dataclasses import asdict

import pytest
import torch

from bench_mark.bench_mark_pp import row_of, send_seconds, show
from bench_mark.bench_mark_pp_contestants import Contestant
from bench_mark.bench_mark_pp_idle import by_formula, idle_of, on_paper
from bench_mark.bench_mark_pp_tracer import StepTimes, Tracer, message_seconds_measured, of_slowest_pair
from llm.args import DataConfig, ModelConfig, ParallelConfig, TrainConfig
from llm.hardware import known_hardware
from llm.plan_time import cluster_of, datasheet_rates
from llm.plan_time_layouts import Machine
from parallel.mesh_degrees import Degrees
from parallel.pipeline_schedules import Operation, build_schedule
from parallel.pipeline_schedules_simulation import Simulation, replay
from tests.parallel.pool import pool_of


def config_of(schedule: str, chunks: int) -> TrainConfig:
    model = ModelConfig(vocab_size=64, d_model=32, num_layers=6, num_heads=2, d_ff=64)
    parallel = ParallelConfig(dp=1, pp=2, pp_schedule=schedule, pp_chunks=chunks)
    return TrainConfig(
        name="x", model=model, data=DataConfig(seq_len=16), parallel=parallel, dtype="bfloat16", micro_batch_size=1,
        global_batch_tokens=6 * 16,
    )  # fmt: skip


KINDS = [("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble_h2", 1)]
SECONDS = {"F": 1.0, "B": 3.0, "I": 2.0, "W": 1.0}


def simulation_of(name: str, chunks: int, outside: list[tuple[float, float]], send_s: float) -> Simulation:
    """Six micro-batches over two ranks whose stages are not alike."""
    schedule = build_schedule(name, 2, 6, chunks)
    return replay(
        schedule, lambda op: SECONDS[op.kind] * (1 + 0.1 * op.stage), [send_s] * schedule.stages, outside
    )  # fmt: skip


def clocks_of(simulation: Simulation) -> list[StepTimes]:
    """What the ranks of such a step would have measured."""
    return [StepTimes(*around, row) for around, row in zip(simulation.outside, simulation.rows(), strict=True)]


def found_of(simulation: Simulation, late_s: float, message_s: float) -> dict:
    """The same as bench_mark_pp has it, if the step had lasted `late_s` longer than on paper."""
    by_rank = [{"host_s": 0.1, "steps": [asdict(step)]} for step in clocks_of(simulation)]
    total = simulation.total + late_s
    return {"step_s": total, "seconds": [total], "loss": 1.0, "by_rank": by_rank, "message_s": message_s}


@pytest.mark.parametrize(("name", "chunks"), KINDS)
def test_a_step_as_on_paper_idles_as_the_formula_says_and_a_late_one_longer(name, chunks):
    h200 = next(entry for entry in known_hardware() if entry.name == "h200")
    machine = Machine("cuda", datasheet_rates(h200, "bfloat16"), cluster_of(h200, 1, 2))
    send_s = send_seconds(config_of(name, chunks), machine)
    assert send_s > machine.cluster.call_s
    simulation = simulation_of(name, chunks, [(0.5, 0.25), (0.75, 0.125)], send_s)
    contestant = Contestant(name, name, chunks, None, Tracer(torch.device("cpu")), lambda *_: config_of(name, chunks))
    row = row_of(contestant, (1, 6), found_of(simulation, 0.0, send_s), machine, 2)
    said = [row["formula_idle"], row["paper_idle"]]
    assert said == pytest.approx([row["idle"]] * 2, rel=1e-12)
    assert row["idle"] == pytest.approx(simulation.bubble, rel=1e-12)
    late = row_of(contestant, (1, 6), found_of(simulation, 1.0, send_s), machine, 2)
    assert late["idle_s"] == pytest.approx(row["idle_s"] + 1.0) and late["formula_idle"] == row["formula_idle"]
    assert row["predicted_step_s"] > 0 and row["bound"] == "cuda"
    assert row["timeline_ms"][0][0] == f"F0.0 500.000 {1e3 * (0.5 + SECONDS['F']):.3f}"
    assert f"{row['idle']:.3f}" in show(row, row["idle_s"]) and "1.00" in show(row, row["idle_s"])
    assert f"{1e3 * 0.875:.2f}" in show(row, row["idle_s"])


@pytest.mark.parametrize(("name", "chunks"), KINDS)
def test_work_before_and_after_the_operations_is_not_idle_and_delays_the_step(name, chunks):
    schedule, alone = build_schedule(name, 2, 6, chunks), simulation_of(name, chunks, [(0.0, 0.0)] * 2, 0.25)
    around = simulation_of(name, chunks, [(0.5, 2.0), (0.5, 2.0)], 0.25)
    assert around.total == pytest.approx(alone.total + 2.5) and around.idle == pytest.approx(alone.idle)
    found = idle_of(schedule, [around.total], [clocks_of(around)], 0.25, 0.25)
    assert found["idle_s"] == pytest.approx(sum(alone.idle) / 2) and found["paper_step_s"] == around.total
    assert found["idle"] == pytest.approx(found["formula_idle"], rel=1e-12)


def test_the_formula_takes_means_and_the_table_on_paper_each_operation_as_it_was():
    schedule = build_schedule("1f1b", 2, 4)
    seconds = {op: 1.0 + (op.micro_batch == 1) * (op.stage + 1) for row in schedule.table for op in row}
    ranks = clocks_of(replay(schedule, seconds.__getitem__, [0.0] * 2))
    mean = {0: 1.25, 1: 1.5}
    same = replay(schedule, lambda op: mean[op.stage], [0.5] * 2)
    assert by_formula(schedule, ranks, 0.5).times == same.times
    assert on_paper(schedule, ranks, 0.25).times == replay(schedule, seconds.__getitem__, [0.25] * 2).times
    busy = [sum(end - start for *_, start, end in row) for row in same.rows()]
    assert [rank.work_s for rank in ranks] == pytest.approx(busy)


def test_the_tracer_parts_a_step_into_before_its_operations_each_of_them_and_after():
    tracer = Tracer(torch.device("cpu"))
    with tracer.step():
        time.sleep(0.02)
        with tracer(None):
            for index in range(3):
                with tracer(Operation("F", 1, index)):
                    time.sleep(0.005)
            time.sleep(0.01)
        time.sleep(0.03)
    whole_s = tracer.whole[1] - tracer.whole[0]
    times = tracer.drain()
    assert [op for *op, _, _ in times.operations] == [["F", 1, index] for index in range(3)]
    assert times.operations[0][3] >= times.before_s >= 0.02 and times.after_s >= 0.03
    assert times.means["F1"] >= 0.005 and times.work_s <= whole_s - 0.01
    assert tracer.spans == [] and tracer.issued > 0


def test_a_message_takes_what_the_rank_that_came_last_saw_of_it():
    # The first pair's ranks are late in turn; of the second pair every message takes 3.
    assert of_slowest_pair([[9.0, 2.0, 8.0], [1.0, 7.0, 2.0]]) == 2.0
    assert of_slowest_pair([[9.0, 2.0, 8.0], [1.0, 7.0, 2.0], [3.0] * 3, [4.0] * 3, [50.0] * 3]) == 3.0


def timed_message(mesh) -> float:
    return message_seconds_measured(torch.ones(1000), mesh)


@pytest.mark.dist
def test_ranks_time_a_message_together_an_odd_one_without_a_partner():
    seconds = pool_of(3).run(timed_message, degrees=Degrees(pp=3))
    assert seconds[0] > 0 and seconds == [seconds[0]] * 3
