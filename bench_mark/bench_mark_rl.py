"""Base model -> fine-tuning -> GRPO on one GPU, several seeds side by side: held-out accuracy with 95% intervals.

    python -m bench_mark.bench_mark_rl --base runs/smollm2 --base-template chat_plain --out out
    python -m bench_mark.bench_mark_rl --out out                              # none: one is pretrained on word problems

Every seed is fine-tuned on worked solutions and then learns from rewards alone, by the commands that a user would type
(alignment.sft, alignment.train_rl), seeds and variants at once: GRPO and Dr. GRPO with each seed, other group sizes
with the first. Base, fine-tuned and final policies answer the held-out problems eight times each at the end. Kept in
--out: metrics, pages, some completions, logs, summary.json; weights are not. The last line is JSON.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from bench_mark.bench_mark_rl_base import Pretraining, pretrain_commands
from bench_mark.bench_mark_rl_runs import (
    Plan,
    Run,
    evaluation_runs,
    precision_runs,
    rl_runs,
    script,
    sft_runs,
    side_by_side,
    write_held_out,
)
from bench_mark.bench_mark_rl_summary import (
    accuracy_lines,
    compared,
    evaluations,
    keep,
    mismatch,
    paired_gain,
    print_table,
    summarise,
)
from configs.run_dir import write_json_atomic
from configs.version import git_commit

LEAST_ACCURACY = 0.02  # of a fine-tuned policy, below which groups of 8 are nearly all without a right answer
NUMBERS = (
    "held_out solutions sft_steps full_steps batches prompts max_new_tokens seq_len sft_tokens sft_lr rl_lr kl_coef "
    "micro_batch_tokens evaluate_every sft_s rl_s evaluate_s"
)


def parse_plan(parser: argparse.ArgumentParser) -> tuple[Plan, Pretraining, dict[str, Any]]:
    """Every number of both is an option; the options that the parser had before come back as they are."""
    others = sorted(vars(parser.parse_args([])))  # of a sweep
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/bench_mark_rl"))
    parser.add_argument("--base", help="a run of ours; without it one is pretrained")
    parser.add_argument("--base-template", default=Plan.base_template, help="in which the base itself is asked")
    parser.add_argument("--gsm8k", help="jsonl of training problems, for fine-tuning beside the generated ones")
    parser.add_argument("--gsm8k-test", help="jsonl of test problems, asked at the end")
    parser.add_argument("--level", default=Plan.level)
    parser.add_argument("--attention", default=Plan.attention)
    parser.add_argument("--kernels", default=Plan.kernels, choices=("plain", "fused"))
    parser.add_argument("--devices", nargs="*", default=Plan.devices, help="GPUs to deal the processes over")
    parser.add_argument("--seeds", type=int, nargs="+", default=Plan.seeds)
    parser.add_argument("--full-seeds", type=int, nargs="*", default=Plan.full_seeds)
    parser.add_argument("--algorithms", nargs="+", default=Plan.algorithms)
    parser.add_argument("--groups", type=int, nargs="*", default=Plan.groups)
    parser.add_argument("--model", default=Pretraining.model, help="of configs/model, to be pretrained")
    numbers = {Plan: NUMBERS, Pretraining: "problems tokens steps seconds"}
    for kind, names in numbers.items():
        prefix = "pretrain-" if kind is Pretraining else ""
        for name in names.split():
            default = getattr(kind, name)
            parser.add_argument(f"--{prefix}{name.replace('_', '-')}", type=type(default), default=default)
    found = vars(parser.parse_args())
    rest = {name: found.pop(name) for name in others}
    base = Pretraining(found.pop("model"), *(found.pop(f"pretrain_{name}") for name in numbers[Pretraining].split()))
    return Plan(**found), base, rest


def prepare(plan: Plan, pretraining: Pretraining, seconds: dict[str, float]) -> None:
    """The held-out problems, and a base where none was given."""
    write_held_out(plan)
    if plan.base is None:
        for name, command in pretrain_commands(plan.work, plan.level, pretraining):
            seconds[name] = side_by_side(plan, [Run(name, script(*command))], 60 + pretraining.seconds)
        plan.base = f"{plan.runs}/base"


def learn(plan: Plan, seconds: dict[str, float]) -> list[Run]:
    """Fine-tuning of every seed, then all RL runs at once, which are returned.

    Without a right answer there is no reward to learn from: then no RL is run, and a note says so.
    """
    sft = sft_runs(plan)
    seconds["sft"] = side_by_side(plan, sft, 60 + plan.sft_s)
    for run in sft:
        keep(plan, run.name)
    told = [lines[-1]["val_accuracy"] for run in sft if (lines := accuracy_lines(plan, run.name))]
    if max(told, default=0.0) < LEAST_ACCURACY:
        plan.notes.append(
            f"fine-tuning reached accuracies of {told}: with so few right answers there is no reward to learn from, so "
            f"no RL was run; read runs/sft_*/samples.txt, then raise --sft-steps or choose an easier --level"
        )
        return []
    rl = rl_runs(plan)
    seconds["rl"] = side_by_side(plan, rl, 60 + plan.rl_s)
    for run in rl:
        keep(plan, run.name)
    return rl


def evaluate(plan: Plan, rl: list[Run], seconds: dict[str, float]) -> tuple[list[Run], list[Run]]:
    """pass@1 and pass@8 of the base, and of every seed before and after RL; beside them the precisions' short runs."""
    sft = [f"sft_{seed}" for seed in plan.seeds]
    final = {run.name: run.facts["algorithm"] for run in rl if run.facts["group_size"] == 8}
    first = [name for name, algorithm in final.items() if algorithm == plan.algorithms[0]]
    full = sorted({run.facts["start"] for run in rl} - set(sft))
    runs, precision = evaluation_runs(plan, [*sft, *full, *final], [*sft, *first]), precision_runs(plan) if rl else []
    seconds["evaluation"] = side_by_side(plan, [*runs, *precision], plan.evaluate_s)
    for run in (*runs, *precision):
        keep(plan, run.name)
    return runs, precision


def main() -> None:
    plan, pretraining, _ = parse_plan(argparse.ArgumentParser(description=__doc__.splitlines()[0]))
    seconds: dict[str, float] = {}
    prepare(plan, pretraining, seconds)
    rl = learn(plan, seconds)
    asked, precision = evaluate(plan, rl, seconds)
    found = summarise(plan, rl) | {"evaluations": evaluations(plan, asked)}
    found["paired"] = {name: paired_gain(plan, rows) for name, rows in compared(plan, found["rows"]).items()}
    found["precision"] = [one for run in precision if (one := mismatch(plan, run)) is not None]
    found |= {"seconds": seconds, "notes": plan.notes, "commit": git_commit()}
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
