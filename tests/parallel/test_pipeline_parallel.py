"""Cuts by cost, backward in two parts, bad configs, and a rank that dies while its neighbour waits for it."""

import itertools
import os
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from configs.errors import UserError
from llm.args import ModelConfig, ParallelConfig
from llm.parallelize_pipeline import check_pipeline, stage_costs, stage_pieces
from parallel.collectives_log import CollectiveError
from parallel.cost_model_pipeline import PipelineShape, pipeline_messages, predict_pipeline
from parallel.mesh_degrees import Degrees
from parallel.pipeline_parallel import PipelineRunner, PipelineSettings
from parallel.pipeline_parallel_backward import DeferredGradients
from parallel.pipeline_parallel_stages import split_by_cost
from parallel.pipeline_schedules import build_schedule
from parallel.pipeline_schedules_simulation import Durations, simulate
from tests.parallel.pool import Pool, pool_of
from tests.parity.cases import SGD64


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_a_cut_has_the_least_largest_stage_of_all_cuts(stages):
    costs = (1.0, 7.0, 7.0, 7.0, 2.0, 7.0, 19.0)
    found = split_by_cost(costs, stages)
    assert [piece for part in found for piece in part] == list(range(len(costs))) and all(map(len, found))
    every = itertools.combinations(range(1, len(costs)), stages - 1)
    least = min(max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *ends, len(costs)))) for ends in every)
    assert max(sum(costs[piece] for piece in part) for part in found) == least


def test_embedding_and_head_count_in_the_cut():
    model = ModelConfig(vocab_size=50304, d_model=768, num_layers=12, num_heads=12, d_ff=2048)
    costs = stage_costs(model, 1024)
    assert costs[-1] > 4 * costs[1] > 0 and costs[0] < 0.01 * costs[1]
    blocks = [sum(1 <= piece <= 12 for piece in part) for part in stage_pieces(model, 1024, 4)]
    assert sum(blocks) == 12 and blocks[-1] < min(blocks[:-1])  # the head is worth more than four blocks
    with pytest.raises(UserError, match="15 stages need as many pieces, and num_layers=12"):
        stage_pieces(model, 1024, 15)


@pytest.mark.parametrize("bias", [False, True])
def test_a_deferred_weight_gradient_is_the_weight_gradient(bias):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    offset = torch.randn(4, dtype=torch.float64, requires_grad=True) if bias else None
    inputs = [x, weight, *([offset] if bias else [])]
    expected = torch.autograd.grad(F.linear(x, weight, offset).sin().sum(), inputs)
    deferred, seen = DeferredGradients(), []
    weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    out = deferred.matmul(x, weight, offset)
    deferred.begin("first")
    out.sin().sum().backward()
    assert weight.grad is None and not seen
    torch.testing.assert_close(x.grad, expected[0], rtol=0, atol=1e-14)
    deferred.run("first")
    assert len(seen) == 1 and not deferred.waiting
    for tensor, gradient in zip(inputs, expected, strict=True):
        torch.testing.assert_close(tensor.grad, gradient, rtol=0, atol=1e-14)


def test_a_product_adds_to_the_gradient_that_is_there_unless_hooks_wait_for_it():
    torch.manual_seed(0)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    watched, free = (torch.randn(4, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    seen, deferred = [], DeferredGradients()
    watched.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    expected = torch.autograd.grad(F.linear(x, watched).sin().sum() + F.linear(x, free).sin().sum(), [watched, free])
    for _ in range(2):
        deferred.begin("key")
        (deferred.matmul(x, watched, None).sin() + deferred.matmul(x, free, None).sin()).sum().backward()
        there = None if free.grad is None else free.grad.data_ptr()
        deferred.run("key")
    assert len(seen) == 2 and free.grad.data_ptr() == there
    for weight, gradient in zip((watched, free), expected, strict=True):
        torch.testing.assert_close(weight.grad, 2 * gradient, rtol=0, atol=1e-13)


def test_weights_cast_once_a_step_are_those_of_that_step():
    """Under autocast, two steps with an update between: outputs and gradients as if each product cast for itself."""
    torch.manual_seed(0)
    weight, x = torch.randn(4, 6, requires_grad=True), torch.randn(3, 6, requires_grad=True)
    found = []
    for casts in (None, {}):
        deferred, own = DeferredGradients(), weight.detach().clone().requires_grad_()
        deferred.casts, buffers = casts, {own: torch.zeros_like(own)}
        for _ in range(2):
            deferred.renew_casts()
            deferred.begin("key")
            with torch.autocast("cpu", torch.bfloat16):
                out = deferred.matmul(x, own, None)
            (dx,) = torch.autograd.grad(out.float().square().sum(), [x])
            assert deferred.add_to("key", buffers) == [own]
            with torch.no_grad():
                own.sub_(buffers[own], alpha=0.1)
            found.append((out, dx, own.detach().clone()))
    assert not torch.equal(found[0][0], found[1][0])
    for ours, other in zip(found[:2], found[2:], strict=True):
        assert all(map(torch.equal, ours, other))


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"pp": 5}, "5 stages need as many pieces"),
        ({"pp": 2, "pp_chunks": 2}, "pp_chunks=2 does not fit"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused(parallel, message):
    with pytest.raises(UserError, match=message):
        check_pipeline(SGD64.train_config(ParallelConfig(**parallel)))


def test_compiled_models_are_refused_where_they_cannot_be_cut():
    config = SGD64.train_config(ParallelConfig(pp=2, pp_schedule="zero_bubble"))
    for mode, message in (("model", "compile=model"), ("block", "zero_bubble")):
        with pytest.raises(UserError, match=message):
            check_pipeline(replace(config, compile=mode))


def test_bytes_of_a_middle_rank_by_hand():
    """Rank 1 of 4, GPipe, two micro-batches of 10 and 20 tokens: each is received, sent on, and its gradient back."""
    shape = PipelineShape(4, "gpipe", 1, (10, 20), 8, "float32", table_elements=100)
    exchanges = [message.nbytes for message in pipeline_messages(shape, 1) if message.op == "exchange"]
    # The second one arrives while the first is sent on, in both directions: of such a batch the sent bytes count.
    assert sorted(exchanges) == sorted([10 * 32, 10 * 32, 20 * 32, 20 * 32, 10 * 32, 20 * 32])
    assert sum(m.nbytes for m in pipeline_messages(shape, 0) if m.op == "exchange") == 2 * (10 + 20) * 32 + 2 * 400
    frozen = replace(shape, table_learns=False)  # its values cross, and no gradient
    assert sum(m.nbytes for m in pipeline_messages(frozen, 0) if m.op == "exchange") == 2 * (10 + 20) * 32 + 400


def test_a_prediction_for_unequal_stages_idles_by_the_dearest():
    shape = PipelineShape(2, "1f1b", 1, (8,) * 16, 4, "float32")
    simulation = predict_pipeline(shape, Durations(), [1.0, 3.0])
    assert simulation.total == pytest.approx(16 * 9 + 3) and simulation.idle[0] > 16 * 6 - 10
    assert simulate(build_schedule("1f1b", 2, 16)).total == 16 * 3 + 3


def runner_of(mesh, schedule):
    return PipelineRunner(lambda batch: torch.empty(2, 3), mesh, PipelineSettings(schedule, 1, "pp"))


def train_toy(mesh, schedule):
    """w0 on the first rank, w1 on the second: the loss is the sum of w1 * (w0 * batch)."""
    weight = torch.full((), 2.0 + mesh.rank_in("pp"), requires_grad=True)
    first = {0: lambda x, batch: (weight * batch, None)}
    last = {1: lambda x, batch: ((weight * x).sum(), float((weight * x).sum()))}
    results = runner_of(mesh, schedule).run(
        last if mesh.rank_in("pp") else first, [torch.ones(2, 3), torch.zeros(2, 3)]
    )
    return weight.grad, results


@pytest.mark.dist
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_toy_of_two_ranks_has_the_gradients_of_one(schedule):
    (first, none), (second, losses) = pool_of(2).run(train_toy, schedule, degrees=Degrees(pp=2))
    assert first == 6 * 3.0 and second == 6 * 2.0
    assert none == [] and losses == [36.0, 0.0]


def lose_the_second_rank(mesh):
    """The second rank of three dies in its first forward pass; the others wait for what it would have sent."""
    runner = PipelineRunner(lambda batch: torch.empty(2, 3), mesh, PipelineSettings("1f1b", 1, "pp"))
    weight = torch.ones((), requires_grad=True)

    def stage(x, batch):
        if mesh.rank_in("pp") == 1:
            os._exit(9)
        out = weight * (batch if x is None else x)
        return (out.sum(), 0.0) if mesh.rank_in("pp") == 2 else (out, None)

    try:
        runner.run({mesh.rank_in("pp"): stage}, [torch.ones(2, 3)] * 4)
    except CollectiveError as error:
        return str(error)
    return "nothing"


@pytest.mark.dist
def test_a_dead_rank_ends_the_pipeline_with_an_error_and_no_hang():
    pool = Pool(3, timeout_s=2.0)
    try:
        for pipe in pool.pipes:
            pipe.send((lose_the_second_rank, (), (Degrees(pp=3), False)))
        for rank in (0, 2):
            assert pool.pipes[rank].poll(40.0), f"rank {rank} hangs"
            told, failure = pool.pipes[rank].recv()
            assert failure is None and told.startswith("exchange of"), failure or told
    finally:
        pool.kill()
