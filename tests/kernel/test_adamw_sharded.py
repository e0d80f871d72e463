"""The fused update over shards: a step that is not finite is skipped by the kernel and taken out of the counts."""

import math

import pytest
import torch

from llm.optimizer import build_optimizer, clipped_step
from parallel.fsdp import FsdpSettings
from parallel.fsdp_init import apply_fsdp
from parallel.mesh_degrees import Degrees
from parallel.sharded_optimizer import Zero1Settings, apply_zero1
from tests.parallel.pool import pool_of
from tests.parallel.zero_toy import CLIP_NORM, Toy, optimizer_config, share_of_loss


def train(mesh, zero: int, break_second_step: bool) -> list[torch.Tensor]:
    """Parameters and optimizer state after three steps, before the second of which one rank's loss may be infinite."""
    model = Toy(dtype=torch.float32)
    if zero == 1:
        strategy = apply_zero1(model, mesh, Zero1Settings(bucket_bytes=4096, first_bucket_bytes=600))
    else:
        strategy = apply_fsdp(model, mesh, FsdpSettings(), model.blocks.values())
    optimizer = strategy.shard_optimizer(
        build_optimizer(model.named_parameters(), optimizer_config("adamw"), fused=True)
    )
    assert optimizer.skips_nan
    for step, is_broken in ((0, False), (1, True), (1, False), (2, False)):
        if is_broken and not break_second_step:
            continue
        strategy.begin_micro_batch(last=True)
        loss = share_of_loss(model, mesh.rank, mesh.size("dp"), step % 2)
        (loss * (math.inf if is_broken and mesh.rank == 1 else 1.0)).backward()
        strategy.finish_gradients()
        clipped_step(optimizer, strategy.parameters, strategy.gradient_norm(), CLIP_NORM)
        if is_broken:
            optimizer.uncount()
        optimizer.zero_grad(set_to_none=True)
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [*strategy.full_parameters().values(), *states]


@pytest.mark.dist
@pytest.mark.parametrize("zero", [1, 3])
def test_a_sharded_step_that_is_not_finite_leaves_weights_states_and_counts(zero):
    plain, broken = (
        pool_of(2).run(train, zero, break_second_step, degrees=Degrees(dp_shard=None))
        for break_second_step in (False, True)
    )
    for expected, found in zip(plain, broken, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
