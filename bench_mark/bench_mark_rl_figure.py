"""Curves of the reinforcement-learning benchmark from what it kept: reward, length, KL, held-out accuracy, time.

    python -m bench_mark.bench_mark_rl_figure out docs/images/rl_curves

`out` is bench_mark_rl's --out. Writes .png and .pdf. One colour an algorithm, one line a seed, dashed after a longer
fine-tuning; smoothed over five batches where it is a batch's own mean.
"""

import argparse
from pathlib import Path
from typing import Any

from configs.run_dir import read_json, read_jsonl

COLORS = {"grpo": "#3b6fb6", "dr_grpo": "#c8662a"}
SPLIT = (
    ("rollout_s", "rollout", "#3b6fb6"),
    ("reward_s", "reward", "#8c8c8c"),
    ("log_prob_s", "log-probs", "#7fb069"),
    ("update_s", "update", "#c8662a"),
    ("sync_s", "weights to the engine", "#8e6bbf"),
)
SMOOTHED = 5  # batches


def smooth(values: list[float]) -> list[float]:
    """The mean of each value and those before it, SMOOTHED in all."""
    return [sum(values[max(0, i - SMOOTHED + 1) : i + 1]) / len(values[max(0, i - SMOOTHED + 1) : i + 1])
            for i in range(len(values))]  # fmt: skip


def read_runs(out: Path) -> list[dict[str, Any]]:
    """Runs with groups of eight: their row of the summary, lines of batches, lines of held-out problems."""
    runs = []
    for row in read_json(out / "summary.json")["rows"]:
        if row["group_size"] == 8:
            lines = read_jsonl(out / "runs" / row["run"] / "metrics.jsonl")
            batches = [line for line in lines if "reward" in line]
            runs.append(row | {"batches": batches, "held_out": [line for line in lines if "val_accuracy" in line]})
    return runs


def draw_batches(axis: Any, runs: list[dict[str, Any]], name: str, title: str, unit: str) -> None:
    """A field of every batch, a line a run."""
    for run in runs:
        steps = [line["batch"] for line in run["batches"]]
        axis.plot(steps, smooth([line.get(name) or 0.0 for line in run["batches"]]), **style(run))
    axis.set(title=title, xlabel="batch", ylabel=unit)


def draw_held_out(axis: Any, runs: list[dict[str, Any]], name: str, title: str) -> None:
    for run in runs:
        axis.plot([line["step"] for line in run["held_out"]], [line[name] for line in run["held_out"]], marker=".",
                  **style(run))  # fmt: skip
    axis.set(title=title, xlabel="batch", ylabel="share right")


def style(run: dict[str, Any]) -> dict[str, Any]:
    dashes = "--" if run["start"].startswith("full_") else "-"
    return {"color": COLORS.get(run["algorithm"], "black"), "linewidth": 1.0, "alpha": 0.8, "linestyle": dashes}


def draw_time(axis: Any, run: dict[str, Any]) -> None:
    """Where the seconds of a run's batches went, stacked."""
    steps = [line["batch"] for line in run["batches"]]
    parts = [smooth([line[name] for line in run["batches"]]) for name, _, _ in SPLIT]
    axis.stackplot(steps, parts, labels=[label for _, label, _ in SPLIT], colors=[color for _, _, color in SPLIT])
    axis.set(title=f"Time of a batch ({run['run']})", xlabel="batch", ylabel="s")
    axis.legend(fontsize=6, loc="upper right")


def draw(runs: list[dict[str, Any]], target: Path) -> None:
    """Six panels into target.png and target.pdf."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(10.5, 5.4), constrained_layout=True)
    draw_held_out(axes[0][0], runs, "val_accuracy", "Held-out problems, greedy")
    draw_held_out(axes[0][1], runs, "val_pass_at_1", "Held-out problems, sampled")
    draw_batches(axes[0][2], runs, "reward", "Reward in training", "mean of a batch")
    draw_batches(axes[1][0], runs, "response_tokens", "Length of completions", "tokens")
    draw_batches(axes[1][1], runs, "kl", "KL to the fine-tuned policy", "nats a token")
    draw_time(axes[1][2], runs[0])
    for name in dict.fromkeys(run["algorithm"] for run in runs):
        axes[0][0].plot([], [], color=COLORS.get(name, "black"), label=name)
    if any(run["start"].startswith("full_") for run in runs):
        axes[0][0].plot([], [], color="black", linestyle="--", label="after a longer fine-tuning")
    axes[0][0].legend(fontsize=7, loc="lower right")
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.title.set_fontsize(9)
    for ending in (".png", ".pdf"):
        figure.savefig(target.with_suffix(ending), dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="bench_mark_rl's --out")
    parser.add_argument("target", type=Path, help="path of the picture without its ending")
    arguments = parser.parse_args()
    draw(read_runs(arguments.out), arguments.target)


if __name__ == "__main__":
    main()
