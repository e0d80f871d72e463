"""Base model -> fine-tuning -> GRPO on one GPU, several seeds side by side: held-out accuracy with 95% intervals.

    python -m bench_mark.bench_mark_rl --base runs/smollm2 --out out          # a base model of ours
    python -m bench_mark.bench_mark_rl --out out                              # none: one is pretrained on word problems

Every seed is fine-tuned on worked solutions and then learns from rewards alone, by the commands that a user would type
(alignment.sft, alignment.train_rl), seeds and variants at once: GRPO and Dr. GRPO with each seed, other group sizes
with the first. Kept in --out: metrics, some completions, logs, summary.json; weights are not. The last line is JSON.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from alignment.train_rl_summary import difference_interval, mean_interval, pooled_interval
from bench_mark.bench_mark_rl_base import Pretraining, pretrain_commands
from configs.run_dir import read_jsonl, write_json_atomic
from configs.version import git_commit

KEPT = ("metrics.jsonl", "report.json", "config.yaml", "completions.jsonl", "samples.txt")
LEAST_ACCURACY = 0.02  # of a fine-tuned policy, below which groups of 8 are nearly all without a right answer
SPLIT = ("rollout_s", "reward_s", "log_prob_s", "update_s", "sync_s", "step_time_s")


@dataclass
class Plan:
    """Sizes of the whole; times are caps, so that it ends whatever the machine does."""

    out: Path
    work: Path  # runs with their weights
    base: str | None
    level: str = "word_problems"
    seeds: tuple[int, ...] = (1, 2, 3)
    groups: tuple[int, ...] = (4, 16)  # beside 8, with the first seed
    held_out: int = 500
    sft_steps: int = 160
    batches: int = 100
    prompts: int = 32
    max_new_tokens: int = 160
    seq_len: int = 512  # of fine-tuning's packed rows
    sft_tokens: int = 32_768  # of a step
    sft_lr: float = 1e-3
    rl_lr: float = 2e-5
    sft_s: float = 40.0
    rl_s: float = 100.0
    notes: list[str] = field(default_factory=list)

    @property
    def runs(self) -> str:
        return str(self.work / "runs")


@dataclass
class Run:
    """One process: a name, its command, and what it is for the table."""

    name: str
    command: list[str]
    facts: dict[str, Any] = field(default_factory=dict)


def script(module: str, *overrides: str) -> list[str]:
    """A script of ours in a process of its own, with as few threads as side by side allow."""
    return ["env", "OMP_NUM_THREADS=2", sys.executable, "-u", "-m", module, *overrides]


def data_of(plan: Plan, split: str, size: int, seed: int) -> str:
    return f"{{source: arithmetic, level: {plan.level}, split: {split}, size: {size}, seed: {seed}}}"


def sft_run(plan: Plan, seed: int) -> Run:
    """Worked solutions in the short prompt; the base's own accuracy is measured before the first step."""
    overrides = [
        f"name=sft_{seed}", f"runs_dir={plan.runs}", f"init_from={plan.base}", f"seed={seed}",
        f"max_steps={plan.sft_steps}", f"max_time_s={plan.sft_s}", f"validate_every={plan.sft_steps}",
        f"micro_batch_size={min(16, plan.sft_tokens // plan.seq_len)}", f"global_batch_tokens={plan.sft_tokens}",
        f"data.seq_len={plan.seq_len}", f"optimizer.lr={plan.sft_lr}",
        "schedule.warmup_steps=5", "prompt.template=r1_short", f"generation.problems={plan.held_out}",
        f"generation.max_new_tokens={plan.max_new_tokens}", f"checkpoint.every_steps={plan.sft_steps}",
        f"train_data=[{data_of(plan, 'train', 6_000, seed)}]",
        f"held_out_data={data_of(plan, 'held_out', plan.held_out, 99)}",
    ]  # fmt: skip
    return Run(f"sft_{seed}", script("alignment.sft", *overrides), {"seed": seed})


def rl_run(plan: Plan, seed: int, algorithm: str, group_size: int) -> Run:
    """From that seed's fine-tuned weights; as many completions a batch whatever the group."""
    name = f"{algorithm}_g{group_size}_s{seed}"
    overrides = [
        f"name={name}", f"runs_dir={plan.runs}", f"init_from={plan.runs}/sft_{seed}", f"seed={seed}",
        f"algorithm={algorithm}", "algorithm.importance_cap=2.0", f"num_batches={plan.batches}",
        f"max_time_s={plan.rl_s}", f"prompts_per_batch={plan.prompts * 8 // group_size}", f"group_size={group_size}",
        f"max_new_tokens={plan.max_new_tokens}", f"optimizer.lr={plan.rl_lr}", "schedule.warmup_steps=5",
        "micro_batch_tokens=32768", "rollout.max_running=256", "rollout.memory_fraction=0.05", "evaluate_every=20",
        "checkpoint.every_steps=1000", "prompt.template=r1_short", "log_completions=8",
        f"train_data=[{data_of(plan, 'train', 6_000, 50 + seed)}]",
        f"held_out_data={data_of(plan, 'held_out', plan.held_out, 99)}",
    ]  # fmt: skip
    facts = {"seed": seed, "algorithm": algorithm, "group_size": group_size}
    return Run(name, script("alignment.train_rl", *overrides), facts)


def rl_runs(plan: Plan) -> list[Run]:
    runs = [rl_run(plan, seed, algorithm, 8) for algorithm in ("grpo", "dr_grpo") for seed in plan.seeds]
    return runs + [rl_run(plan, plan.seeds[0], "grpo", size) for size in plan.groups]


def side_by_side(plan: Plan, runs: list[Run], limit_s: float) -> float:
    """Run all at once with a log each; those that outlive the limit are ended and noted. Returns the seconds taken."""
    started_s, logs = time.perf_counter(), plan.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    processes = []
    for run in runs:
        log = open(logs / f"{run.name}.txt", "w", encoding="utf-8")
        processes.append(subprocess.Popen(run.command, stdout=log, stderr=subprocess.STDOUT))
        log.close()
    for run, process in zip(runs, processes, strict=True):
        try:
            code = process.wait(max(1.0, limit_s - (time.perf_counter() - started_s)))
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code:
            tail = (logs / f"{run.name}.txt").read_text(encoding="utf-8", errors="replace")[-800:]
            plan.notes.append(f"{run.name} ended with {code}: {tail}")
    return time.perf_counter() - started_s


def accuracy_lines(plan: Plan, name: str) -> list[dict[str, Any]]:
    return [line for line in read_jsonl(Path(plan.runs) / name / "metrics.jsonl") if "val_accuracy" in line]


def keep(plan: Plan, name: str) -> None:
    """Small files of a run, without its weights."""
    source, target = Path(plan.runs) / name, plan.out / "runs" / name
    target.mkdir(parents=True, exist_ok=True)
    for file in KEPT:
        if (source / file).exists():
            shutil.copyfile(source / file, target / file)


def rl_row(plan: Plan, run: Run) -> dict[str, Any] | None:
    """Held-out accuracy before and after, and where the time went; None for a run that measured nothing."""
    lines = accuracy_lines(plan, run.name)
    batches = [line for line in read_jsonl(Path(plan.runs) / run.name / "metrics.jsonl") if "reward" in line]
    if len(lines) < 2 or not batches:
        return None
    late = batches[1:] or batches
    row = {"run": run.name, **run.facts, "batches": batches[-1]["batch"], "evaluated_at": lines[-1]["step"]}
    for kind, name in (("", "val_accuracy"), ("_sampled", "val_pass_at_1")):
        row |= {f"sft{kind}": lines[0][name], f"rl{kind}": lines[-1][name]}
        row |= {f"curve{kind}": [(line["step"], line[name]) for line in lines]}
    row |= {"reward_first": batches[0]["reward"], "reward_last": batches[-1]["reward"]}
    row |= {"tokens_first": batches[0]["response_tokens"], "tokens_last": batches[-1]["response_tokens"]}
    row |= {name: sum(line[name] for line in late) / len(late) for name in (*SPLIT, "tokens_per_s")}
    row["rollout_share"] = row["rollout_s"] / row["step_time_s"]
    row["sampler_mismatch"] = sum(line["sampler_mismatch"] for line in batches) / len(batches)
    return row


def summarise(plan: Plan, runs: list[Run]) -> dict[str, Any]:
    """By algorithm: mean over seeds before and after, and the interval of the gain."""
    rows = [row for row in (rl_row(plan, run) for run in runs) if row is not None]
    base = [lines[0]["val_accuracy"] for seed in plan.seeds if (lines := accuracy_lines(plan, f"sft_{seed}"))]
    found: dict[str, Any] = {"rows": rows, "base": sum(base) / len(base) if base else None, "algorithms": {}}
    for algorithm in ("grpo", "dr_grpo"):
        own = [row for row in rows if row["algorithm"] == algorithm and row["group_size"] == 8]
        if own:
            found["algorithms"][algorithm] = {kind: gains(plan, own, kind) for kind in ("", "_sampled")}
    return found


def gains(plan: Plan, rows: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Of greedy (kind "") or sampled ("_sampled") answers: shares before and after, the gain, with intervals."""
    before, after = [row[f"sft{kind}"] for row in rows], [row[f"rl{kind}"] for row in rows]
    return {
        "seeds": len(rows),
        "sft": pooled_interval(before, plan.held_out),
        "rl": pooled_interval(after, plan.held_out),
        "gain_over_seeds": mean_interval([b - a for a, b in zip(before, after, strict=True)]),
        "gain_over_problems": difference_interval(before, after, plan.held_out),
    }


def print_table(found: dict[str, Any]) -> None:
    print(
        f"{'run':18} {'batches':>7} {'greedy':>16} {'sampled':>16} {'reward':>13} {'batch s':>8} {'rollout':>8} tok/s"
    )
    for row in found["rows"]:
        pairs = [f"{row[f'sft{kind}']:.3f} -> {row[f'rl{kind}']:.3f}" for kind in ("", "_sampled")]
        reward = f"{row['reward_first']:.2f} -> {row['reward_last']:.2f}"
        print(
            f"{row['run']:18} {row['batches']:7d} {pairs[0]:>16} {pairs[1]:>16} {reward:>13} {row['step_time_s']:8.2f} "
            f"{row['rollout_share']:8.0%} {row['tokens_per_s']:8,.0f}"
        )
    for name, kinds in found["algorithms"].items():
        for kind, own in kinds.items():
            gain, spread = own["gain_over_problems"], own["gain_over_seeds"]
            print(
                f"{name}, {'sampled' if kind else 'greedy'}: base {found['base']}, SFT {own['sft'][0]:.3f} "
                f"({own['sft'][1]:.3f} to {own['sft'][2]:.3f}), RL {own['rl'][0]:.3f} ({own['rl'][1]:.3f} to "
                f"{own['rl'][2]:.3f}); gain {gain[0]:+.3f} ({gain[1]:+.3f} to {gain[2]:+.3f} over problems, "
                f"{spread[1]:+.3f} to {spread[2]:+.3f} over {own['seeds']} seeds)"
            )


def parse_plan() -> tuple[Plan, Pretraining]:
    """Every number of both is an option."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/bench_mark_rl"))
    parser.add_argument("--base", help="a run of ours; without it one is pretrained")
    parser.add_argument("--level", default=Plan.level)
    parser.add_argument("--seeds", type=int, nargs="+", default=Plan.seeds)
    parser.add_argument("--groups", type=int, nargs="*", default=Plan.groups)
    parser.add_argument("--model", default=Pretraining.model, help="of configs/model, to be pretrained")
    numbers = {Plan: "held_out sft_steps batches prompts max_new_tokens seq_len sft_tokens sft_lr rl_lr sft_s rl_s"}
    numbers[Pretraining] = "problems tokens seconds"
    for kind, names in numbers.items():
        prefix = "pretrain-" if kind is Pretraining else ""
        for name in names.split():
            default = getattr(kind, name)
            parser.add_argument(f"--{prefix}{name.replace('_', '-')}", type=type(default), default=default)
    found = vars(parser.parse_args())
    base = Pretraining(found.pop("model"), *(found.pop(f"pretrain_{name}") for name in numbers[Pretraining].split()))
    return Plan(**found), base


def main() -> None:
    (plan, pretraining), seconds = parse_plan(), {}
    if plan.base is None:
        for name, command in pretrain_commands(plan.work, plan.level, pretraining):
            seconds[name] = side_by_side(plan, [Run(name, script(*command))], 60 + pretraining.seconds)
        plan.base = f"{plan.runs}/base"
    sft = [sft_run(plan, seed) for seed in plan.seeds]
    seconds["sft"] = side_by_side(plan, sft, 60 + plan.sft_s)
    told = [lines[-1]["val_accuracy"] for run in sft if (lines := accuracy_lines(plan, run.name))]
    rl = rl_runs(plan)
    if max(told, default=0.0) < LEAST_ACCURACY:
        rl = []
        plan.notes.append(
            f"fine-tuning reached accuracies of {told}: with so few right answers there is no reward to learn from, so "
            f"no RL was run; read runs/sft_*/samples.txt, then raise --sft-steps or choose an easier --level"
        )
    seconds["rl"] = side_by_side(plan, rl, 60 + plan.rl_s)
    for run in (*sft, *rl):
        keep(plan, run.name)
    found = summarise(plan, rl) | {"seconds": seconds, "notes": plan.notes, "commit": git_commit()}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    found |= {"device": device, "torch": torch.__version__, "level": plan.level, "init": plan.base}
    write_json_atomic(plan.out / "summary.json", found)
    print(f"{device} · torch {torch.__version__} · commit {found['commit']} · {plan.level} from {plan.base}")
    for note in plan.notes:
        print(f"note: {note}")
    print_table(found)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
