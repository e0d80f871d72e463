"""What the runs of the reinforcement-learning benchmark came to: rows, gains with their intervals, and the table."""

import shutil
from pathlib import Path
from typing import Any

from alignment.evaluate_answers import read_answers
from alignment.evaluate_statistics import paired_difference
from alignment.evaluate_summary import mean_of
from alignment.train_rl_summary import difference_interval, mean_interval, pooled_interval
from bench_mark.bench_mark_rl_runs import EVALUATED_SAMPLES, Plan, Run
from configs.run_dir import RunDir, read_json, read_jsonl

KEPT = ("metrics.jsonl", "report.json", "config.yaml", "completions.jsonl", "samples.txt")
SPLIT = ("rollout_s", "reward_s", "log_prob_s", "update_s", "sync_s", "step_time_s")
MISMATCH = ("sampler_mismatch", "max_sampler_mismatch")


def accuracy_lines(plan: Plan, name: str) -> list[dict[str, Any]]:
    """The held-out lines of a run; none of one that did not come so far."""
    path = Path(plan.runs) / name / "metrics.jsonl"
    return [line for line in read_jsonl(path) if "val_accuracy" in line] if path.exists() else []


def batch_lines(plan: Plan, name: str) -> list[dict[str, Any]]:
    path = Path(plan.runs) / name / "metrics.jsonl"
    return [line for line in read_jsonl(path) if "reward" in line] if path.exists() else []


def keep(plan: Plan, name: str) -> None:
    """Small files of a run, without its weights; of an evaluation's answers the first lines."""
    source, target = Path(plan.runs) / name, plan.out / "runs" / name
    target.mkdir(parents=True, exist_ok=True)
    for file in KEPT:
        if (source / file).exists():
            shutil.copyfile(source / file, target / file)
    if (source / "answers.jsonl").exists():
        with open(source / "answers.jsonl", encoding="utf-8") as lines:
            head = [line for _, line in zip(range(8 * EVALUATED_SAMPLES), lines, strict=False)]
        (target / "answers_head.jsonl").write_text("".join(head), encoding="utf-8")


def rl_row(plan: Plan, run: Run) -> dict[str, Any] | None:
    """Held-out accuracy before and after, and where the time went; None for a run that measured nothing."""
    lines, batches = accuracy_lines(plan, run.name), batch_lines(plan, run.name)
    if len(lines) < 2 or not batches:
        return None
    late = batches[1:] or batches
    row = {"run": run.name, **run.facts, "batches": batches[-1]["batch"], "evaluated_at": lines[-1]["step"]}
    for kind, name in (("", "val_accuracy"), ("_sampled", "val_pass_at_1")):
        row |= {f"sft{kind}": lines[0][name], f"rl{kind}": lines[-1][name]}
        row |= {f"curve{kind}": [(line["step"], line[name]) for line in lines]}
    row["problems"] = lines[-1]["val_problems"]
    row |= {"format_first": lines[0]["val_format_rate"], "format_last": lines[-1]["val_format_rate"]}
    for field, name in (("reward", "reward"), ("tokens", "response_tokens"), ("kl", "kl"), ("entropy", "entropy")):
        row |= {f"{field}_first": batches[0].get(name), f"{field}_last": batches[-1].get(name)}
    row |= {name: sum(line[name] for line in late) / len(late) for name in (*SPLIT, "tokens_per_s")}
    row["rollout_share"] = row["rollout_s"] / row["step_time_s"]
    row["sampler_mismatch"] = sum(line["sampler_mismatch"] for line in batches) / len(batches)
    row["max_sampler_mismatch"] = max(line["max_sampler_mismatch"] for line in batches)
    return row | form_alone(plan, run.name) | predicted_share(plan, run.name)


def form_alone(plan: Plan, name: str) -> dict[str, Any]:
    """Of the completions that were kept: the well-formed ones with a wrong answer, and what they earned together."""
    path = Path(plan.runs) / name / "completions.jsonl"
    kept = read_jsonl(path) if path.exists() else []
    wrong = [one for one in kept if one["format_reward"] > 0 and one["answer_reward"] == 0]
    return {"form_alone": len(wrong), "form_alone_reward": sum(one["reward"] for one in wrong)}


def predicted_share(plan: Plan, name: str) -> dict[str, Any]:
    """What the run's report says of its rollout's share, predicted and measured."""
    path = Path(plan.runs) / name / "report.json"
    rows = read_json(path).get("rows", []) if path.exists() else []
    found = next((row for row in rows if row["quantity"] == "rollout share"), None)
    return {} if found is None else {"predicted_rollout_share": found["predicted"], "share_ratio": found["ratio"]}


def mismatch(plan: Plan, run: Run) -> dict[str, Any] | None:
    """Trainer against sampler in one precision: nats a token, the mean and the largest."""
    batches = batch_lines(plan, run.name)
    if not batches:
        return None
    mean = sum(line["sampler_mismatch"] for line in batches) / len(batches)
    return {"run": run.name, "mean": mean, "max": max(line["max_sampler_mismatch"] for line in batches)}


def evaluations(plan: Plan, runs: list[Run]) -> dict[str, dict[str, Any]]:
    """By name of an evaluation its figures, {figure: [value, low, high]}."""
    found = {}
    for run in runs:
        path = Path(plan.runs) / run.name / "report.json"
        if path.exists():
            figures = read_json(path)["figures"]
            found[run.name] = {one["name"]: [one["value"], one["low"], one["high"]] for one in figures}
    return found


def summarise(plan: Plan, runs: list[Run]) -> dict[str, Any]:
    """By algorithm: mean over seeds before and after, and the interval of the gain."""
    rows = [row for row in (rl_row(plan, run) for run in runs) if row is not None]
    base = [lines[0]["val_accuracy"] for seed in plan.seeds if (lines := accuracy_lines(plan, f"sft_{seed}"))]
    found: dict[str, Any] = {"rows": rows, "base": sum(base) / len(base) if base else None, "algorithms": {}}
    for algorithm in plan.algorithms:
        own = main_rows(rows, algorithm)
        if own:
            found["algorithms"][algorithm] = {kind: gains(own, kind) for kind in ("", "_sampled")}
    return found


def main_rows(rows: list[dict[str, Any]], algorithm: str) -> list[dict[str, Any]]:
    """Those of groups of eight that begin from the start of their seed."""
    return [
        row
        for row in rows
        if row["algorithm"] == algorithm and row["group_size"] == 8 and row["start"] == f"sft_{row['seed']}"
    ]


def compared(plan: Plan, rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """By name the rows whose answers are compared with those of their start."""
    found = {algorithm: main_rows(rows, algorithm) for algorithm in plan.algorithms}
    found["after a longer fine-tuning"] = [row for row in rows if row["start"].startswith("full_")]
    return {name: own for name, own in found.items() if own}


def paired_gain(plan: Plan, rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Of the eight answers to each problem: right before and after, means over seeds, the gain paired by problem.

    None unless every seed was asked before and after.
    """
    before, after = [], []
    for row in rows:
        pair = [Path(plan.runs) / f"eval_{name}" for name in (row["start"], row["run"])]
        if not all((path / "report.json").exists() for path in pair):
            return None
        for path, found in zip(pair, (before, after), strict=True):
            found.append([mean_of(answers, lambda one: one.is_paid) for answers in read_answers(RunDir(path))])
    theirs, ours = ([sum(column) / len(column) for column in zip(*found, strict=True)] for found in (before, after))
    gain = paired_difference(ours, theirs, seed=0)
    seeds = mean_interval([sum(b) / len(b) - sum(a) / len(a) for a, b in zip(before, after, strict=True)])
    shares = {"before": sum(theirs) / len(theirs), "after": sum(ours) / len(ours)}
    return shares | {"problems": len(ours), "gain": gain, "gain_over_seeds": seeds}


def gains(rows: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Of greedy (kind "") or sampled ("_sampled") answers: shares before and after, the gain, with intervals.

    Intervals are of the problems that the runs answered, whatever they were told to; several samples count as one.
    """
    problems = min(row["problems"] for row in rows)
    before, after = [row[f"sft{kind}"] for row in rows], [row[f"rl{kind}"] for row in rows]
    return {
        "seeds": len(rows),
        "problems": problems,
        "sft": pooled_interval(before, problems),
        "rl": pooled_interval(after, problems),
        "gain_over_seeds": mean_interval([b - a for a, b in zip(before, after, strict=True)]),
        "gain_over_problems": difference_interval(before, after, problems),
    }


def print_rows(rows: list[dict[str, Any]]) -> None:
    """A line for each run."""
    print(
        f"{'run':18} {'batches':>7} {'greedy':>16} {'sampled':>16} {'reward':>13} {'tokens':>12} {'kl':>7} "
        f"{'batch s':>8} {'rollout':>8} tok/s"
    )
    for row in rows:
        pairs = [f"{row[f'sft{kind}']:.3f} -> {row[f'rl{kind}']:.3f}" for kind in ("", "_sampled")]
        reward = f"{row['reward_first']:.2f} -> {row['reward_last']:.2f}"
        tokens = f"{row['tokens_first']:.0f} -> {row['tokens_last']:.0f}"
        print(
            f"{row['run']:18} {row['batches']:7d} {pairs[0]:>16} {pairs[1]:>16} {reward:>13} {tokens:>12} "
            f"{row['kl_last'] or 0:7.4f} {row['step_time_s']:8.2f} {row['rollout_share']:8.0%} "
            f"{row['tokens_per_s']:8,.0f}"
        )


def print_table(found: dict[str, Any]) -> None:
    """A line for each run, each algorithm and each evaluation."""
    print_rows(found["rows"])
    for name, kinds in found["algorithms"].items():
        for kind, own in kinds.items():
            gain, spread = own["gain_over_problems"], own["gain_over_seeds"]
            print(
                f"{name}, {'sampled' if kind else 'greedy'}: base {found['base']}, SFT {own['sft'][0]:.3f} "
                f"({own['sft'][1]:.3f} to {own['sft'][2]:.3f}), RL {own['rl'][0]:.3f} ({own['rl'][1]:.3f} to "
                f"{own['rl'][2]:.3f}); gain {gain[0]:+.3f} ({gain[1]:+.3f} to {gain[2]:+.3f} over problems, "
                f"{spread[1]:+.3f} to {spread[2]:+.3f} over {own['seeds']} seeds)"
            )
    for name, own in found["paired"].items():
        if own is not None:
            gain, spread = own["gain"], own["gain_over_seeds"]
            print(
                f"{name}, eight answers to each of {own['problems']} problems: {own['before']:.4f} -> "
                f"{own['after']:.4f}; gain {gain[0]:+.4f} ({gain[1]:+.4f} to {gain[2]:+.4f} paired by problem, "
                f"{spread[1]:+.4f} to {spread[2]:+.4f} over seeds)"
            )
    formed, paid = (sum(row[name] for row in found["rows"]) for name in ("form_alone", "form_alone_reward"))
    print(f"form alone: {formed} logged completions were well formed and wrong, and earned {paid:g} together")
    for name, figures in found["evaluations"].items():
        shown = [f"{what} {figures[what][0]:.3f}" for what in ("pass@1", "pass@8", "right answer, any form")]
        print(f"{name}: {', '.join(shown)} ({figures['pass@1'][1]:.3f} to {figures['pass@1'][2]:.3f})")
    for one in found["precision"]:
        print(f"{one['run']}: trainer against sampler {one['mean']:.2e} nats a token, at most {one['max']:.2e}")
