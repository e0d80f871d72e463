"""Step time of layouts by sums on paper: stalls within layers, a ring's waits, a pipeline's bubble, and their axes."""

from dataclasses import replace

import pytest

from configs.loader import compose_config
from llm.args import DataConfig, ModelConfig, ParallelConfig, TrainConfig
from llm.cost_model_time import attention_times, predict_step_time
from llm.hardware_calibration import interpolate
from llm.plan_config import PlanConfig
from llm.plan_rank import rank_share
from llm.plan_shapes import meta_params, rank_messages
from llm.plan_time import datasheet_rates, message_seconds
from llm.plan_time_layouts import Machine, layout_time, rank_work
from parallel.cost_model import Cluster, Link
from parallel.cost_model_context import ring_backward_time, ring_forward_time

HARDWARE = compose_config(PlanConfig, "plan", ["hardware=h200"]).hardware
RATES = datasheet_rates(HARDWARE, "bfloat16")
NVLINK = Machine("cuda", RATES, Cluster(8, Link(3e11, 3e-6), None, 2e-5))
# Nothing takes time but products and attention: neither messages nor passes over memory.
AT_ONCE = ((1.0, 1e-12), (1e15, 1e-12))
PRODUCTS = replace(RATES, new_pass=AT_ONCE, inplace_pass=AT_ONCE, exp_pass=AT_ONCE, other_passes={})
FREE = Machine("cuda", PRODUCTS, Cluster(8, Link(1e30, 0.0), None, 0.0))
MODEL = ModelConfig(
    vocab_size=512, max_seq_len=4096, d_model=2048, num_layers=8, num_heads=16, num_kv_heads=16, d_ff=8192,
    attention="triton",
)  # fmt: skip
PARAMS = meta_params(MODEL)


def config_of(micro_batches: int = 1, rows: int = 4, **parallel) -> TrainConfig:
    return TrainConfig(
        name="time", model=MODEL, data=DataConfig(seq_len=4096), dtype="bfloat16", compile="block",
        micro_batch_size=rows, global_batch_tokens=4096 * rows * micro_batches,
        parallel=ParallelConfig(dp=1, **parallel),
    )  # fmt: skip


def seconds_of(config: TrainConfig, machine: Machine, ranks: int):
    return message_seconds(config.parallel.degrees().resolve(ranks), machine.cluster)


def test_tensor_parallelism_waits_for_every_crossing_and_hides_all_but_one_chunk():
    config = config_of(2, tp=2)
    time, send = layout_time(config, PARAMS, NVLINK, 2), seconds_of(config, NVLINK, 2)
    messages = [message for message in rank_messages(PARAMS, config, 2, 2) if message.phase != "host"]
    assert {message.axis for message in messages} == {"tp"}
    assert time.exposed_by_axis["tp"] == pytest.approx(sum(map(send, messages)))
    assert time.step.exposed_s == pytest.approx(time.exposed_by_axis["tp"])
    halves = layout_time(config_of(2, tp=2, tp_chunks=2), PARAMS, NVLINK, 2)
    assert 0.5 * time.step.exposed_s < halves.step.exposed_s < 0.75 * time.step.exposed_s


def attention_of(rates, head_dim):
    return next(sides for dim, *sides in rates.attention if dim == head_dim)


def test_each_rank_computes_its_part_of_the_products():
    whole = predict_step_time(rank_share(config_of(), PARAMS, "cuda", 1).work, RATES)
    for parallel in ({"tp": 2}, {"cp": 2}):
        part = predict_step_time(rank_share(config_of(**parallel), PARAMS, "cuda", 2).work, RATES)
        # Of heads; or of keys, whose shorter blocks run at the rate of their length.
        length = 4096 // parallel.get("cp", 1)
        slower = [interpolate(side, 4096) / interpolate(side, length) for side in attention_of(RATES, MODEL.head_dim)]
        forward, backward = attention_times(rank_share(config_of(), PARAMS, "cuda", 1).work, RATES)
        expected = (forward * slower[0] + backward * slower[1]) / 2
        assert part.attention_s == pytest.approx(expected)
        assert whole.matmul_s / 2 <= part.matmul_s < 0.7 * whole.matmul_s  # narrower products run slower
        assert part.elementwise_s < 0.75 * whole.elementwise_s
    stages = [predict_step_time(rank_share(config_of(pp=2), PARAMS, "cuda", 2, rank).work, RATES) for rank in (0, 1)]
    assert sum(stage.matmul_s for stage in stages) == pytest.approx(whole.matmul_s)
    assert stages[0].loss_s == 0 and stages[1].loss_s == whole.loss_s


def test_a_ring_waits_for_what_its_blocks_do_not_hide():
    config = config_of(cp=4)
    own = rank_work(config, PARAMS, NVLINK, config.parallel.degrees().resolve(4), 0)
    forward_s, backward_s = (seconds / 8 / 4 for seconds in attention_times(own.share.work, RATES))
    send = seconds_of(config, NVLINK, 4)
    keys, sums = (next(m for m in own.messages if m.axis == "cp" and m.dtype == d) for d in ("bfloat16", "float32"))
    expected = ring_forward_time(4, forward_s, send(keys)).exposed_s
    expected += ring_backward_time(4, backward_s, send(keys), send(sums)).exposed_s
    assert expected > 0 and own.stalls_s["cp"] == pytest.approx(8 * expected)
    slow = replace(NVLINK, cluster=Cluster(8, Link(1e9, 3e-6), None, 2e-5))
    assert rank_work(config, PARAMS, slow, config.parallel.degrees().resolve(4), 0).stalls_s["cp"] > 10 * expected


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)])
def test_a_pipeline_idles_by_the_formula_where_stages_are_alike(schedule, chunks):
    config = config_of(8, 1, pp=4, pp_schedule=schedule, pp_chunks=chunks)
    config.compile = "none" if schedule == "zero_bubble" else "block"
    time = layout_time(config, PARAMS, FREE, 4)
    simulation = time.simulation
    # Of rank 1, which has neither end; the vocabulary is so small that the last rank has hardly more to do.
    lasts = {op.kind: simulation.times[op][1] - simulation.times[op][0] for op in simulation.schedule.table[1]}
    middle = rank_work(config, PARAMS, FREE, config.parallel.degrees().resolve(4), 1)
    worked = sum(simulation.times[op][1] - simulation.times[op][0] for op in simulation.schedule.table[1])
    assert worked == pytest.approx(8 * middle.compute.micro_batch_s)
    split = schedule == "zero_bubble"
    formula = 3 * (lasts["F"] + (lasts["I"] - lasts["W"] if split else lasts["B"]))
    assert simulation.idle[0] == pytest.approx(formula, rel=0.1)
    assert time.idle_s == pytest.approx(sum(simulation.idle) / 4)
    assert time.exposed_by_axis["pp"] == simulation.idle[0]
    assert time.step_s == pytest.approx(simulation.total, rel=0.01)


def test_zero_bubble_idles_less_and_its_weight_gradients_cost_nothing_more():
    found = {}
    for schedule in ("1f1b", "zero_bubble"):
        config = config_of(8, 1, pp=4, pp_schedule=schedule)
        config.compile = "none"
        found[schedule] = layout_time(config, PARAMS, FREE, 4)
    # With W as long as F it would be a third; attention's backward is all in I, so that it is more.
    assert 0.33 < found["zero_bubble"].idle_s / found["1f1b"].idle_s < 0.7
    assert found["zero_bubble"].step.compute_s == pytest.approx(found["1f1b"].step.compute_s)


def test_data_ranks_of_a_pipeline_sum_after_backward():
    config = config_of(4, 1, pp=2)
    config = replace(
        config, parallel=replace(config.parallel, dp=2), global_batch_tokens=2 * config.global_batch_tokens
    )
    alone, time = layout_time(config_of(4, 1, pp=2), PARAMS, NVLINK, 2), layout_time(config, PARAMS, NVLINK, 4)
    send = seconds_of(config, NVLINK, 4)
    sums = [m for m in rank_messages(PARAMS, config, 4, 4) if m.axis == "dp_cp" and m.phase != "host"]
    assert time.exposed_by_axis["dp_cp"] == pytest.approx(sum(map(send, sums)))
    assert time.step_s > alone.step_s + 0.9 * time.exposed_by_axis["dp_cp"]


def of_two_by_two(zero: int, **parallel) -> TrainConfig:
    config = config_of(4, 1, pp=2, zero=zero, **parallel)
    config.parallel.dp, config.global_batch_tokens = 2, 2 * config.global_batch_tokens
    return config


def test_a_pipelines_gathers_hide_behind_its_passes_unless_the_link_is_slow():
    """On a quick link ZeRO-3 waits as ZeRO-2 does, for its ends; on a slow one a pass is as long as its messages."""
    slow = replace(NVLINK, cluster=Cluster(8, Link(1e9, 3e-6), None, 2e-5))
    quick = [layout_time(of_two_by_two(zero), PARAMS, NVLINK, 4) for zero in (2, 3)]
    assert quick[0].step_s == pytest.approx(quick[1].step_s, rel=0.01)
    config = of_two_by_two(3)
    time, send = layout_time(config, PARAMS, slow, 4), seconds_of(config, slow, 4)
    first = {"forward": 0.0, "backward": 0.0}  # micro-batches' messages of blocks on rank 0, of one of the four
    for m in rank_messages(PARAMS, config, 4, 4):
        if m.axis == "dp_shard_cp" and m.micro_batch == 2 and 1 <= m.stage <= 8:
            first[m.phase] += send(m)
    table = {str(op): times[1] - times[0] for op, times in time.simulation.times.items()}
    assert table["B2.0"] == pytest.approx(first["backward"], rel=0.01)
    # In the log of a step a forward pass after a backward one finds the first block; on paper none does.
    assert first["forward"] <= table["F2.0"] <= first["forward"] * 1.5
    assert time.step_s > 2 * layout_time(of_two_by_two(2), PARAMS, slow, 4).step_s


def test_a_pipeline_that_keeps_its_blocks_waits_for_its_ends_alone():
    config = of_two_by_two(2)
    time, send = layout_time(config, PARAMS, NVLINK, 4), seconds_of(config, NVLINK, 4)
    data = [m for m in rank_messages(PARAMS, config, 4, 4) if m.axis == "dp_shard_cp" and m.phase != "host"]
    root = sum(send(m) for m in data if m.stage == 0)  # of rank 0: the embedding
    one = sum(send(m) for m in data if m.stage == 1)  # its first block: gathered before all, reduced after all
    assert time.exposed_by_axis["dp_shard_cp"] == pytest.approx(root + one)
    split = of_two_by_two(2, pp_schedule="zero_bubble")
    split.compile = "none"
    time = layout_time(split, PARAMS, NVLINK, 4)  # the last W leaves all reductions
    gathers = sum(send(m) for m in data if m.op == "all_gather" and m.stage in (0, 1))
    assert time.exposed_by_axis["dp_shard_cp"] == pytest.approx(
        gathers + sum(send(m) for m in data if m.op != "all_gather")
    )
