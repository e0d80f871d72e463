"""Plans against real ranks: every byte that gloo ranks and the dry run log, and the peak of their live tensors."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from configs.errors import UserError
from configs.loader import compose_config, start_script
from llm.args import DataConfig, ModelConfig, MoeConfig, ParallelConfig, TrainConfig
from llm.cost_model import predict_run
from llm.cost_model_counts import Workload, count_parameters
from llm.data_loader import Batch
from llm.hardware import Hardware
from llm.loss import CrossEntropyLoss
from llm.metrics_memory import PeakMemory, held_tensors
from llm.optimizer import OptimizerConfig
from llm.parallelize import make_forward_loss, parallelize
from llm.plan import main, plan
from llm.plan_config import PlanConfig
from llm.plan_dry_run import dry_run_traffic
from llm.plan_layouts import Planner, extrapolate
from llm.plan_links import known_links
from llm.plan_memory import rank_memory
from llm.plan_shapes import data_layout, meta_params, params_of, predicted_traffic
from llm.plan_time import cluster_of, copy_bytes_per_s, datasheet_rates, message_seconds
from llm.training_step import TrainingStep
from llm.transformer import Transformer
from llm.transformer_init import initialise
from parallel.cost_model import lost_seconds
from parallel.cost_model_traffic import Message, Traffic
from parallel.mesh_degrees import Degrees
from tests.parallel.pool import pool_of
from tests.tolerances import MEMORY_RATIO

VOCAB, T = 101, 16
SMALL = {"bucket_mb": 0.02, "first_bucket_mb": 0.002}
TINY = ModelConfig(vocab_size=VOCAB, max_seq_len=T, d_model=24, num_layers=3, num_heads=4, num_kv_heads=2, d_ff=40)
PUBLISHED = {"7b": 6_738_415_616, "13b": 13_015_864_320, "70b": 68_976_648_192}  # Llama 2's safetensors metadata


def train_config(optimizer: str = "adamw", **parallel) -> TrainConfig:
    rate = {"weight_decay": 0.0} if optimizer == "sgd" else {}
    return TrainConfig(
        name="plan", model=TINY, data=DataConfig(seq_len=T), max_steps=2, dtype="float32",
        optimizer=OptimizerConfig(name=optimizer, **rate), parallel=ParallelConfig(**SMALL | parallel),
    )  # fmt: skip


def batches(rows: int, count: int) -> list[Batch]:
    token_ids = torch.randint(0, VOCAB, (rows, T), generator=torch.Generator().manual_seed(0))
    return [Batch(token_ids, token_ids.roll(-1, 1), num_targets=token_ids.numel())] * count


def log_of_a_step(mesh, config, micro_batches):
    """What a rank logs in its second step, and what was predicted of it."""
    model = Transformer(config.model)
    initialise(model, 0)
    params = params_of(model, config.optimizer.name)
    parts = parallelize(model, config, mesh)
    step = TrainingStep(config, mesh, parts, make_forward_loss(model, CrossEntropyLoss(), "none"))
    step.run(0, batches(1, micro_batches))
    mesh.log.drain(0)
    step.run(1, batches(1, micro_batches))
    fields = ("op", "axis", "dtype", "ranks", "calls", "bytes")
    logged = [Traffic(*(line[field] for field in fields)) for line in mesh.log.drain(1)]
    return logged, predicted_traffic(params, config, mesh.world_size, micro_batches, mesh.rank)


CASES = [
    (2, 1, "adamw", {}),
    (2, 2, "adamw", {"zero": 1}),
    (4, 1, "muon", {"zero": 1}),
    (4, 2, "adamw", {"zero": 2, "reduce_dtype": "bfloat16"}),
    (4, 1, "muon", {"zero": 3}),
    (4, 2, "adamw", {"zero": 3, "dp_shard": 2}),
    (4, 2, "sgd", {"zero": 3, "reduce_each_micro_batch": False}),
    (8, 1, "adamw", {}),
    (8, 1, "adamw", {"zero": 1, "dp_shard": 4}),
    (8, 2, "adamw", {"zero": 3}),
]


@pytest.mark.dist
@pytest.mark.parametrize(("ranks", "micro_batches", "optimizer", "parallel"), CASES)
def test_every_byte_is_predicted(ranks, micro_batches, optimizer, parallel):
    config = train_config(optimizer, **parallel)
    degrees = config.parallel.degrees().resolve(ranks)
    for logged, predicted in pool_of(ranks).run(log_of_a_step, config, micro_batches, degrees=degrees):
        assert sorted(logged, key=str) == sorted(predicted, key=str)
        assert len(logged) == len(set(logged)) and logged


@pytest.mark.dist
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_dry_run_sends_what_real_ranks_send(zero):
    config = train_config("muon", zero=zero)
    degrees = config.parallel.degrees().resolve(4)
    real = pool_of(4).run(log_of_a_step, config, 2, degrees=degrees)[0][0]
    dry = dry_run_traffic(TINY, config.optimizer, data_layout(config.parallel, degrees, 2), degrees, T)
    assert sorted(dry, key=str) == sorted(real, key=str)


@pytest.mark.parametrize("zero", [1, 3])
def test_the_dry_run_of_thousands_of_ranks_sends_what_is_predicted(zero):
    config = replace(train_config(zero=zero), model=replace(TINY, d_model=512, d_ff=1100), dtype="bfloat16")
    degrees = Degrees(dp_shard=1024).resolve(2048)
    config.parallel.dp_shard = 1024
    layout = data_layout(config.parallel, degrees, 1, config.dtype)
    dry = dry_run_traffic(config.model, config.optimizer, layout, degrees, T)
    assert sorted(dry, key=str) == sorted(predicted_traffic(meta_params(config.model), config, 2048, 1), key=str)
    assert {entry.ranks for entry in dry} == {2048, 1024, 2}


def test_the_dry_run_takes_experts_and_many_layouts():
    experts = replace(TINY, moe=MoeConfig(num_experts=4, experts_per_token=2, d_ff=24))
    for zero in (0, 1, 3):
        config = replace(train_config(zero=zero), model=experts)
        degrees = config.parallel.degrees().resolve(4)
        dry = dry_run_traffic(experts, config.optimizer, data_layout(config.parallel, degrees, 1), degrees, T)
        assert sorted(dry, key=str) == sorted(predicted_traffic(meta_params(experts), config, 4, 1), key=str)


def peak_of_a_step(mesh, config, rows, micro_batches):
    """Live tensor bytes of a rank at most, in its second step."""
    model = Transformer(config.model)
    initialise(model, 0)
    parts = parallelize(model, config, mesh)
    step = TrainingStep(config, mesh, parts, make_forward_loss(model, CrossEntropyLoss(), "none"))
    given = batches(rows, micro_batches)
    step.run(0, given)
    with PeakMemory(torch.device("cpu"), held_tensors(model, parts.optimizer)) as memory:
        step.run(1, given)
    return memory.peak_bytes


MEMORY_CASES = [
    (zero, micro_batches, tie, rows)
    for zero in (0, 1, 2, 3)
    for micro_batches, tie, rows in ((1, False, 32), (2, True, 2), (2, False, 20))
]
CHECKPOINTED = [(zero, kept) for zero in (0, 3) for kept in ("selective", "full")]


@pytest.mark.dist
@pytest.mark.parametrize(("zero", "micro_batches", "tie", "rows"), MEMORY_CASES)
def test_peak_memory_matches_live_tensors(zero, micro_batches, tie, rows):
    model = replace(TINY, vocab_size=1024, d_model=96, d_ff=256, num_layers=4, tie_embeddings=tie)
    check_memory(replace(train_config(zero=zero, bucket_mb=0.2), model=model), 4, rows, micro_batches)


@pytest.mark.dist
@pytest.mark.parametrize(("zero", "kept"), CHECKPOINTED)
def test_peak_memory_with_checkpointing_matches_live_tensors(zero, kept):
    model = replace(TINY, vocab_size=256, d_model=96, d_ff=256, num_layers=6)
    config = train_config(zero=zero, bucket_mb=0.2, activation_checkpointing=kept)
    found = check_memory(replace(config, model=model), 2, 32, 1)
    none = replace(train_config(zero=zero, bucket_mb=0.2), model=model)
    assert found.peak_bytes < 0.8 * predict_rank(none, 2, 32, 1).peak_bytes


def predict_rank(config, ranks, rows, micro_batches):
    degrees = config.parallel.degrees().resolve(ranks)
    work = Workload(config.model, rows, T, "adamw", micro_batches, "cpu", "float32", "none", False, ranks)
    layout = data_layout(config.parallel, degrees, micro_batches)
    return rank_memory(work, meta_params(config.model), layout, config.parallel.activation_checkpointing)


def check_memory(config, ranks, rows, micro_batches):
    degrees = config.parallel.degrees().resolve(ranks)
    measured = pool_of(ranks).run(peak_of_a_step, config, rows, micro_batches, degrees=degrees)
    predicted = predict_rank(config, ranks, rows, micro_batches)
    assert max(measured) == pytest.approx(predicted.peak_bytes, rel=MEMORY_RATIO), predicted
    return predicted


def plan_config(*overrides: str) -> PlanConfig:
    """Data-parallel layouts alone; tests/llm/test_plan_layouts.py has the others."""
    return compose_config(PlanConfig, "plan", ["dry_run=false", "tp=[1]", "pp=[1]", "cp=[1]", *overrides])


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_sizes_that_users_expect_count_as_published(name):
    assert count_parameters(plan_config(f"model={name}").model).total == PUBLISHED[name]


def test_layouts_are_ranked_by_time_and_refused_by_memory():
    planner = Planner(plan_config("nodes=64", "micro_batch_size=[1,2]"))
    rows = planner.rows()
    fitting = [row for row in rows if planner.fits(row)]
    assert [row.step_s for row in fitting] == sorted(row.step_s for row in fitting)
    assert rows[: len(fitting)] == fitting and len({row.choice for row in rows}) == len(rows) == 2 * 2 * 7
    # 7B parameters in float32 with gradients and AdamW are 108 GB, which no H100 holds.
    assert all(row.choice.zero > 0 for row in fitting) and any(row.choice.zero == 0 for row in rows)
    tighter = Planner(plan_config("nodes=64", "micro_batch_size=[1,2]", "memory_share=0.2"))
    kept = [row for row in tighter.rows() if tighter.fits(row)]
    assert 0 < len(kept) < len(fitting) and all(row.memory.peak_bytes <= 16e9 for row in kept)
    by_choice = {row.choice: row for row in rows}
    for choice, row in by_choice.items():
        full = by_choice[replace(choice, checkpointing="full")]
        if choice.checkpointing == "none":
            assert full.memory.peak_bytes <= row.memory.peak_bytes and full.step_s > row.step_s
        if choice.zero == 3:
            two = by_choice[replace(choice, zero=2)]
            assert row.memory.peak_bytes < two.memory.peak_bytes
            assert row.axis_bytes["dp_shard_cp"] > two.axis_bytes["dp_shard_cp"]


def test_many_micro_batches_follow_from_few():
    config = plan_config("model=1b", "zero=[3]", "micro_batch_size=[1]", "checkpointing=[none]", "dp_shard=[0]")
    planner = Planner(config)
    ((choice, _, count),) = planner.choices()
    assert count == 4_194_304 // (8 * 4096)

    def sent(micro_batches):
        messages = planner.messages(choice, micro_batches)
        return {"bytes": sum(message.nbytes for message in messages)}

    assert extrapolate(sent, 9) == sent(9)


def test_messages_between_nodes_are_slower():
    config = plan_config("nodes=4")
    inside = message_seconds(Degrees(32, 8).resolve(32), cluster_of(config.hardware, 4, 8))
    across = message_seconds(Degrees(32, 32).resolve(32), cluster_of(config.hardware, 4, 8))
    shard = Message("all_gather", "dp_shard_cp", "bfloat16", 8, 1 << 30, "forward")
    assert across(shard) > inside(shard)
    # A copy of each shard on every node: two neighbours of the axis are eight ranks apart, one port each.
    copies = Message("all_reduce_sum", "dp_replicate", "float32", 4, 1 << 30, "backward")
    assert inside(copies) == pytest.approx(1.5 * (1 << 30) / 4.5e10, rel=0.01)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["hardware=h300"], "there is no configs/hardware/h300.yaml; did you mean h200.*choices are.*h100"),
        (["hardware=cpu"], "hardware=cpu has no bf16_flops.*use a GPU of configs/hardware"),
        (["hardware=rtx4090", "nodes=2"], "nodes=2 of hardware=rtx4090 need a network; give hardware.network_bytes"),
        (["zero=[4]"], "zero=4 must be 0, 1, 2 or 3"),
        (["zero=[]"], "zero=\\[\\] leaves nothing to plan"),
        (["nodes=0"], "nodes=0 must be positive"),
        (["checkpointing=[some]"], "checkpointing='some' is unknown"),
        (["micro_batch_size=[0]"], "micro_batch_size=0 must be positive"),
    ],
)
def test_what_cannot_be_planned_is_one_line(overrides, message):
    with pytest.raises(UserError, match=message) as caught:
        Planner(plan_config(*overrides))
    assert "\n" not in str(caught.value)


def test_the_command_ends_with_one_line_and_code_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plan", "hardware=h300", "model=7b"])
    with pytest.raises(SystemExit) as exit_:
        start_script(main, PlanConfig, "plan")
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: hardware=h300: there is no configs/hardware/h300.yaml")


def test_what_is_left_out_is_said_with_the_reason(capsys):
    found = plan(plan_config("model=1b", "global_batch_tokens=4128768", "dp_shard=[3,0]", "micro_batch_size=[1,4]"))
    assert found["left_out"]["dp_shard=3"] == "must divide the 8 ranks"
    assert "is no multiple of 4 x 4096 x 8 = 131072; use 4194304" in found["left_out"]["micro_batch_size=4"]
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1]) == json.loads(json.dumps(found))
    assert "left out: dp_shard=3" in out
    found = plan(plan_config("model=70b", "micro_batch_size=[1]"))
    assert not any(layout["fits"] for layout in found["layouts"])
    assert "no layout fits" in capsys.readouterr().out


def test_a_plan_is_written_down_and_its_dry_run_agrees(tmp_path):
    overrides = ["model=gpt-124m", "model.vocab_size=50304", "model.max_seq_len=4096", "nodes=2", "zero=[0,3]"]
    overrides += ["tp=[1]", "pp=[1]", "cp=[1]", "dp_shard=[-1]", f"output={tmp_path}/plan"]
    config = compose_config(PlanConfig, "plan", overrides)
    found = plan(config)
    assert [run["equal"] for run in found["dry_runs"]] == [True, True]
    assert json.loads((tmp_path / "plan" / "plan.json").read_text()) == json.loads(json.dumps(found))
    page = (tmp_path / "plan" / "plan.html").read_text()
    assert page.count("<tr") == 1 + len(found["layouts"]) and "zero=3,dp=16,dp_shard=8" in page


def test_a_run_on_known_gpus_predicts_its_exposed_communication():
    config = replace(train_config(zero=3), model=replace(TINY, d_model=1024, d_ff=4096, num_layers=8, head_dim=64))
    config = replace(config, dtype="bfloat16", micro_batch_size=2048, global_batch_tokens=2048 * T * 8)
    rates = datasheet_rates(compose_config(PlanConfig, "plan", ["hardware=h200"]).hardware, "bfloat16")
    h200 = Hardware("h200", "cuda", "NVIDIA H200", 989e12, 494e12, 141e9, 4.8e12, "", rates)
    one = predict_run(replace(config, global_batch_tokens=2048 * T), h200, 1)
    sharded = predict_run(config, h200, 8)
    config_of_ddp = replace(config, parallel=ParallelConfig())
    copies = predict_run(config_of_ddp, h200, 8)
    sent = sum(t.bytes for t in predicted_traffic(meta_params(config.model), config_of_ddp, 8, 1) if t.axis == "dp_cp")
    packed_s = 2 * sent / copy_bytes_per_s(rates)  # gradients copied into what is sent
    lost_s = lost_seconds("all_reduce_sum", sent, 8, known_links(h200, 8))  # if all of it travels beside work
    worked_s = copies["step_s"] - copies["exposed_s"]
    assert copies["exposed_s"] > 0 and 1 - 1e-6 < worked_s / (one["step_s"] + packed_s) < 1 + lost_s / worked_s + 1e-6
    assert copies["tokens_per_s"] < 8 * one["tokens_per_s"] and copies["mfu"] < one["mfu"]
    # Under ZeRO-3 an eighth of the update is left to each, and an eighth of the states.
    assert sharded["step_s"] < copies["step_s"] and sharded["memory_peak_bytes"] < one["memory_peak_bytes"]
    assert "ms of communication exposed" in sharded["notes"]["step_s"]
    tensor = predict_run(replace(config, parallel=ParallelConfig(tp=2), global_batch_tokens=2048 * T), h200, 2)
    assert one["step_s"] / 2 < tensor["step_s"] < one["step_s"] and tensor["exposed_s"] > 0
    assert tensor["memory_peak_bytes"] < one["memory_peak_bytes"] and tensor["parameters"] == one["parameters"]
    apart = predict_run(replace(config, parallel=ParallelConfig(tp=2)), replace(h200, name="unknown"), 2)
    assert apart["step_s"] is None and "links" in apart["notes"]["step_s"]
    unknown = predict_run(config, replace(h200, name="unknown"), 8)
    assert "communication is not in it" in unknown["notes"]["step_s"] and "exposed_s" not in unknown
