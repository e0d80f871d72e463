"""The benchmark of reinforcement learning: its held-out problems, where processes run, and what its rows say."""

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from alignment.dataset import normal_question
from alignment.evaluate_answers import Answer
from alignment.intervals import wilson_interval
from bench_mark.bench_mark_rl_figure import draw, read_runs, smooth
from bench_mark.bench_mark_rl_runs import Plan, Run, rl_runs, side_by_side, write_held_out
from bench_mark.bench_mark_rl_summary import compared, paired_gain, print_rows, rl_row, summarise
from configs.run_dir import read_jsonl

BATCH = {
    "response_tokens": 40.0, "kl": 0.01, "entropy": 0.3, "rollout_s": 0.3, "reward_s": 0.0, "log_prob_s": 0.1,
    "update_s": 0.2, "sync_s": 0.0, "step_time_s": 0.6, "tokens_per_s": 1000.0, "sampler_mismatch": 0.002,
    "max_sampler_mismatch": 0.1,
}  # fmt: skip
HELD_OUT = {"val_format_rate": 1.0, "val_problems": 50}


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(out=tmp_path / "out", work=tmp_path / "work", base="runs/x", held_out=50, level="mixed")


def write_run(plan: Plan, name: str, accuracies: list[float]) -> None:
    """A run whose held-out accuracy goes as given, greedy; sampled answers are 0.1 below."""
    directory = Path(plan.runs) / name
    directory.mkdir(parents=True)
    lines = []
    for step, value in enumerate(accuracies):
        lines.append({"step": step, "val_accuracy": value, "val_pass_at_1": value - 0.1} | HELD_OUT)
        if step < len(accuracies) - 1:
            lines.append({"step": step + 1, "batch": step + 1, "reward": 0.5 + 0.1 * step} | BATCH)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_held_out_problems_are_different_and_as_many_as_asked(plan: Plan) -> None:
    write_held_out(plan)
    write_held_out(plan)  # a second run in the same directory starts the file anew
    questions = [normal_question(row["question"]) for row in read_jsonl(plan.held_out_file)]
    assert len(questions) == len(set(questions)) == 50


def test_gains_are_those_of_the_runs(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    for run, accuracies in zip(rl_runs(plan), ([0.3, 0.4, 0.5], [0.3, 0.3, 0.46], [0.36, 0.5]), strict=False):
        write_run(plan, run.name, accuracies)
    found = summarise(plan, rl_runs(plan))
    assert len(found["rows"]) == 3 and list(found["algorithms"]) == ["grpo"]
    gain = found["algorithms"]["grpo"][""]
    assert gain["gain_over_problems"][0] == pytest.approx((0.2 + 0.16 + 0.14) / 3)
    mean, low, high = gain["gain_over_seeds"]
    half = 4.303 * math.sqrt(((0.2 - mean) ** 2 + (0.16 - mean) ** 2 + (0.14 - mean) ** 2) / 2 / 3)
    assert (low, high) == pytest.approx((mean - half, mean + half))
    assert found["algorithms"]["grpo"]["_sampled"]["sft"][0] == pytest.approx((0.2 + 0.2 + 0.26) / 3)
    print_rows(found["rows"])
    assert "0.300 -> 0.500" in capsys.readouterr().out


def write_answers(plan: Plan, name: str, right: list[list[bool]]) -> None:
    """An evaluation whose problems were answered as given, two samples each."""
    directory = Path(plan.runs) / f"eval_{name}"
    directory.mkdir(parents=True)
    lines = [
        Answer(row, sample, str(row), "mixed", "1", "", "1", one, True, "", 3, 4, False)
        for row, samples in enumerate(right)
        for sample, one in enumerate(samples)
    ]
    (directory / "answers.jsonl").write_text("".join(json.dumps(asdict(line)) + "\n" for line in lines))
    (directory / "report.json").write_text("{}")


def test_gain_is_paired_by_problem_over_all_seeds(plan: Plan) -> None:
    rows = [{"run": f"grpo_{seed}", "start": f"sft_{seed}"} for seed in (1, 2)]
    for seed in (1, 2):
        write_answers(plan, f"sft_{seed}", [[False, False]] * 10 + [[True, seed == 1]] * 10)
        assert paired_gain(plan, rows) is None  # of a seed the answers after RL are missing
        write_answers(plan, f"grpo_{seed}", [[True, False]] * 10 + [[True, True]] * 10)
    found = paired_gain(plan, rows)
    assert (found["before"], found["after"]) == pytest.approx(((0.5 + 0.25) / 2, 0.75))
    assert found["gain_over_seeds"][0] == pytest.approx(found["gain"][0]) == pytest.approx(0.375)
    # Half of the problems gain 0.5, half 0.25, by pairs: the spread of their mean is 0.125 / sqrt(20) = 0.028.
    assert 0.02 < found["gain"][0] - found["gain"][1] < 0.08


def test_longer_fine_tunings_are_compared_apart(plan: Plan) -> None:
    rows = [run.facts | {"run": run.name} for run in rl_runs(plan)]
    groups = {name: [row["run"] for row in own] for name, own in compared(plan, rows).items()}
    assert groups["grpo"] == ["grpo_g8_s1", "grpo_g8_s2", "grpo_g8_s3"]
    assert groups["after a longer fine-tuning"] == ["grpo_full_s1", "grpo_full_s2"]


def test_form_without_the_answer_is_counted_with_what_it_earned(plan: Plan) -> None:
    write_run(plan, "run", [0.3, 0.4])
    kept = [(1.0, 1.0, 1.0), (1.0, 0.0, 0.0), (1.0, 0.0, 0.25), (0.0, 0.0, 0.0)]
    names = ("format_reward", "answer_reward", "reward")
    lines = [json.dumps(dict(zip(names, one, strict=True))) + "\n" for one in kept]
    (Path(plan.runs) / "run" / "completions.jsonl").write_text("".join(lines))
    row = rl_row(plan, Run("run", []))
    assert (row["form_alone"], row["form_alone_reward"]) == (2, 0.25)


def test_intervals_are_of_the_problems_that_were_answered(plan: Plan) -> None:
    assert f"size: {plan.held_out}" in " ".join(rl_runs(plan)[0].command)
    plan.held_out = 5_000  # as planned, where the runs answered 50
    for run in rl_runs(plan)[:3]:
        write_run(plan, run.name, [0.3, 0.4, 0.5])
    _, low, high = summarise(plan, rl_runs(plan))["algorithms"]["grpo"][""]["rl"]
    assert (low, high) == pytest.approx(wilson_interval(75, 150))


def test_a_run_that_measured_nothing_has_no_row(plan: Plan) -> None:
    assert rl_row(plan, Run("absent", [])) is None
    write_run(plan, "stopped", [0.3])
    assert rl_row(plan, Run("stopped", [])) is None


def test_processes_are_dealt_over_devices_and_failures_noted(plan: Plan) -> None:
    plan.devices = ("4", "5")
    show = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    runs = [Run(f"run{i}", [sys.executable, "-c", show]) for i in range(3)]
    runs.append(Run("broken", [sys.executable, "-c", "raise SystemExit(3)"]))
    side_by_side(plan, runs, 60.0)
    assert [(plan.out / "logs" / f"run{i}.txt").read_text().strip() for i in range(3)] == ["4", "5", "4"]
    assert len(plan.notes) == 1 and plan.notes[0].startswith("broken ended with 3")


def test_curves_are_drawn_of_what_a_run_kept(plan: Plan, tmp_path: Path) -> None:
    plan.work = plan.out  # where the small files end
    for run in rl_runs(plan)[:2]:
        write_run(plan, run.name, [0.3, 0.4, 0.5])
    (plan.out / "summary.json").write_text(json.dumps(summarise(plan, rl_runs(plan))))
    runs = read_runs(plan.out)
    assert [len(run["batches"]) for run in runs] == [2, 2] and [len(run["held_out"]) for run in runs] == [3, 3]
    draw(runs, tmp_path / "curves")
    assert (tmp_path / "curves.png").stat().st_size > 10_000 and (tmp_path / "curves.pdf").exists()


def test_smoothing_takes_no_value_from_later_batches() -> None:
    assert smooth([1.0, 3.0, 5.0, 7.0, 9.0, 11.0]) == [1.0, 2.0, 3.0, 4.0, 5.0, 7.0]
