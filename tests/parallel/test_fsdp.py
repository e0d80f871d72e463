"""FSDP (ZeRO-2 and ZeRO-3) on gloo ranks against one process, in float64, and against torch's fully_shard."""

import gc
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch

from configs.errors import UserError
from llm.args import ModelConfig
from llm.loss import CrossEntropyLoss
from llm.optimizer import build_optimizer
from llm.transformer import Transformer
from llm.transformer_init import initialise
from parallel.activation_checkpointing import make_checkpoint
from parallel.fsdp import FsdpSettings
from parallel.fsdp_init import apply_fsdp, assign
from parallel.fsdp_layout import plan_unit
from parallel.mesh_degrees import Degrees
from tests.parallel.pool import Pool, pool_of
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
from tests.tolerances import BF16_ROUNDING, FP32_GRADIENT, FP64

ZERO2, ZERO3 = FsdpSettings(reshard_after_forward=False), FsdpSettings()
MODEL = ModelConfig(
    vocab_size=61, max_seq_len=32, d_model=24, num_layers=3, num_heads=3, num_kv_heads=1, d_ff=40, tie_embeddings=True
)


def run(world_size: int, function, *args, dp_shard: int | None = None) -> list:
    return pool_of(world_size).run(function, *args, degrees=Degrees(dp_shard=dp_shard))


def wrap(mesh, case: Case, settings: FsdpSettings, hold=None):
    model = Toy(dtype=case.dtype, seed=mesh.rank)
    strategy = apply_fsdp(model, mesh, settings, model.blocks.values())
    return strategy, strategy.shard_optimizer(
        build_optimizer(model.named_parameters(), optimizer_config(case.optimizer))
    )


def train(mesh, case, settings):
    return train_rank(mesh, *wrap(mesh, case, settings), case)


@pytest.mark.dist
@pytest.mark.parametrize("settings", [ZERO2, ZERO3], ids=["zero2", "zero3"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
def test_five_steps_match_one_process(optimizer, settings):
    case = Case(optimizer)
    assert_equal_to_reference(run(3, train, case, settings), case, FP64)


@pytest.mark.dist
@pytest.mark.parametrize("settings", [ZERO2, ZERO3], ids=["zero2", "zero3"])
def test_one_reduction_a_step_matches_one_process(settings):
    case = Case("sgd")
    once = replace(settings, reduce_each_micro_batch=False)
    assert_equal_to_reference(run(2, train, case, once), case, FP64)


@pytest.mark.dist
def test_shards_and_replicas_together_match_one_process():
    case = Case("muon")
    assert_equal_to_reference(run(4, train, case, ZERO3, dp_shard=2), case, FP64)


@pytest.mark.dist
@pytest.mark.parametrize("reshard", [False, True], ids=["zero2", "zero3"])
@pytest.mark.parametrize("each", [True, False], ids=["each", "once"])
def test_collectives_are_as_many_and_as_large_as_the_layout_says(reshard, each):
    settings = FsdpSettings(reshard_after_forward=reshard, reduce_each_micro_batch=each)
    model = Toy()
    root, *blocks = [
        plan_unit(unit, [torch.float64] * len(unit), 2) for unit in assign(model, [*model.blocks.values()])
    ]
    passes = MICRO_BATCHES if reshard else 1
    again = blocks[:-1] if reshard else []  # for backward, which begins with the last block
    gathers = passes * (1 + len(blocks) + len(again))
    gathered = passes * 2 * sum(unit.slot_bytes for unit in [root, *blocks, *again])
    reductions = MICRO_BATCHES if each else 1
    reduced = reductions * 2 * 8 * sum(unit.gradient_share for unit in (root, *blocks))
    trainable = sum(param.requires_grad for param in model.parameters())
    for result in run(2, train, Case("adamw"), settings):
        assert calls_and_bytes(result["log"]) == {
            ("all_gather", "dp_shard_cp", "float64"): (gathers, gathered),
            ("reduce_scatter_sum", "dp_shard_cp", "float64"): (reductions * (1 + len(blocks)), reduced),
            ("all_reduce_sum", "dp_shard_cp", "int32"): (1, 4 * trainable),
            ("all_reduce_sum", "dp_shard_cp", "float64"): (1, 8),
        }


def states_along_the_way(mesh, settings):
    strategy, _ = wrap(mesh, Case(), settings)
    seen = []

    def note(when, index, *_):
        bytes_there = sum(unit.memory.untyped_storage().nbytes() > 0 for unit in strategy.units)
        seen.append((when, index, [unit.state for unit in strategy.units], bytes_there))

    for index, block in enumerate(strategy.model.blocks.values()):
        block.down_proj.register_hook(partial(note, "backward", index))
        block.q_proj.register_forward_hook(partial(note, "forward", index))
    strategy.begin_micro_batch(last=True)
    share_of_loss(strategy.model, mesh.rank, mesh.size("dp"), 0).backward()
    strategy.finish_gradients()
    return seen, [unit.state for unit in strategy.all_units], held_bytes(strategy)


def held_bytes(strategy) -> int:
    return sum(unit.memory.untyped_storage().nbytes() for unit in strategy.all_units)


@pytest.mark.dist
def test_zero3_holds_one_block_and_gathers_its_neighbour():
    for seen, after, held in run(2, states_along_the_way, ZERO3):
        assert seen == [
            ("forward", 0, ["gathered", "gathering", "sharded"], 1),
            ("forward", 1, ["sharded", "gathered", "gathering"], 1),
            ("forward", 2, ["sharded", "sharded", "gathered"], 1),
            ("backward", 2, ["sharded", "gathering", "gathered"], 1),  # kept from its forward
            ("backward", 1, ["gathering", "gathered", "sharded"], 1),
            ("backward", 0, ["gathered", "sharded", "sharded"], 1),
        ]
        assert after == ["sharded"] * 4 and held == 0


@pytest.mark.dist
def test_zero2_keeps_blocks_until_their_backward_is_over():
    for seen, after, held in run(2, states_along_the_way, ZERO2):
        assert [bytes_there for *_, bytes_there in seen] == [1, 2, 3, 3, 2, 1]
        assert after == ["sharded"] * 4 and held == 0


def evaluate(mesh):
    strategy, _ = wrap(mesh, Case(), ZERO3)
    token_ids = torch.arange(7)
    with torch.no_grad():
        logits = strategy.model(token_ids, use_sometimes=True)
    after_forward = held_bytes(strategy)
    with strategy.gathered():
        inside = {name: param.detach().clone() for name, param in strategy.model.named_parameters()}
        with torch.no_grad():
            again = strategy.model(token_ids, use_sometimes=True)
        still = all(unit.state == "gathered" for unit in strategy.all_units)
    return logits, again, inside, after_forward, still, held_bytes(strategy), list(strategy.model.state_dict())


@pytest.mark.dist
def test_evaluation_and_gathered_use_the_first_ranks_weights_and_leave_nothing():
    model = Toy(seed=0)
    expected = model(torch.arange(7), use_sometimes=True).detach()
    for logits, again, inside, after_forward, still, held, names in run(2, evaluate):
        assert torch.equal(logits, expected) and torch.equal(again, expected)
        assert all(torch.equal(inside[name], param) for name, param in model.named_parameters())
        assert (after_forward, still, held) == (0, True, 0) and names == list(model.state_dict())


def torch_fully_shard(mesh, case):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Toy(seed=0)
    del model.frozen, model.one, model.never, model.sometimes  # it shards neither numbers nor rows that do not divide
    model.frozen, model.one, model.sometimes = torch.zeros(1), torch.ones(1), torch.zeros(1)
    devices = init_device_mesh("cpu", (mesh.world_size,))
    for block in model.blocks.values():
        fully_shard(block, mesh=devices)
    fully_shard(model, mesh=devices)
    share_of_loss(model, mesh.rank, mesh.world_size, 0).backward()
    return {name: mesh.world_size * param.grad.full_tensor() for name, param in model.named_parameters()}


def first_gradients(mesh, case):
    model = Toy(seed=0)
    del model.frozen, model.one, model.never, model.sometimes
    model.frozen, model.one, model.sometimes = torch.zeros(1), torch.ones(1), torch.zeros(1)
    strategy = apply_fsdp(model, mesh, ZERO3, model.blocks.values())
    strategy.begin_micro_batch(last=True)
    share_of_loss(model, mesh.rank, mesh.size("dp"), 0).backward()
    strategy.finish_gradients()
    return strategy.full_gradients()


@pytest.mark.dist
def test_gradients_match_torchs_fully_shard():
    theirs = run(2, torch_fully_shard, Case())[0]
    for ours in run(2, first_gradients, Case()):
        assert ours.keys() == theirs.keys()
        for name, gradient in theirs.items():
            torch.testing.assert_close(ours[name], gradient, rtol=FP64, atol=FP64 * gradient.abs().max().item())


def windows() -> torch.Tensor:
    return torch.randint(MODEL.vocab_size, (2, 17), generator=torch.Generator().manual_seed(3))


def loss_share(model, ranks: int, bfloat16: bool = False) -> torch.Tensor:
    token_ids = windows()
    device = model.rope.frequency_bits.device
    token_ids = token_ids.to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
        sums = CrossEntropyLoss()(model(token_ids[:, :-1]), token_ids[:, 1:])
    return sums.loss_sum / (ranks * token_ids[:, 1:].numel())


def transformer_gradients(mesh, settings, checkpointing="none", bfloat16=False):
    """Every rank sees the same windows, so the sum over ranks is one process' gradient."""
    model = Transformer(MODEL)
    initialise(model, seed=1)
    for block in model.blocks.values():
        block.checkpoint = make_checkpoint(checkpointing)
    strategy = apply_fsdp(model, mesh, settings, model.blocks.values())
    strategy.begin_micro_batch(last=True)
    loss_share(model, mesh.size("dp"), bfloat16).backward()
    strategy.finish_gradients()
    return strategy.full_gradients(), strategy.full_parameters(), mesh.log.drain(0)


def transformer_reference(bfloat16=False):
    model = Transformer(MODEL)
    initialise(model, seed=1)
    loss_share(model, 1, bfloat16).backward()
    return {name: param.grad for name, param in model.named_parameters()}, dict(model.named_parameters())


@pytest.mark.dist
@pytest.mark.parametrize("settings", [ZERO2, ZERO3], ids=["zero2", "zero3"])
def test_recomputation_leaves_the_gradients_bit_for_bit(settings):
    plain, full, selective = (
        run(2, transformer_gradients, settings, mode)[0][0] for mode in ("none", "full", "selective")
    )
    reference, _ = transformer_reference()
    for name, gradient in plain.items():
        assert torch.equal(full[name], gradient) and torch.equal(selective[name], gradient), name
        assert torch.equal(gradient, reference[name]), name  # halves of the same gradient, summed


@pytest.mark.dist
def test_bfloat16_matrices_match_autocast_on_one_process():
    """Where embeddings and norms are gathered in float32, rounding differs only where gradients are summed."""
    settings = FsdpSettings(
        param_dtype=torch.bfloat16, keep_dtype=keep_vectors_and_embedding, reduce_dtype=torch.float32
    )
    reference, _ = transformer_reference(bfloat16=True)
    for gradients, parameters, log in run(2, transformer_gradients, settings, "none", True):
        assert all(param.dtype == torch.float32 for param in parameters.values())
        assert {line["dtype"] for line in log if line["op"] == "reduce_scatter_sum"} == {"float32"}
        for name, gradient in reference.items():
            atol = 2 * BF16_ROUNDING * gradient.abs().max().item()
            torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=atol)


def keep_vectors_and_embedding(name: str, param: torch.Tensor) -> bool:
    return param.ndim < 2 or name.startswith("embedding")


def two_backward_passes(mesh):
    strategy, _ = wrap(mesh, Case(), ZERO3)
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


def change_the_model(mesh):
    strategy, _ = wrap(mesh, Case(), ZERO3)
    strategy.model.one.requires_grad_(False)
    strategy.begin_micro_batch(last=True)
    share_of_loss(strategy.model, mesh.rank, mesh.size("dp"), 0).backward()
    try:
        strategy.finish_gradients()
    except UserError as error:
        return str(error)


@pytest.mark.dist
def test_a_parameter_frozen_after_wrapping_is_named():
    assert all("'one'" in message for message in run(2, change_the_model))


def gradients_in_a_group_of_one(mesh, settings, bfloat16=False, compiled=False):
    """Of the model as it is and wrapped, on the mesh's device."""
    found = []
    for settings_or_none in (None, settings):
        model = Transformer(MODEL)
        initialise(model, seed=1)
        model.to(mesh.device)
        if compiled:
            for block in model.blocks.values():
                block.compile()
        strategy = None
        if settings_or_none is not None:
            strategy = apply_fsdp(model, mesh, settings, model.blocks.values())
            strategy.begin_micro_batch(last=True)
        loss_share(model, 1, bfloat16).backward()
        if strategy is not None:
            strategy.finish_gradients()
            log = calls_and_bytes(mesh.log.drain(0))
        gradients = {name: param.grad for name, param in model.named_parameters()}
        found.append(gradients if strategy is None else strategy.full_gradients())
    return *found, log


def check_group_of_one(device: str, compiled: bool, tolerance: float, settings: FsdpSettings = ZERO3):
    bfloat16 = settings.param_dtype is not None
    pool = Pool(1, device, timeout_s=300.0) if compiled else pool_of(1, device)  # compiling takes its time
    job = partial(pool.run, degrees=Degrees(dp_shard=None), force=True)
    ((plain, wrapped, log),) = job(gradients_in_a_group_of_one, settings, bfloat16, compiled)
    if compiled:
        pool.kill()
    assert sum(calls for (op, _, _), (calls, _) in log.items() if op == "all_gather") == 2 * MODEL.num_layers
    for name, gradient in plain.items():
        atol = tolerance * gradient.abs().max().item()
        torch.testing.assert_close(wrapped[name], gradient, rtol=0, atol=atol)


BF16_SETTINGS = FsdpSettings(
    param_dtype=torch.bfloat16, keep_dtype=keep_vectors_and_embedding, reduce_dtype=torch.float32
)


@pytest.mark.dist
@pytest.mark.parametrize("settings", [ZERO3, BF16_SETTINGS], ids=["float32", "bfloat16"])
def test_a_forced_group_of_one_rank_changes_no_bit(settings):
    check_group_of_one("cpu", compiled=False, tolerance=0.0, settings=settings)


@pytest.mark.dist
@pytest.mark.slow
def test_compiled_blocks_in_a_group_of_one_match_unwrapped_ones():
    check_group_of_one("cpu", compiled=True, tolerance=FP32_GRADIENT)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_group_of_one_gpu_matches_the_unwrapped_model(compiled):
    check_group_of_one("cuda", compiled, tolerance=2 * BF16_ROUNDING, settings=BF16_SETTINGS)


def left_after_a_step(mesh):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    strategy = apply_fsdp(model, mesh, ZERO3, list(model))
    strategy.begin_micro_batch(last=True)
    model(torch.ones(2, 4)).sum().backward()
    strategy.finish_gradients()
    alive = weakref.ref(strategy), weakref.ref(model)
    del strategy, model
    gc.collect()
    return [one() is not None for one in alive]


@pytest.mark.dist
def test_a_strategy_is_freed_with_its_model():
    assert run(2, left_after_a_step) == [[False, False]] * 2
