"""Tensor parallelism on gloo ranks beside the whole model: parts, logits, fused loss, weights, checkpoints, errors."""

from dataclasses import replace

import pytest
import torch

from configs.errors import UserError
from llm.args import DataConfig, ModelConfig, ParallelConfig, TrainConfig
from llm.checkpoint import restore, save_checkpoint
from llm.checkpoint_pieces import held_pieces
from llm.loss import CrossEntropyLoss
from llm.optimizer import OptimizerConfig
from llm.parallelize import make_forward_loss, parallelize
from llm.parallelize_tensor import apply_tensor, check_tensor
from llm.training_step import TrainingStep
from llm.transformer import Transformer
from llm.transformer_init import initialise, transformer_on_meta
from parallel.tensor_parallel_placement import Placement, place
from tests.parallel.pool import pool_of
from tests.parity.cases import global_batch
from tests.tolerances import FP64

MODEL = ModelConfig(
    vocab_size=61, max_seq_len=8, d_model=16, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=24, qkv_bias=True,
    qk_norm=True, tie_embeddings=True,
)  # fmt: skip
ADAMW = OptimizerConfig(name="adamw", lr=0.01)


def config_of(parallel: ParallelConfig, model: ModelConfig = MODEL) -> TrainConfig:
    return TrainConfig(
        name="tensor", model=model, optimizer=ADAMW, data=DataConfig(seq_len=8), parallel=parallel, dtype="float32",
        global_batch_tokens=24 * 8,
    )  # fmt: skip


def run(function, parallel: ParallelConfig, *args):
    size = (parallel.dp or 1) * parallel.tp * parallel.pp
    degrees = parallel.degrees().resolve(size)
    return pool_of(size).run(function, parallel, *args, degrees=degrees)


def whole_model(model: ModelConfig = MODEL, dtype=torch.float64) -> Transformer:
    made = Transformer(model)
    initialise(made, seed=3)
    with torch.no_grad():
        for param in made.parameters():
            if param.ndim == 1:
                param.add_(torch.linspace(-0.2, 0.3, param.numel()))
    return made.to(dtype)


PLACES = [
    Placement((7, 3), 2, 0, 2), Placement((8, 3), 4, 0, 2, True), Placement((5, 6), 3, 1, 3), Placement((4,), 4, 0, 4),
    Placement((4, 2), 2), Placement((6, 5), 4, 0, 1),
]  # fmt: skip


@pytest.mark.parametrize("placement", PLACES, ids=str)
def test_parts_make_the_whole_again(placement):
    full = torch.randn(placement.shape)
    parts = torch.stack([placement.slice(full, rank) for rank in range(placement.ranks)])
    assert parts.shape[1:] == placement.local_shape
    assert torch.equal(placement.assemble(parts), full)
    for rank in range(placement.ranks):
        offsets, sizes = placement.box(rank)
        box = full[tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))]
        own = parts[rank][tuple(slice(0, size) for size in sizes)]
        assert torch.equal(own, box) and parts[rank].sum().isclose(box.sum())  # what is more is zero


def test_copies_are_neighbours_and_each_part_is_first_once():
    placement = Placement((6, 3), 6, 0, 3, True)
    assert [placement.part(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [placement.copy(rank) for rank in range(6)] == [0, 1, 0, 1, 0, 1]


def test_a_rank_without_rows_is_refused():
    with pytest.raises(UserError, match=r"parallel.tp=4 leaves a rank nothing of embedding.weight.* at most 3"):
        place((6, 2), 4, 0, 4, False, "embedding.weight")
    assert place((7, 2), 4, 0, 4, False, "embedding.weight").local_shape == (2, 2)


@pytest.mark.parametrize(
    ("model", "parallel", "message"),
    [
        (MODEL, ParallelConfig(tp=3), r"parallel.tp=3 must divide num_heads=4; use one of \[1, 2, 4\]"),
        (replace(MODEL, d_ff=25), ParallelConfig(tp=2), "parallel.tp=2 must divide d_ff=25; change model.d_ff to 26"),
        (replace(MODEL, num_heads=12, num_kv_heads=4, head_dim=2), ParallelConfig(tp=6), "num_kv_heads=4 or be a mult"),
        (replace(MODEL, num_heads=16, head_dim=2, d_ff=32), ParallelConfig(tp=16), "parallel.sequence_parallel=false"),
    ],
    ids=["heads", "width", "kv heads", "sequence"],
)
def test_a_degree_that_does_not_divide_is_refused_in_one_line(model, parallel, message):
    with pytest.raises(UserError, match=message) as error:
        check_tensor(config_of(parallel, model))
    assert "\n" not in str(error.value)


def logits_of_parts(mesh, parallel, model):
    cut = whole_model(model)
    apply_tensor(cut, config_of(parallel, model), mesh)
    batch = global_batch(0)
    with torch.no_grad():
        return cut(batch.token_ids)


@pytest.mark.dist
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("tp", "by_tokens"), [(2, True), (2, False), (4, True)])
def test_every_rank_gets_the_logits_of_the_whole_model(tp, by_tokens, kv_heads):
    model = replace(MODEL, num_kv_heads=kv_heads)
    with torch.no_grad():
        expected = whole_model(model)(global_batch(0).token_ids)
    for logits in run(logits_of_parts, ParallelConfig(tp=tp, sequence_parallel=by_tokens), model):
        assert logits.shape == expected.shape
        assert (logits - expected).abs().max() <= FP64 * expected.abs().max()


def seams_of_one_rank(mesh, parallel):
    model = whole_model()
    return apply_tensor(model, config_of(parallel), mesh) is None and model.output.matmul is torch.nn.functional.linear


@pytest.mark.dist
def test_one_rank_along_the_axis_changes_nothing():
    assert all(run(seams_of_one_rank, ParallelConfig(dp=2)))


def drawn_weights(mesh, parallel):
    config = config_of(parallel)
    parts = parallelize(transformer_on_meta(config.model), config, mesh)
    return parts.strategy.full_parameters()


@pytest.mark.dist
def test_parts_that_are_drawn_where_they_lie_are_those_of_one_device():
    expected = Transformer(MODEL)
    initialise(expected, config_of(ParallelConfig()).seed)
    for drawn in run(drawn_weights, ParallelConfig(dp=2, tp=2, zero=3)):
        for name, param in expected.named_parameters():
            assert torch.equal(drawn[name], param.detach()), name


def train_and_save(mesh, parallel, directory, steps, path=None):
    """Some steps from a checkpoint or from the start, saved; full parameters and pieces' count."""
    config = config_of(parallel)
    parts = parallelize(whole_model(), config, mesh)
    sharding = parts.strategy if hasattr(parts.strategy, "pieces") else None
    held = held_pieces(parts.model, parts.optimizer, mesh, sharding)
    if path is not None:
        restore(held, path, mesh)
    step = TrainingStep(config, mesh, parts, make_forward_loss(parts.head_model, CrossEntropyLoss(), "none"))
    share = 24 // mesh.size("dp")
    for number in steps:
        batch = global_batch(number)
        rows = slice(share * mesh.rank_in("dp"), share * (mesh.rank_in("dp") + 1))
        targets = batch.targets[rows]
        own = type(batch)(batch.token_ids[rows], targets, int((targets != -100).sum()))
        step.run(number, [own])
    held = held_pieces(parts.model, parts.optimizer, mesh, sharding)
    saved = save_checkpoint(directory, steps[-1] + 1, held.pieces(), {"step": steps[-1] + 1}, mesh=mesh)
    return str(saved), parts.strategy.full_parameters()


@pytest.mark.dist
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ParallelConfig(tp=2), ParallelConfig(tp=4)),
        (ParallelConfig(tp=4), ParallelConfig(dp=2, tp=2, zero=3)),
        (ParallelConfig(dp=2, tp=2, zero=1), ParallelConfig(dp=2, zero=3)),
        (ParallelConfig(dp=2), ParallelConfig(tp=2)),
        (ParallelConfig(tp=2, pp=2), ParallelConfig(tp=4)),
    ],
    ids=["2 to 4", "4 to 2 under zero 3", "zero 1 to none", "none to 2", "2 in stages to 4"],
)
def test_a_checkpoint_continues_under_another_degree(before, after, tmp_path):
    path, _ = run(train_and_save, before, str(tmp_path / "a"), [0, 1, 2])[0]
    _, resumed = run(train_and_save, after, str(tmp_path / "b"), [3, 4], path)[0]
    _, straight = run(train_and_save, after, str(tmp_path / "c"), [0, 1, 2, 3, 4])[0]
    for name, param in straight.items():
        assert (resumed[name] - param).abs().max() <= 1e3 * FP64 * param.abs().max(), name


def run_alone_when_gathered(mesh, parallel):
    model = whole_model()
    before = {name: id(param) for name, param in model.named_parameters()}
    parts = parallelize(model, config_of(parallel), mesh)
    cut = {name: id(param) for name, param in model.named_parameters()}
    mesh.log.drain(0)
    ids = global_batch(0).token_ids
    with parts.strategy.gathered(), torch.no_grad():
        mesh.log.drain(0)
        alone = model(ids) if mesh.is_main else None
        sent = mesh.log.drain(0)
    again = {name: id(param) for name, param in model.named_parameters()}
    with torch.no_grad():
        together = model(ids)
    return alone, together, sent, before.keys() == cut.keys() and again == cut


@pytest.mark.dist
@pytest.mark.parametrize("parallel", [ParallelConfig(tp=2), ParallelConfig(dp=2, tp=2, zero=3)], ids=["ddp", "fsdp"])
def test_a_gathered_model_runs_on_one_rank_alone(parallel):
    with torch.no_grad():
        expected = whole_model()(global_batch(0).token_ids)
    for rank, (alone, together, sent, same) in enumerate(run(run_alone_when_gathered, parallel)):
        assert same and not sent
        assert (together - expected).abs().max() <= FP64 * expected.abs().max()
        if rank == 0:
            assert (alone - expected).abs().max() <= FP64 * expected.abs().max()


def gradients_of_compiled(mesh, parallel, compiled):
    model = whole_model()
    apply_tensor(model, config_of(parallel), mesh)
    if compiled:
        for block in model.blocks.values():
            block.compile(backend="aot_eager", fullgraph=True)  # a break in a graph would raise
    sums = make_forward_loss(model, CrossEntropyLoss(), "none")(global_batch(0))
    sums.loss_sum.backward()
    return [param.grad for param in model.parameters()]


@pytest.mark.dist
@pytest.mark.parametrize("by_tokens", [True, False])
def test_blocks_compile_without_a_break(by_tokens):
    parallel = ParallelConfig(tp=2, sequence_parallel=by_tokens)
    eager, compiled = (run(gradients_of_compiled, parallel, flag) for flag in (False, True))
    for wanted, got in zip(eager, compiled, strict=True):
        for one, other in zip(wanted, got, strict=True):
            assert (one - other).abs().max() <= FP64 * one.abs().max()
