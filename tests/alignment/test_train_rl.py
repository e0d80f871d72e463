"""Runs of train_rl: the parts agree with each other, a killed run goes on bit for bit, bad input ends in one line."""

import json
import warnings
from pathlib import Path

import pytest
import torch

from alignment import train_rl as script
from alignment.train_rl import train_rl
from alignment.train_rl_collect import NoSignalWarning
from configs.errors import UserError
from configs.run_dir import read_jsonl
from llm.checkpoint import load_checkpoint
from parallel.sharded_checkpoint_manifest import find_checkpoint
from tests.alignment.rl_start import rl_config, rl_start

BUSY = ("prompts_per_batch=6", "group_size=6", "temperature=1.2")  # enough completions that some groups say something


class Killed(Exception):
    """Stands for a kill: nothing after it runs."""


def run(runs_dir: Path, *overrides: str) -> dict:
    return train_rl(rl_config(runs_dir, *BUSY, *overrides))


def lines_of(runs_dir: Path) -> list[dict]:
    """metrics.jsonl without what a clock measured."""
    timed = ("_s", "_share", "per_s")
    return [
        {name: value for name, value in line.items() if not name.endswith(timed)}
        for line in read_jsonl(runs_dir / "rl" / "metrics.jsonl")
    ]


def last_checkpoint(runs_dir: Path) -> tuple[dict[str, torch.Tensor], dict]:
    return load_checkpoint(find_checkpoint(runs_dir / "rl" / "checkpoints"))


def assert_same_end(one: Path, other: Path) -> None:
    """Weights, optimizer, cursor, waiting groups, metrics and completions are equal to the last bit."""
    (tensors, state), (expected, expected_state) = last_checkpoint(one), last_checkpoint(other)
    assert tensors.keys() == expected.keys() and any(name.startswith("optimizer/") for name in tensors)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name
    for key in ("batch", "tokens_seen", "cursor", "ahead"):
        assert state[key] == expected_state[key], key
    assert lines_of(one) == lines_of(other)
    completions = [read_jsonl(path / "rl" / "completions.jsonl") for path in (one, other)]
    assert completions[0] == completions[1] and len(completions[0]) > 0


VARIANTS = {
    "plain": (),
    "one_step_off": ("one_step_off=true",),
    "several_updates": ("updates_per_batch=2", "epochs_per_batch=2", "algorithm.importance_cap=2.0"),
    "dynamic": ("algorithm=dapo", "algorithm.overlong_tokens=4"),
    "kl": ("algorithm.kl_coef=0.05",),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.filterwarnings("ignore::alignment.train_rl_collect.NoSignalWarning")
def test_a_killed_run_goes_on_bit_for_bit(variant, tmp_path, monkeypatch):
    overrides = (*VARIANTS[variant], "num_batches=4", "checkpoint.every_steps=2", "evaluate_every=2")
    run(tmp_path / "whole", *overrides)
    whole_batch, done = script.one_batch, []

    def die_in_the_fourth(*args):
        done.append(1)
        if len(done) == 4:
            raise Killed
        whole_batch(*args)

    monkeypatch.setattr(script, "one_batch", die_in_the_fourth)
    with pytest.raises(Killed):
        run(tmp_path / "killed", *overrides)
    monkeypatch.setattr(script, "one_batch", whole_batch)
    run(tmp_path / "killed", *overrides)
    assert_same_end(tmp_path / "killed", tmp_path / "whole")
    rewards = [line["reward"] for line in lines_of(tmp_path / "whole") if "reward" in line]
    assert max(rewards) > 0, "nothing was ever right: the run learned nothing and shows nothing"
    if variant == "dynamic":
        states = [json.loads(p.read_text()) for p in (tmp_path / "whole/rl/checkpoints").glob("*/state.json")]
        assert any(state["cursor"]["pending"] for state in states), "no group ever waited"
    if variant == "one_step_off":
        staleness = [line["staleness"] for line in lines_of(tmp_path / "whole") if "staleness" in line]
        assert staleness == [0, 1, 1, 1]


def test_an_on_policy_step_has_ratio_one_and_the_engine_agrees(tmp_path):
    run(tmp_path, "num_batches=2")
    for line in lines_of(tmp_path):
        if "reward" in line:
            assert line["ratio"] == 1.0 and line["clip_fraction"] == 0.0 and line["max_abs_log_ratio"] == 0.0
            assert line["max_sampler_mismatch"] < 1e-5


def test_the_ratio_begins_at_one_and_moves_with_further_updates(tmp_path):
    run(tmp_path, "num_batches=1", "epochs_per_batch=1", "updates_per_batch=1", "name=one")
    run(tmp_path, "num_batches=1", "epochs_per_batch=3", "name=three")
    one, three = (read_jsonl(tmp_path / name / "metrics.jsonl")[1] for name in ("one", "three"))
    assert one["max_abs_log_ratio"] == 0.0 and three["max_abs_log_ratio"] > 1e-3
    assert three["step"] == 3 and one["step"] == 1


def test_equal_rewards_are_tried_again_a_bounded_number_of_times(tmp_path):
    never = (f"train_data=[{{source: jsonl, path: {no_answer_file(tmp_path)}, split: all}}]",)
    with pytest.warns(NoSignalWarning, match="max_tries"):
        run(tmp_path, *never, "algorithm.dynamic_sampling=true", "max_tries=3", "num_batches=1")
    (line,) = (line for line in lines_of(tmp_path) if "reward" in line)
    assert line["tries"] == 3 and line["reward"] == 0.0 and line["informative_fraction"] == 0.0
    assert line["format_reward"] > 0, "a form without the right answer was seen"
    assert line["grad_norm"] == 0.0


def no_answer_file(tmp_path: Path) -> Path:
    """Sums whose stated answers no sum of two digits has."""
    path = tmp_path / "never.jsonl"
    rows = [{"question": f"What is {a} + {a}?", "answer": "1000"} for a in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_completions_that_the_limit_cuts_are_counted_and_learned_from(tmp_path):
    run(tmp_path, "num_batches=1", "max_new_tokens=4")
    (line,) = (line for line in lines_of(tmp_path) if "reward" in line)
    assert line["cut_fraction"] == 1.0 and line["response_tokens"] == 4.0 and line["reward"] == 0.0
    completions = read_jsonl(tmp_path / "rl" / "completions.jsonl")
    assert {one["finish_reason"] for one in completions} == {"length"} and {one["tokens"] for one in completions} == {4}


def test_the_record_splits_a_batch_into_its_parts(tmp_path):
    report = run(tmp_path, "num_batches=3")
    lines = [line for line in read_jsonl(tmp_path / "rl" / "metrics.jsonl") if "reward" in line]
    for line in lines:
        parts = [line[f"{name}_s"] for name in ("rollout", "reward", "log_prob", "update", "sync")]
        assert all(part > 0 for part in parts) and 0.5 < sum(parts) / line["step_time_s"] <= 1.0
        assert line["rollout_share"] == pytest.approx(line["rollout_s"] / line["step_time_s"])
        assert line["rollout_tokens"] == pytest.approx(line["response_tokens"] * 36)
    quantities = {row["quantity"] for row in report["rows"]}
    assert {"rollout", "reward", "log-probs", "update", "weights to the engine", "rollout share"} <= quantities
    assert report["state"] == "finished" and (tmp_path / "rl" / "report.html").exists()


def test_a_run_without_vllm_never_imports_it(tmp_path):
    import sys

    run(tmp_path, "num_batches=1")
    assert "vllm" not in sys.modules and "alignment.rollout_vllm" not in sys.modules


BAD = {
    "train_data=[]": "nothing to train on",
    "group_size=1": "group_size=1",
    "updates_per_batch=5": "must divide",
    "parallel.tp=2": "parallel.tp=2",
    "init_from=/nowhere": "/nowhere",
    "rollout_ranks=1": "rank",
    "temperature=0": "temperature",
    "kernels.cuda_graph=true": "cuda_graph",
    "rollout.engine=sglang": "ours, vllm",
}


@pytest.mark.parametrize("override", BAD)
def test_bad_input_ends_in_one_line(override, tmp_path):
    with pytest.raises(UserError, match=BAD[override]) as error:
        run(tmp_path, override)
    assert "\n" not in str(error.value)


def test_problems_that_exceed_the_window_are_left_out_or_refused(tmp_path, capsys):
    rows = [{"question": "What is 1 + 1? " * 40, "answer": "2"}, {"question": "What is 2 + 2?", "answer": "4"}]
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = "train_data=[{source: jsonl, path: %s, split: all, size: %d}]"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(tmp_path, data % (path, 2), "num_batches=1")
    assert "1 of 2 problems are left out" in capsys.readouterr().out
    with pytest.raises(UserError, match="max_tokens"):
        run(tmp_path, data % (path, 1), "num_batches=1", "name=none")


def test_a_held_out_problem_in_training_is_refused(tmp_path):
    with pytest.raises(UserError, match="held-out problem"):
        run(tmp_path, "held_out_data={source: arithmetic, level: one_digit_sums, split: train, size: 8, seed: 1}")


def test_a_run_that_is_out_of_time_is_evaluated_and_whole(tmp_path):
    report = run(tmp_path, "num_batches=50", "max_time_s=0.001")
    assert report["state"] == "stopped"
    assert [line["step"] for line in lines_of(tmp_path) if "val_accuracy" in line] == [0, 0]
    report = run(tmp_path, "num_batches=2", "max_time_s=null")
    assert report["state"] == "finished" and report["run"]["resumed_at_step"] is None
    assert last_checkpoint(tmp_path)[1]["batch"] == 2


def test_resume_none_refuses_to_mix(tmp_path):
    run(tmp_path, "num_batches=1")
    with pytest.raises(UserError, match="resume=none"):
        run(tmp_path, "num_batches=1", "resume=none")
    assert str(rl_start()) in (tmp_path / "rl" / "config.yaml").read_text()
