"""ZeRO-1 on gloo ranks against one process, in float64, and against torch's ZeroRedundancyOptimizer."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from configs.errors import UserError
from llm.optimizer import build_optimizer
from llm.optimizer_muon import newton_schulz
from parallel.mesh_degrees import Degrees
from parallel.sharded_optimizer import MAX_STAGES, Zero1, Zero1Settings, apply_zero1, stages
from parallel.sharded_optimizer_buckets import ALIGNMENT, BucketPlan, plan_buckets, rank_starts
from parallel.sharded_optimizer_matrices import iteration_cost, share_out
from tests.parallel.pool import pool_of
from tests.parallel.zero_toy import (
    MICRO_BATCHES,
    Case,
    Toy,
    assert_equal_to_reference,
    calls_and_bytes,
    optimizer_config,
    share_of_loss,
    train_rank,
)
from tests.tolerances import BF16_ROUNDING, FP64

SMALL = Zero1Settings(bucket_bytes=4096, first_bucket_bytes=600)


def wrap(mesh, case: Case, settings: Zero1Settings = SMALL) -> tuple[Zero1, object]:
    strategy = apply_zero1(Toy(dtype=case.dtype, seed=mesh.rank), mesh, settings)
    build = build_optimizer(strategy.model.named_parameters(), optimizer_config(case.optimizer))
    return strategy, strategy.shard_optimizer(build)


def run(world_size: int, function, *args, dp_shard: int | None = None) -> list:
    return pool_of(world_size).run(function, *args, degrees=Degrees(dp_shard=dp_shard))


def train(mesh, case, settings=SMALL):
    return train_rank(mesh, *wrap(mesh, case, settings), case)


def test_buckets_hold_every_parameter_once_aligned_and_divisible():
    shapes = {"a": (7,), "b": (13,), "c": (1,), "d": (64, 64), "e": (5, 3)}
    named = [(name, torch.empty(shape, device="meta")) for name, shape in shapes.items()]
    plans = plan_buckets(named, ranks=3, bucket_bytes=100, first_bucket_bytes=60)
    assert [plan.names for plan in plans] == [("a",), ("b", "c"), ("d",), ("e",)]
    for plan in plans:
        assert plan.numel % (3 * ALIGNMENT) == 0 and all(offset % ALIGNMENT == 0 for offset in plan.offsets)
        assert plan.offsets[-1] + math.prod(plan.shapes[-1]) <= plan.numel
    half = [("f", torch.empty(4, dtype=torch.bfloat16)), ("g", torch.empty(4))]
    assert [plan.names for plan in plan_buckets(half, 2, 1000)] == [("f",), ("g",)]


def test_ranks_starts_cut_a_parameter_without_gap_or_overlap():
    assert rank_starts(offset=3, numel=10, share=4, ranks=4) == (0, 1, 5, 9, 10)
    assert rank_starts(offset=8, numel=3, share=4, ranks=4) == (0, 0, 0, 3, 3)


def test_a_step_goes_through_every_bucket_once_in_a_few_stages():
    sizes = [5, 1, 1, 1, 40, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    plans = [BucketPlan((), (), (), size, torch.float32) for size in sizes]
    runs = stages([SimpleNamespace(plan=plan) for plan in plans])
    assert [bucket.plan.numel for run in runs for bucket in run] == sizes
    assert 2 < len(runs) <= MAX_STAGES and all(runs)


def test_matrices_are_shared_out_evenly():
    costs = [iteration_cost(shape) for shape in [(64, 64)] * 6 + [(64, 256)] * 6]
    owners = share_out(costs, 4)
    loads = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(4)]
    assert max(loads) <= 4 / 3 * sum(costs) / 4 and min(loads) > 0
    assert iteration_cost((3, 8, 4)) == 3 * iteration_cost((4, 8))
    assert share_out([], 2) == []


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
def test_five_steps_match_one_process(optimizer, world_size):
    case = Case(optimizer)
    assert_equal_to_reference(run(world_size, train, case), case, FP64)


@pytest.mark.dist
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_buckets_that_others_read_match_the_backends(dtype):
    sizes, case = (SMALL.bucket_bytes, SMALL.first_bucket_bytes, dtype), Case("adamw")
    peer = run(2, train, case, Zero1Settings(*sizes, transport="peer"))
    backend = run(2, train, case, Zero1Settings(*sizes))
    for ours, theirs in zip(peer, backend, strict=True):
        assert calls_and_bytes(ours["log"]) == calls_and_bytes(theirs["log"])
        for name, param in theirs["parameters"].items():
            assert torch.equal(ours["parameters"][name], param), name
    if dtype is None:
        assert_equal_to_reference(run(3, train, case, Zero1Settings(*sizes, transport="peer")), case, FP64)


class Tower(nn.Module):
    """Three units between a table and an output matrix, which belong to none."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
        self.blocks = nn.ModuleList(nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(3))
        self.output = nn.Linear(4, 4, bias=False, dtype=torch.float64)
        for index, param in enumerate(self.parameters()):
            nn.init.normal_(param, generator=torch.Generator().manual_seed(index))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.table
        for block in self.blocks:
            x = block(x)
        return x @ self.output.weight  # as a fused loss reads it: no hook of its own would fire


def read_in_full(strategy):
    return strategy.full_parameters()


def read_gathered(strategy):
    with strategy.gathered():
        return {name: value.clone() for name, value in strategy.model.state_dict().items()}


def read_pieces(strategy):
    return {piece.name: piece.local.clone() for piece in strategy.pieces()}


def late_parameters(mesh, with_units, read=read_in_full, compiled=False):
    model, seen = Tower(), []
    for block in model.blocks if compiled else ():
        block.compile(backend="aot_eager")
    settings = Zero1Settings(bucket_bytes=1, first_bucket_bytes=1, transport="peer")  # nothing arrives but by wait()
    strategy = apply_zero1(model, mesh, settings, list(model.blocks) if with_units else ())
    optimizer = strategy.shard_optimizer(build_optimizer(model.named_parameters(), optimizer_config("sgd")))
    for module in model.blocks:
        module.register_forward_pre_hook(lambda *_: seen.append(len(strategy.arrivals.pending)))
    for _ in range(2):
        strategy.begin_micro_batch(last=True)
        model(torch.full((2, 4), 1.0 + mesh.rank, dtype=torch.float64)).sum().backward()
        strategy.finish_gradients()
        optimizer.step()
        seen.append(len(strategy.arrivals.pending))
        optimizer.zero_grad()
    return seen, read(strategy), len(strategy.arrivals.pending)


@pytest.mark.dist
def test_with_units_parameters_arrive_during_the_next_forward_pass():
    late, at_once = run(2, late_parameters, True), run(2, late_parameters, False)
    for (seen, parameters, left), (seen_at_once, expected, _) in zip(late, at_once, strict=True):
        # Five matrices are under way; the model waits for the table, a block for its own, the last for the output too.
        assert seen == [0, 0, 0, 5, 3, 2, 0, 5] and left == 0
        assert seen_at_once == [0] * 8
        for name, value in expected.items():
            assert torch.equal(parameters[name], value), name


@pytest.mark.dist
def test_parameters_arrive_in_compiled_units_too():
    for late, at_once in zip(
        run(2, late_parameters, True, read_in_full, True), run(2, late_parameters, False), strict=True
    ):
        assert late[0] == [0, 0, 0, 5, 3, 2, 0, 5]
        assert all(torch.equal(late[1][name], value) for name, value in at_once[1].items())


@pytest.mark.dist
@pytest.mark.parametrize("read", [read_gathered, read_pieces])
def test_who_reads_parameters_outside_of_a_forward_pass_waits_for_them(read):
    for late, at_once in zip(run(2, late_parameters, True, read), run(2, late_parameters, False), strict=True):
        assert late[0][-1] == 5 and late[2] == 0
        assert all(torch.equal(late[1][name], value) for name, value in at_once[1].items())


@pytest.mark.dist
def test_shards_and_replicas_together_match_one_process():
    case = Case("muon")
    assert_equal_to_reference(run(4, train, case, dp_shard=2), case, FP64)


@pytest.mark.dist
def test_collectives_are_one_reduce_scatter_and_one_gather_a_bucket():
    named = [(name, param) for name, param in Toy().named_parameters() if param.requires_grad]
    plans = plan_buckets(reversed(named), 2, SMALL.bucket_bytes, SMALL.first_bucket_bytes)
    nbytes = sum(8 * plan.numel for plan in plans)
    assert len(plans) == 4
    for result in run(2, train, Case("adamw")):
        assert calls_and_bytes(result["log"]) == {
            ("reduce_scatter_sum", "dp_shard_cp", "float64"): (len(plans), nbytes),
            ("all_reduce_sum", "dp_shard_cp", "int32"): (1, 4 * len(named)),
            ("all_reduce_sum", "dp_shard_cp", "float64"): (1, 8),
            ("all_gather", "dp_shard_cp", "float64"): (len(plans), nbytes),
        }


def order_of_events(mesh):
    strategy, optimizer = wrap(mesh, Case("adamw"))
    events, enter, update = [], mesh.log.enter, optimizer.optimizer.update
    mesh.log.enter = lambda op, *rest: (events.append(op), enter(op, *rest))[1]
    optimizer.optimizer.update = lambda *arguments: (events.append("update"), update(*arguments))[1]
    strategy.model.output.weight.register_hook(lambda gradient: events.append("last gradient"))
    try:
        for micro_batch in range(MICRO_BATCHES):
            strategy.begin_micro_batch(last=micro_batch == MICRO_BATCHES - 1)
            share_of_loss(strategy.model, mesh.rank, mesh.size("dp"), micro_batch).backward()
        strategy.finish_gradients()
        optimizer.step()
    finally:
        mesh.log.enter = enter
    return events


@pytest.mark.dist
def test_buckets_leave_during_backward_and_parameters_come_back_during_the_step():
    for events in run(2, order_of_events):
        ends = [index for index, event in enumerate(events) if event == "last gradient"]
        sent = [index for index, event in enumerate(events) if event == "reduce_scatter_sum"]
        assert len(ends) == MICRO_BATCHES and ends[0] < sent[0] < ends[1]  # none of the first micro-batch
        updates = [index for index, event in enumerate(events) if event == "update"]
        gathers = [index for index, event in enumerate(events) if event == "all_gather"]
        assert sent[-1] < updates[0] < gathers[0] < updates[-1] < gathers[-1]


def what_a_rank_holds(mesh, case):
    strategy, optimizer = wrap(mesh, case)
    train_rank(mesh, strategy, optimizer, case)
    state = {(name, key): value for group in optimizer.param_groups
             for name, param in zip(group["param_names"], group["params"], strict=True)
             for key, value in optimizer.state[param].items() if value.ndim}  # fmt: skip
    padding = 0.0
    for bucket in strategy.buckets:
        outside = torch.ones_like(bucket.flat)
        for view in bucket.views(outside):
            view.zero_()
        padding = max(padding, (bucket.flat * outside).abs().max().item())
    pieces = [(piece.name, piece.start, piece.numel) for piece in strategy.optimizer_pieces()]
    views = all(param.data_ptr() == view.data_ptr() for bucket in strategy.buckets
                for param, view in zip(bucket.params, bucket.views(bucket.flat), strict=True))  # fmt: skip
    return {
        "state": sum(value.numel() for value in state.values()),
        "share": sum(bucket.share for bucket in strategy.buckets),
        "padding": padding,
        "pieces": pieces,
        "whole": [piece.name for piece in strategy.pieces()],
        "views": views,
    }


@pytest.mark.dist
def test_each_rank_holds_its_part_of_the_state_and_nothing_of_the_padding():
    ranks = run(3, what_a_rank_holds, Case("adamw"))
    sizes = {name: param.numel() for name, param in Toy().named_parameters() if param.requires_grad}
    updated = sum(sizes.values()) - sizes["never"]
    assert sum(rank["state"] for rank in ranks) == 2 * updated  # two moments, each element on one rank
    assert all(rank["state"] <= 2 * rank["share"] for rank in ranks)
    assert len({rank["share"] for rank in ranks}) == 1 and all(rank["padding"] == 0.0 for rank in ranks)
    assert all(rank["views"] for rank in ranks)  # parameters are views of the buckets: no copy on the way
    covered = sorted(piece for rank in ranks for piece in rank["pieces"])
    for name, size in sizes.items():
        ends = 0
        for _, start, numel in (piece for piece in covered if piece[0] == name):
            assert start == ends
            ends = start + numel
        assert ends == size, name
    names = [name for name, _ in Toy().named_parameters()] + ["counter"]
    assert all(sorted(rank["whole"]) == sorted(names) for rank in ranks)


def one_bad_rank(mesh, case):
    strategy, _ = wrap(mesh, case)
    strategy.begin_micro_batch(last=True)
    loss = share_of_loss(strategy.model, mesh.rank, mesh.size("dp"), 0)
    (loss * (math.inf if mesh.rank == 1 else 1.0)).backward()
    strategy.finish_gradients()
    return math.isfinite(strategy.gradient_norm().item())


@pytest.mark.dist
def test_a_gradient_that_is_not_finite_on_one_rank_is_seen_by_all():
    assert run(2, one_bad_rank, Case()) == [False, False]


def reduce_in_bfloat16(mesh, case):
    settings = Zero1Settings(SMALL.bucket_bytes, SMALL.first_bucket_bytes, reduce_dtype=torch.bfloat16)
    return train_rank(mesh, *wrap(mesh, case, settings), case)


@pytest.mark.dist
def test_gradients_reduced_in_bfloat16_are_rounded_twice_at_most():
    case = Case("sgd", steps=2)
    exact = run(2, train, case)[0]["gradients"]
    for result in run(2, reduce_in_bfloat16, case):
        sent = calls_and_bytes(result["log"])
        assert ("reduce_scatter_sum", "dp_shard_cp", "bfloat16") in sent
        for name, gradient in exact.items():
            if gradient is not None:  # each rank's part is rounded, and the sum
                atol = 3 * BF16_ROUNDING * gradient.abs().max().item()
                torch.testing.assert_close(result["gradients"][name], gradient, rtol=0, atol=atol)


def two_backward_passes(mesh):
    strategy, _ = wrap(mesh, Case())
    strategy.begin_micro_batch(last=True)
    share_of_loss(strategy.model, mesh.rank, mesh.size("dp"), 0).backward()
    try:
        share_of_loss(strategy.model, mesh.rank, mesh.size("dp"), 1).backward()
    except AssertionError as error:
        return str(error)


@pytest.mark.dist
def test_a_second_backward_pass_in_a_micro_batch_is_an_error():
    # On one rank: where several stop at different places, the next job would find their messages.
    (message,) = pool_of(1).run(two_backward_passes, degrees=Degrees(dp_shard=None), force=True)
    assert "begin_micro_batch" in message


def change_the_model(mesh, case):
    strategy, _ = wrap(mesh, case)
    strategy.model.late = nn.Parameter(torch.zeros(3))
    strategy.begin_micro_batch(last=True)
    share_of_loss(strategy.model, mesh.rank, mesh.size("dp"), 0).backward()
    try:
        strategy.finish_gradients()
    except UserError as error:
        return str(error)


@pytest.mark.dist
def test_a_parameter_added_after_wrapping_is_named():
    assert all("'late'" in message for message in run(2, change_the_model, Case()))


def torch_zero_redundancy(mesh, case):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of its own deprecations when imported

    model = Toy()
    trained = [param for name, param in model.named_parameters() if param.requires_grad and name != "never"]
    matrices = [param for param in trained if param.ndim >= 2]
    vectors = [param for param in trained if param.ndim < 2]
    config = optimizer_config("adamw")
    rates = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
    optimizers = [
        ZeroRedundancyOptimizer(params, torch.optim.AdamW, weight_decay=decay, **rates)
        for params, decay in ((matrices, config.weight_decay), (vectors, 0.0))
    ]
    for step in range(case.steps):
        for micro_batch in range(MICRO_BATCHES):
            share_of_loss(model, mesh.rank, mesh.size("dp"), micro_batch).backward()
        for param in trained:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            torch.distributed.all_reduce(param.grad)
        torch.nn.utils.clip_grad_norm_(trained, case.clip_norm)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = config.lr / (1 + step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.dist
def test_parameters_match_torchs_zero_redundancy_optimizer():
    case = Case("adamw")
    theirs = run(2, torch_zero_redundancy, case)[0]
    ours = run(2, train, case)[0]["parameters"]
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e3 * FP64, atol=1e3 * FP64)


def orthogonalise_in_parts(mesh):
    strategy, optimizer = wrap(mesh, Case("muon"))
    group = next(group for group in optimizer.param_groups if "matrices" in group)
    for shard in strategy.shards:
        shard.has_gradient = True
    matrices = {shard.local: shard for shard in strategy.shards}
    full = dict(strategy.model.named_parameters())
    parts = [param.detach() for param in group["params"]]
    results = group["matrices"].transform(group["params"], parts, lambda given: [newton_schulz(m, 5) for m in given])
    for param, result in zip(group["params"], results, strict=True):
        shard = matrices[param]
        whole = newton_schulz(full[shard.name].detach(), 5).reshape(-1)
        assert torch.equal(result, whole[shard.start : shard.start + param.numel()]), shard.name
    return len(results)


@pytest.mark.dist
def test_matrices_in_parts_are_transformed_as_whole_ones_bit_for_bit():
    counts = run(3, orthogonalise_in_parts)
    assert min(counts) > 0 and sum(counts) > 12  # of the 12 matrices some lie on two ranks
