"""A run saved under one data layout goes on under another as if it had been one process: losses, norms, parameters.

In float64, so that nothing but the order of sums may differ; the model is the parity harness', with parameters of 1, 7
and 13 elements, tied tables, and some that never get a gradient.
"""

from dataclasses import dataclass, field
from itertools import product

import pytest
import torch

from configs.errors import UserError
from llm.args import ParallelConfig
from llm.checkpoint import load_checkpoint, restore, save_checkpoint
from llm.checkpoint_pieces import Held, held_pieces
from llm.loss import CrossEntropyLoss
from llm.parallelize import make_forward_loss, parallelize
from llm.training_step import TrainingStep, rows_of_rank
from parallel.mesh import Mesh
from parallel.sharded_checkpoint_manifest import find_checkpoint
from parallel.sharded_checkpoint_pieces import Piece
from tests.parallel.pool import pool_of
from tests.parity.cases import ADAMW64, MUON, ROWS, SGD64, Case, global_batch, make_model, micro_batches_of
from tests.parity.layouts import Layout, parse_layout

HALF, STEPS = 3, 6
pytestmark = pytest.mark.dist


@dataclass
class Part:
    """Some steps of a run: what each rank sees of them."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict | None = None


def train_part(mesh, case: Case, parallel: ParallelConfig, steps: range, load=None, save=None) -> Part:
    """Steps of a run: from the initial weights or the newest checkpoint in `load`, at the end saved in `save`."""
    config = case.train_config(parallel)
    config.max_steps = STEPS
    parts = parallelize(make_model(case, mesh.device), config, mesh)
    sharding = parts.strategy if hasattr(parts.strategy, "pieces") else None
    held = held_pieces(parts.model, parts.optimizer, mesh, sharding)
    part = Part()
    if load is not None:
        part.state = restore(held, find_checkpoint(load, mesh), mesh)
    step = TrainingStep(config, mesh, parts, make_forward_loss(parts.head_model, CrossEntropyLoss(), parts.compile))
    for number in steps:
        taken = step.run(number, micro_batches_of(global_batch(number), rows_of_rank(ROWS, mesh), 1, 0))
        part.losses.append(taken.mean_losses(mesh)[0])
        part.norms.append(taken.gradient_norm)
    if save is not None:
        save_checkpoint(save, steps.stop, held.pieces(), {"data": {"next_batch": steps.stop}}, mesh=mesh)
    part.parameters = {name: value.clone() for name, value in parts.strategy.full_parameters().items()}
    return part


def on(layout: Layout, *args, **kwargs) -> list[Part]:
    """train_part on every rank of a layout; a single rank that is not forced is this process."""
    config = layout.config()
    if layout.world_size == 1:
        mesh = Mesh(0, 0, 1, torch.device("cpu"), "none", {})
        return [train_part(mesh, args[0], config, *args[1:], **kwargs)]
    return pool_of(layout.world_size).run(
        train_part, args[0], config, *args[1:], *kwargs.values(), degrees=layout.degrees()
    )


@pytest.fixture(scope="module")
def reference():
    """Six steps of one process, never interrupted, of each case."""
    known: dict[str, Part] = {}

    def of(case: Case) -> Part:
        if case.name not in known:
            known[case.name] = on(parse_layout("dp=1"), case, range(STEPS))[0]
        return known[case.name]

    return of


PAIRS = [
    ("dp=1", "dp=3,zero=3", ADAMW64),
    ("dp=4,zero=1", "dp=2,zero=2", ADAMW64),
    ("dp=3,zero=3", "dp=1", ADAMW64),
    ("dp=2,zero=2", "dp=3,zero=1", ADAMW64),
    ("dp=2", "dp=4,dp_shard=2,zero=3", ADAMW64),
    ("dp=4,dp_shard=2,zero=1", "dp=3", ADAMW64),
    ("dp=3,zero=1", "dp=3,zero=1", ADAMW64),
    ("dp=3,zero=3", "dp=2,zero=1", MUON),
    ("dp=2,zero=1", "dp=1", MUON),
    ("dp=2,zero=3", "dp=3", SGD64),
    ("tp=2", "dp=3,zero=3", ADAMW64),
    ("dp=2,zero=1", "tp=4", ADAMW64),
    ("dp=2,tp=2,zero=3", "dp=2,zero=2", ADAMW64),
    ("dp=2,pp=2,zero=3", "dp=3,zero=1", ADAMW64),
    ("dp=2,tp=2", "dp=2,pp=2,zero=2", ADAMW64),
    ("dp=2,pp=2,zero=2", "dp=2,pp=2,zero=3,pp_schedule=zero_bubble", MUON),
]
GRID = ("dp=1", "dp=2", "dp=3,zero=1", "dp=4,zero=1", "dp=2,zero=2", "dp=4,dp_shard=2,zero=2", "dp=3,zero=3",
        "dp=4,zero=3", "dp=4,dp_shard=2,zero=3")  # fmt: skip


def goes_on(tmp_path, saved: str, loaded: str, case: Case, whole: Part) -> None:
    before = on(parse_layout(saved), case, range(HALF), load=None, save=tmp_path)
    after = on(parse_layout(loaded), case, range(HALF, STEPS), load=tmp_path, save=None)
    assert before[0].losses == pytest.approx(whole.losses[:HALF], rel=case.loss_error)
    # What the weights' own rounding (Muon's bfloat16 iteration) makes of later steps.
    loss_error, norm_error = max(case.loss_error, case.parameter_error), max(case.norm_error, case.parameter_error)
    for part in after:
        assert part.state["data"] == {"next_batch": HALF}
        assert part.losses == pytest.approx(whole.losses[HALF:], rel=loss_error)
        assert part.norms == pytest.approx(whole.norms[HALF:], rel=norm_error)
    for name, expected in whole.parameters.items():
        error = (after[0].parameters[name] - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
        assert error <= case.parameter_error, (name, error)


@pytest.mark.parametrize(("saved", "loaded", "case"), PAIRS, ids=lambda value: getattr(value, "optimizer", value))
def test_a_run_goes_on_under_another_layout(tmp_path, saved, loaded, case, reference):
    goes_on(tmp_path, saved, loaded, case, reference(case))


@pytest.mark.parametrize("layout", ["dp=1", "dp=2", "dp=3,zero=1", "dp=3,zero=3", "dp=2,pp=2,zero=3"])
def test_under_the_same_layout_it_goes_on_bit_for_bit(tmp_path, layout):
    layout = parse_layout(layout)
    uninterrupted = on(layout, ADAMW64, range(STEPS))
    on(layout, ADAMW64, range(HALF), load=None, save=tmp_path)
    for part, whole in zip(
        on(layout, ADAMW64, range(HALF, STEPS), load=tmp_path, save=None), uninterrupted, strict=True
    ):
        assert (part.losses, part.norms) == (whole.losses[HALF:], whole.norms[HALF:])
        assert all(torch.equal(part.parameters[name], value) for name, value in whole.parameters.items())


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "loaded"), list(product(GRID, GRID)))
def test_any_layout_goes_on_under_any_other(tmp_path, saved, loaded, reference):
    goes_on(tmp_path, saved, loaded, ADAMW64, reference(ADAMW64))


def test_every_layout_saves_the_same_tensors(tmp_path):
    """Each state once and in full, whoever held it: equal names and shapes, values equal to rounding."""
    saved = {}
    layouts = ("dp=1", "dp=2", "dp=3,zero=1", "dp=2,zero=2", "dp=4,dp_shard=2,zero=3", "dp=2,pp=2,zero=3")
    for number, layout in enumerate(layouts):
        directory = tmp_path / str(number)
        on(parse_layout(layout), ADAMW64, range(HALF), load=None, save=directory)
        saved[layout] = load_checkpoint(find_checkpoint(directory))[0]
    one = saved.pop("dp=1")
    assert "optimizer/never/step" not in one and one["optimizer/single/step"].item() == HALF
    for layout, tensors in saved.items():
        assert tensors.keys() == one.keys(), layout
        for name, value in one.items():
            assert tensors[name].dtype == value.dtype, (layout, name)
            torch.testing.assert_close(tensors[name], value, rtol=1e-9, atol=1e-12, msg=f"{layout} {name}")


def restore_other(mesh, case, parallel, path):
    """What every rank is told when the checkpoint is of another optimizer, and whether anything was changed."""
    parts = parallelize(make_model(case, mesh.device), case.train_config(parallel), mesh)
    before = {name: value.clone() for name, value in parts.strategy.full_parameters().items()}
    sharding = parts.strategy if parallel.zero else None
    try:
        restore(held_pieces(parts.model, parts.optimizer, mesh, sharding), path, mesh)
    except UserError as error:
        after = parts.strategy.full_parameters()
        return str(error), all(torch.equal(before[name], after[name]) for name in before), len(parts.optimizer.state)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_another_optimizer_is_refused_on_every_rank_in_the_same_words(tmp_path, zero):
    on(parse_layout("dp=1"), ADAMW64, range(1), load=None, save=tmp_path)
    layout = parse_layout(f"dp=3,zero={zero}")
    results = pool_of(3).run(restore_other, MUON, layout.config(), find_checkpoint(tmp_path), degrees=layout.degrees())
    assert len(set(results)) == 1, results
    message, unchanged, states = results[0]
    assert "does not fit the optimizer" in message and unchanged and states == 0


def test_a_state_is_saved_in_one_order_however_it_was_made():
    """A restored state is made in the order of a set of names, which differs between processes."""
    param = torch.nn.Parameter(torch.zeros(2))
    states = [dict.fromkeys(names, torch.zeros(2)) for names in (("exp_avg", "exp_avg_sq"), ("exp_avg_sq", "exp_avg"))]
    held = [Held([], [Piece("weight", (2,), 0, param)], {"weight": "adamw"}, {param: state}) for state in states]
    one, other = ([piece.name for piece in each.pieces()] for each in held)
    assert one == other == ["optimizer/weight/exp_avg", "optimizer/weight/exp_avg_sq"]
