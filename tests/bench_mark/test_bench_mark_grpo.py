"""bench_mark_grpo: our contestant does the work that it claims, and the table divides the right numbers."""

import pytest
import torch

from alignment.cost_model import RlPrediction
from bench_mark.bench_mark_grpo import rows_of
from bench_mark.bench_mark_grpo_contestants import Case, Ours, StepTime, grade, reward_of
from bench_mark.bench_mark_serve_model import make_model
from configs.errors import UserError
from parallel.mesh import close_mesh, init_mesh


def test_a_step_of_ours_writes_every_completion_to_its_length_and_learns(tmp_path):
    case = Case("mew-1m", prompts=2, group=2, new=5, micro_rows=4)
    checkpoint, _, _ = make_model(case.model, tmp_path, torch.float32)
    world = init_mesh("cpu")
    try:
        ours = Ours(case, checkpoint, tmp_path / "runs", world)
        before = {name: tensor.clone() for name, tensor in ours.run.training.model.state_dict().items()}
        times = [ours.step(), ours.step()]
        after = ours.run.training.model.state_dict()
    finally:
        close_mesh(world)
    assert [one.tokens for one in times] == [4 * 5, 4 * 5]
    assert all(0 < one.rollout_s < one.step_s for one in times)
    assert any(not torch.equal(before[name], after[name]) for name in before), "rewards differ, so weights must move"
    assert len(ours.prompts) == case.prompts
    assert ours.run.rollout.collector.task.params.stop_ids == (), "the end of text must end nothing"


def test_rewards_differ_between_texts():
    rewards = [one["reward"] for one in grade([f"text {i}" for i in range(8)], [])]
    assert len(set(rewards)) > 2 and rewards[3] == reward_of("text 3")


def test_the_table_sets_tokens_a_second_of_medians_beside_each_other():
    predicted = RlPrediction(rollout_s=1.0, log_prob_s=0.0, update_s=1.0, sync_s=0.0)
    own = [StepTime(step, 0.5, 100, {}) for step in (1.0, 2.0, 9.0)]
    theirs = [StepTime(8.0, 6.0, 100, {})]
    rows = {row["what"]: row for row in rows_of(predicted, own, theirs)}
    assert rows["ours: completion tokens/s"]["measured"] == 50
    assert rows["ours: completion tokens/s"]["predicted"] == 50
    assert rows["TRL: completion tokens/s"]["measured"] == 12.5
    assert rows["ours: rollout share"]["ratio"] == pytest.approx(0.25 / 0.5)
    assert rows["ours over TRL, tokens/s"]["measured"] == 4


def test_rows_that_do_not_fill_micro_batches_are_refused():
    with pytest.raises(UserError, match="micro_rows=3"):
        Case("mew-1m", prompts=2, group=2, new=5, micro_rows=3)
