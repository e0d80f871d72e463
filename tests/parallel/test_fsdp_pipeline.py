"""What a pipeline rank gathers, keeps, frees and reduces in each pass under ZeRO-2 and 3, on two gloo ranks."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from llm.args import ParallelConfig
from parallel.cost_model_pipeline_fsdp import pipelined_fsdp_messages
from parallel.cost_model_traffic import DataLayout, Param
from parallel.fsdp import FsdpSettings
from parallel.fsdp_init import apply_fsdp
from parallel.fsdp_pipeline import Place, StageUnits, places_of
from parallel.mesh_degrees import Degrees
from parallel.pipeline_schedules import Operation, build_schedule
from tests.parallel.pool import pool_of

WIDTH = 4


def operations(text: str) -> tuple[Operation, ...]:
    """ "F0.0 B0.0" -> operations."""
    return tuple(Operation(part[0], int(part[3:]), int(part[1])) for part in text.split())


def test_what_follows_a_pass_and_which_is_a_stages_last():
    ops = operations("F0.0 F1.0 I0.0 W0.0 I1.0 F0.2 W1.0")
    places = places_of(ops)
    first, second, dx0, w0, dx1, later, w1 = ops
    assert places[first] == Place(second, False) and places[second] == Place(dx0, True)
    assert places[dx0] == Place(dx1, False)  # W needs no parameters, so it does not follow
    assert places[w0] == Place(dx1, False) and places[dx1] == Place(later, True)
    assert places[later] == Place(None, True) and places[w1] == Place(None, True)


class Stage(nn.Module):
    """An offset that is in no block, and blocks that multiply."""

    def __init__(self, blocks: int):
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(WIDTH))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(blocks))

    def forward(self, x: torch.Tensor, indices: tuple[int, ...]) -> torch.Tensor:
        for index in indices:
            x = torch.tanh(self.blocks[index](x))
        return x + self.offset


def run_passes(mesh, row: str, zero: int, each: bool, blocks: dict[int, tuple[int, ...]]):
    """Which blocks lie in full after each pass, gathers and reductions in it; at the end the gradients."""
    torch.manual_seed(0)
    model = Stage(1 + max(index for own in blocks.values() for index in own))
    settings = FsdpSettings(reshard_after_forward=zero == 3, reduce_each_micro_batch=each)
    fsdp = apply_fsdp(model, mesh, settings, model.blocks, stages=StageUnits(blocks, frozenset(blocks)))
    outputs, seen = {}, []
    fsdp.begin_micro_batch(last=False)
    fsdp.begin_passes(operations(row))
    mesh.log.drain(0)
    for op in operations(row):
        fsdp.begin_pass(op)
        if op.kind == "F":
            x = torch.full((2, WIDTH), 0.1 * (1 + op.micro_batch + mesh.rank_in("dp")))
            outputs[op.stage, op.micro_batch] = model(x, blocks[op.stage])
        else:
            outputs.pop((op.stage, op.micro_batch)).sum().backward()
        fsdp.end_pass(op)
        fsdp.finish_reduce()
        calls = {"all_gather": 0, "reduce_scatter_sum": 0} | {line["op"]: line["calls"] for line in mesh.log.drain(0)}
        there = "".join("-" if unit.state == "sharded" else "+" for unit in fsdp.units)
        seen.append((there, calls["all_gather"], calls["reduce_scatter_sum"]))
    fsdp.finish_gradients()
    assert {unit.state for unit in fsdp.all_units} == {"sharded"}
    mesh.log.drain(0)
    return seen, fsdp.full_gradients()


ONE_STAGE = {0: (0, 1, 2)}
ROW = "F0.0 F1.0 B0.0 F2.0 B1.0 B2.0"  # 1F1B's first rank of two


@pytest.mark.dist
@pytest.mark.parametrize(
    ("zero", "each", "expected"),
    [
        # While its last block computes, the next pass' first one is on its way; where that is the same, it stays.
        (3, True, [("+--", 4, 0), ("--+", 2, 0), ("+--", 2, 4), ("--+", 2, 0), ("--+", 3, 4), ("---", 2, 3)]),
        (3, False, [("+--", 4, 0), ("--+", 2, 0), ("+--", 2, 0), ("--+", 2, 0), ("--+", 3, 0), ("---", 2, 3)]),
        (2, True, [("+++", 3, 0), ("+++", 0, 0), ("+++", 0, 4), ("+++", 0, 0), ("+++", 0, 4), ("---", 0, 3)]),
        (2, False, [("+++", 3, 0), ("+++", 0, 0), ("+++", 0, 0), ("+++", 0, 0), ("+++", 0, 0), ("---", 0, 3)]),
    ],
)
def test_blocks_come_and_go_with_the_passes_and_gradients_are_those_of_one_process(zero, each, expected):
    torch.manual_seed(0)
    model = Stage(3)
    for micro_batch in range(3):
        for rank in range(2):
            model(torch.full((2, WIDTH), 0.1 * (1 + micro_batch + rank)), ONE_STAGE[0]).sum().backward()
    for seen, gradients in pool_of(2).run(run_passes, ROW, zero, each, ONE_STAGE, degrees=Degrees(dp_shard=2)):
        assert seen == expected
        for name, param in model.named_parameters():
            torch.testing.assert_close(gradients[name], param.grad)


@pytest.mark.dist
def test_a_rank_with_two_stages_gathers_the_other_ones_first_block_ahead():
    blocks = {0: (0, 1), 2: (2, 3)}
    row = "F0.0 F0.2 B0.2 B0.0"
    for seen, _ in pool_of(2).run(run_passes, row, 3, True, blocks, degrees=Degrees(dp_shard=2)):
        assert [there for there, *_ in seen] == ["--+-", "---+", "-+--", "----"]
        assert sum(gathers for _, gathers, _ in seen) == 2 + 2 + 1 + 2  # the last block of stage 2 stays


def params_of_stage(blocks: int) -> list[Param]:
    inside = [Param(f"blocks.{i}.weight", (WIDTH, WIDTH), 1 + i, True) for i in range(blocks)]
    return [Param("offset", (WIDTH,), 0, False), *inside]


@pytest.mark.parametrize(("zero", "each"), [(3, True), (3, False), (2, True), (2, False)])
def test_messages_by_hand(zero, each):
    """Rank 0 of two, 1F1B, three micro-batches, three blocks: what the ranks above sent, and the root's last."""
    row = build_schedule("1f1b", 2, 3).table[0]
    assert row == operations(ROW)
    layout = DataLayout(shard=2, zero=zero, micro_batches=3, reduce_each_micro_batch=each)
    messages = pipelined_fsdp_messages(params_of_stage(3), layout, row, {0: range(0, 4)})
    gathers = [m for m in messages if m.op == "all_gather" and m.phase != "host"]
    reductions = [m for m in messages if m.op == "reduce_scatter_sum"]
    assert len(gathers) == 1 + (15 if zero == 3 else 3)
    assert len(reductions) == (12 if each else 4)
    assert {m.nbytes for m in gathers if m.stage} == {4 * WIDTH * WIDTH} == {m.nbytes for m in reductions if m.stage}
    copies = replace(layout, replicate=2)
    sums = [m for m in pipelined_fsdp_messages(params_of_stage(3), copies, row, {0: range(0, 4)})
            if m.axis == "dp_replicate" and m.phase != "host"]  # fmt: skip
    assert len(sums) == 4 and {m.nbytes for m in sums if m.stage} == {4 * WIDTH * WIDTH // 2}


def validate(mesh):
    """Forward alone: what is in full after it, and the loss of two batches."""
    torch.manual_seed(0)
    model = Stage(3)
    stages = StageUnits(ONE_STAGE, frozenset({0}))
    fsdp = apply_fsdp(model, mesh, FsdpSettings(reshard_after_forward=False), model.blocks, stages=stages)
    fsdp.begin_micro_batch(last=False)
    fsdp.begin_passes(())
    sums = []
    for op in operations("F0.0 F1.0"):
        fsdp.begin_pass(op)
        with torch.no_grad():
            sums.append(model(torch.full((2, WIDTH), 0.1), ONE_STAGE[0]).sum().item())
        fsdp.end_pass(op)
    return sums, [unit.state for unit in fsdp.units]


@pytest.mark.dist
def test_forward_alone_leaves_no_block_in_full():
    torch.manual_seed(0)
    expected = Stage(3)(torch.full((2, WIDTH), 0.1), ONE_STAGE[0]).sum().item()
    for sums, states in pool_of(2).run(validate, degrees=Degrees(dp_shard=2)):
        assert sums == pytest.approx([expected, expected]) and set(states) == {"sharded"}


@pytest.mark.parametrize(
    ("settings", "each"),
    [
        ({"zero": 2}, True),
        ({"zero": 2, "pp": 2}, False),
        ({"zero": 3, "pp": 2}, True),
        ({"zero": 2, "pp": 2, "reduce_each_micro_batch": True}, True),
        ({"zero": 3, "reduce_each_micro_batch": False}, False),
    ],
)
def test_a_pipeline_reduces_once_where_it_keeps_parameters_for_the_step(settings, each):
    assert ParallelConfig(**settings).reduces_each_micro_batch is each
