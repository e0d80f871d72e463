"""train_rl on several ranks: data parallel and split by role, against one process."""

from pathlib import Path

import pytest

from alignment.train_rl import run_batches
from alignment.train_rl_record import RlRecord
from alignment.train_rl_setup import set_up
from configs.run_dir import read_jsonl
from llm.checkpoint import load_checkpoint
from llm.training_signals import StopSignals
from parallel.mesh import Mesh
from parallel.mesh_roles import share_roles, split_roles
from parallel.sharded_checkpoint_manifest import find_checkpoint
from tests.alignment.rl_start import rl_config, rl_start
from tests.parallel.pool import run_ranks
from tests.tolerances import RL_RANKS

pytestmark = pytest.mark.dist
RUN = ("prompts_per_batch=6", "group_size=6", "temperature=1.2", "num_batches=3", "evaluate_every=3", "device=cpu")
SGD = ("optimizer=sgd", "optimizer.lr=0.5", "optimizer.weight_decay=0.0", "optimizer.clip_norm=null")


def run_rl(mesh: Mesh, runs_dir: str, start: str, overrides: tuple[str, ...]) -> dict:
    """One rank of a run, on a mesh that exists."""
    config = rl_config(Path(runs_dir), *RUN, *overrides, start=start)
    split = config.rollout_ranks > 0
    roles = split_roles(mesh, config.rollout_ranks, config.parallel.degrees()) if split else share_roles(mesh)
    with StopSignals() as signals:
        run = set_up(config, roles)
        record = RlRecord(run)
        record.begin({})
        record.close(run_batches(run, record, signals))
    return {"trains": run.training is not None, "writes": run.rollout is not None, "version": run.batch}


def result(runs_dir: Path) -> tuple[dict, list[dict]]:
    tensors, _ = load_checkpoint(find_checkpoint(runs_dir / "rl" / "checkpoints"), prefix="model/")
    return tensors, read_jsonl(runs_dir / "rl" / "metrics.jsonl")


def run_on(ranks: int, runs_dir: Path, *overrides: str) -> list[dict]:
    return run_ranks(run_rl, ranks, str(runs_dir), str(rl_start()), overrides)


def assert_close(one: Path, other: Path, tolerance: float) -> None:
    """The same completions, and weights within `tolerance` of the largest change."""
    (tensors, lines), (expected, expected_lines) = result(one), result(other)
    for name, tensor in tensors.items():
        scale = expected[name].abs().max()
        assert (tensor - expected[name]).abs().max() <= tolerance * scale, name
    rewards = [[line["reward"] for line in found if "reward" in line] for found in (lines, expected_lines)]
    assert rewards[0] == rewards[1] and max(rewards[0]) > 0
    for name in ("response_tokens", "target_tokens", "rollout_tokens"):
        assert [x.get(name) for x in lines] == [x.get(name) for x in expected_lines]
    for name in ("entropy", "nll", "val_accuracy"):
        columns = [[line[name] for line in found if name in line] for found in (lines, expected_lines)]
        assert columns[0] == pytest.approx(columns[1], rel=1e-3)


AGGREGATIONS = ("token_mean", "sequence_mean", "constant")


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_two_ranks_with_unequal_tokens_are_one(aggregation, tmp_path):
    chosen = (*SGD, f"algorithm.aggregation={aggregation}")
    run_on(1, tmp_path / "one", *chosen)
    run_on(2, tmp_path / "two", *chosen, "micro_batch_tokens=200")
    assert_close(tmp_path / "two", tmp_path / "one", RL_RANKS)


@pytest.mark.parametrize("layout", (("zero=1",), ("zero=1", "transport=peer"), ("zero=3",)))
def test_sharded_training_ranks_are_one(layout, tmp_path):
    run_on(1, tmp_path / "one", *SGD)
    run_on(2, tmp_path / "two", *SGD, *(f"parallel.{setting}" for setting in layout))
    assert_close(tmp_path / "two", tmp_path / "one", RL_RANKS)


@pytest.mark.parametrize("one_step_off", (False, True))
def test_a_rank_that_only_writes_changes_nothing(one_step_off, tmp_path):
    """One rank trains and one writes: to the last bit what a rank that does both gives, with the same lag."""
    chosen = (f"one_step_off={str(one_step_off).lower()}",)
    run_on(1, tmp_path / "shared", *chosen)
    roles = run_on(2, tmp_path / "split", *chosen, "rollout_ranks=1")
    assert [(role["trains"], role["writes"]) for role in roles] == [(True, False), (False, True)]
    assert {role["version"] for role in roles} == {3}
    assert_close(tmp_path / "split", tmp_path / "shared", 0.0)


def test_two_train_and_two_write(tmp_path):
    run_on(1, tmp_path / "one", *SGD, "one_step_off=true")
    roles = run_on(4, tmp_path / "four", *SGD, "one_step_off=true", "rollout_ranks=2", "parallel.zero=2")
    assert [role["trains"] for role in roles] == [True, True, False, False]
    assert_close(tmp_path / "four", tmp_path / "one", RL_RANKS)
