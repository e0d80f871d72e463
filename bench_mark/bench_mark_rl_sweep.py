"""Which start and which rate learn: fine-tunings of several lengths, then short RL runs from each, all side by side.

    python -m bench_mark.bench_mark_rl_sweep --out out --lengths 20 40 80 --rates 1e-5 3e-5

Takes the options of bench_mark_rl; a run of the first seed for every length, rate and size of a batch. The last line
is JSON. What wins here is chosen by held-out problems, so the figures that count are those of bench_mark_rl's runs.
"""

import argparse
import json
from dataclasses import replace
from typing import Any

from bench_mark.bench_mark_rl import parse_plan, prepare
from bench_mark.bench_mark_rl_runs import Plan, Run, rl_run, sft_run, side_by_side
from bench_mark.bench_mark_rl_summary import accuracy_lines, keep, print_rows, rl_row
from configs.run_dir import write_json_atomic
from configs.version import git_commit


def lengths_of(plan: Plan, lengths: list[int]) -> list[Plan]:
    """The plan once for each length of fine-tuning, with directories of its own."""
    return [
        replace(plan, sft_steps=length, work=plan.work / f"sft{length}", out=plan.out / f"sft{length}")
        for length in lengths
    ]


def fine_tune(plan: Plan, starts: list[Plan]) -> float:
    """All lengths at once from one base, on one set of held-out problems."""
    for start in starts:
        start.work.mkdir(parents=True, exist_ok=True)
        start.held_out_file.write_bytes(plan.held_out_file.read_bytes())
    runs = []
    for start in starts:
        run = sft_run(start, start.seeds[0])
        runs.append(Run(f"{start.work.name}_{run.name}", run.command))
    seconds = side_by_side(plan, runs, 60 + plan.sft_s)
    for start in starts:
        keep(start, f"sft_{start.seeds[0]}")
    return seconds


def variants(starts: list[Plan], rates: list[float], prompts: list[int]) -> list[tuple[Plan, Run]]:
    """Every start with every rate and batch."""
    found = []
    for start in starts:
        for rate in rates:
            for count in prompts:
                plan = replace(start, rl_lr=rate, prompts=count)
                facts = {"algorithm": "grpo", "group_size": 8, "seed": plan.seeds[0], "start": f"sft_{plan.seeds[0]}"}
                run = rl_run(plan, f"{start.work.name}_lr{rate:g}_p{count}", facts)
                found.append((plan, run))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[40], help="steps of fine-tuning")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-5, 3e-5], help="learning rates of RL")
    parser.add_argument("--batches-of", type=int, nargs="+", default=[32], help="prompts a batch")
    plan, pretraining, options = parse_plan(parser)
    seconds: dict[str, float] = {}
    prepare(plan, pretraining, seconds)
    starts = lengths_of(plan, options["lengths"])
    seconds["sft"] = fine_tune(plan, starts)
    tried = variants(starts, options["rates"], options["batches_of"])
    seconds["rl"] = side_by_side(plan, [run for _, run in tried], 60 + plan.rl_s)
    rows = []
    for own, run in tried:
        keep(own, run.name)
        row = rl_row(own, run)
        if row is not None:
            rows.append(row)
    found: dict[str, Any] = {"rows": rows, "seconds": seconds, "notes": plan.notes, "commit": git_commit()}
    found["sft"] = {start.sft_steps: accuracy_lines(start, f"sft_{start.seeds[0]}") for start in starts}
    write_json_atomic(plan.out / "summary.json", found)
    for note in plan.notes:
        print(f"note: {note}")
    for steps, lines in found["sft"].items():
        print(f"sft of {steps} steps: {[(line['step'], round(line['val_accuracy'], 3)) for line in lines]}")
    print_rows(rows)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
