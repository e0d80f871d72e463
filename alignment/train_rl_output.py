"""What a run of train_rl shows on the terminal, on rank 0."""

import math
from typing import Any

from rich.console import Console

from alignment.train_rl_evaluate import HeldOut
from alignment.train_rl_setup import RlRun
from configs.report import read_run
from configs.report_terminal import comparison_table


def print_start(run: RlRun) -> None:
    if not run.is_main:
        return
    config = run.config
    layout = f"{run.roles.world.world_size} ranks" + (
        f", {config.rollout_ranks} of them write" if config.rollout_ranks else ""
    )
    print(
        f"{config.name}: from {config.init_from}, {config.dtype} on {layout}, {run.hardware.description}; "
        f"run directory {run.run_dir.path}"
    )
    print(
        f"{config.num_batches} batches of {config.prompts_per_batch} prompts x {config.group_size} completions of at "
        f"most {config.max_new_tokens} tokens, {config.steps_per_batch} optimizer steps each"
    )


def print_batch(run: RlRun, fields: dict[str, Any]) -> None:
    every = max(1, run.config.num_batches // 50)
    if not run.is_main or (run.batch % every and run.batch != run.config.num_batches):
        return
    print(
        f"batch {run.batch}/{run.config.num_batches}  reward {fields['reward']:.3f}  "
        f"tokens {fields['response_tokens']:.1f}  entropy {fields.get('entropy', 0.0):.3f}  "
        f"{fields['step_time_s']:.2f} s, rollout {fields['rollout_share']:.0%}",
        flush=True,
    )


def print_held_out(run: RlRun, result: HeldOut) -> None:
    if not run.is_main:
        return
    fields = result.fields()
    print(
        f"batch {run.batch}/{run.config.num_batches}  held-out accuracy {fields['val_accuracy']:.3f} "
        f"({fields['val_accuracy_low']:.3f} to {fields['val_accuracy_high']:.3f}, {result.problems} problems), "
        f"sampled {fields.get('val_pass_at_1', math.nan):.3f}, format {fields['val_format_rate']:.3f}",
        flush=True,
    )


def print_finish(run: RlRun, state: str) -> None:
    """The table of predicted and measured, the held-out accuracy at the beginning and the end, where the page is."""
    if not run.is_main:
        return
    files = read_run(run.run_dir.path)
    Console().print(comparison_table(files))
    if state == "stopped":
        print(f"stopped and saved after batch {run.batch} of {run.config.num_batches}; the same command continues")
    lines = [line for line in files.metrics if "val_accuracy" in line]
    if lines:
        for name, label in (("val_accuracy", "greedy"), ("val_pass_at_1", "sampled")):
            told = [
                f"{line[name]:.3f} ({line[name + '_low']:.3f} to {line[name + '_high']:.3f}) at step {line['step']}"
                for line in (lines[0], lines[-1])
                if name in line
            ]
            print(f"held-out accuracy, {label}: {', '.join(told)}")
    print(f"run directory   {run.run_dir.path}")
    print(f"report          {run.run_dir.path / 'report.html'}")
