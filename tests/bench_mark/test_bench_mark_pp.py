"""bench_mark_pp's table from made-up clocks: a step that runs as on paper idles as the formula says."""

from dataclasses import replace

import pytest
import torch

from bench_mark.bench_mark_pp import row_of, send_seconds, show, stage_durations
from bench_mark.bench_mark_pp_contestants import Contestant, Tracer, medians
from llm.args import DataConfig, ModelConfig, ParallelConfig, TrainConfig
from llm.hardware import known_hardware
from llm.plan_time import cluster_of, datasheet_rates
from llm.plan_time_layouts import Machine
from parallel.pipeline_schedules import Operation, build_schedule
from parallel.pipeline_schedules_simulation import Durations, simulate


def config_of(schedule: str, chunks: int) -> TrainConfig:
    model = ModelConfig(vocab_size=64, d_model=32, num_layers=6, num_heads=2, d_ff=64)
    parallel = ParallelConfig(dp=1, pp=2, pp_schedule=schedule, pp_chunks=chunks)
    return TrainConfig(
        name="x", model=model, data=DataConfig(seq_len=16), parallel=parallel, dtype="bfloat16", micro_batch_size=1,
        global_batch_tokens=6 * 16,
    )  # fmt: skip


def clocks_of(simulation, late_s: float) -> dict:
    """What the ranks of such a step would have measured, if it had lasted `late_s` longer than on paper."""
    by_rank = []
    for row in simulation.rows():
        times: dict[str, list[float]] = {}
        for kind, stage, _, start, end in row:
            times.setdefault(f"{kind}{stage}", []).append(end - start)
        by_rank.append({"busy_s": sum(map(sum, times.values())), "host_s": 0.1, "operations_s": medians([times])})
    return {"step_s": simulation.total + late_s, "seconds": [], "loss": 1.0, "by_rank": by_rank}


@pytest.mark.parametrize(
    ("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble_h2", 1)]
)
def test_a_step_as_on_paper_idles_as_the_formula_says_and_a_late_one_longer(name, chunks):
    h200 = next(entry for entry in known_hardware() if entry.name == "h200")
    machine = Machine("cuda", datasheet_rates(h200, "bfloat16"), cluster_of(h200, 1, 2))
    each = [Durations(1.0 + 0.1 * stage, 2.0, 1.0) for stage in range(2 * chunks)]
    send_s = send_seconds(config_of(name, chunks), machine)
    assert send_s > machine.cluster.call_s
    each = [replace(durations, send=send_s) for durations in each]
    simulation = simulate(build_schedule(name, 2, 6, chunks), each)
    contestant = Contestant(name, name, chunks, None, Tracer(torch.device("cpu")), lambda *_: config_of(name, chunks))
    row = row_of(contestant, (1, 6), clocks_of(simulation, 0.0), machine, 2)
    assert row["idle"] == pytest.approx(row["formula_idle"], rel=1e-12) == pytest.approx(simulation.bubble, rel=1e-12)
    late = row_of(contestant, (1, 6), clocks_of(simulation, 1.0), machine, 2)
    assert late["idle_s"] == pytest.approx(row["idle_s"] + 1.0) and late["formula_idle"] == row["formula_idle"]
    assert row["predicted_step_s"] > 0 and row["bound"] == "cuda"
    assert f"{row['idle']:.3f}" in show(row, row["idle_s"]) and "1.00" in show(row, row["idle_s"])


def test_a_backward_pass_in_one_counts_as_its_input_part():
    ranks = [{"operations_s": {"F0": 1.0, "B0": 3.0}}, {"operations_s": {"F1": 2.0, "I1": 4.0, "W1": 5.0}}]
    assert stage_durations(ranks, 2) == [Durations(1.0, 3.0, 0.0), Durations(2.0, 4.0, 5.0)]


def test_the_tracer_keeps_each_operation_of_a_step_and_forgets_it_when_drained():
    tracer = Tracer(torch.device("cpu"))
    for index in range(3):
        with tracer(Operation("F", 1, index)):
            sum(range(1000))
    with tracer(Operation("W", 0, 0)):
        pass
    times = tracer.drain()
    assert {kind: len(seconds) for kind, seconds in times.items()} == {"F1": 3, "W0": 1}
    assert all(second > 0 for second in times["F1"]) and tracer.drain() == {} and tracer.issued > 0
