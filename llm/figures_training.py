"""Pictures of what a run is made of and how it went: its corpus, its curves, what its cache costs."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from configs.run_dir import read_jsonl
from llm.args import ModelConfig
from llm.cost_model_decode import cache_bytes_per_token
from llm.figures_style import COLOURS, INK, dress, styled
from llm.token_files import TokenMeta

SMOOTHED = 10  # lines of metrics.jsonl in one point of the thick curve


@dataclass(frozen=True)
class Run:
    """One run's record: its resolved config and the lines of metrics.jsonl."""

    name: str
    config: dict[str, Any]
    lines: list[dict[str, Any]]

    @staticmethod
    def read(path: Path, config: dict[str, Any]) -> "Run":
        return Run(path.name, config, read_jsonl(path / "metrics.jsonl"))

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Training tokens (millions) and values of one field, where the run has it."""
        pairs = [(line["step"], line[name]) for line in self.lines if isinstance(line.get(name), int | float)]
        steps, values = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
        return steps * self.config["global_batch_tokens"] / 1e6, values


def draw_training(run: Run) -> Figure:
    """Loss of training and validation, gradient norm, learning rate, over tokens."""
    with styled(10.0, 3.3) as figure:
        loss, norm, rate = figure.subplots(1, 3, width_ratios=(1.6, 1, 1))
        tokens, values = run.column("loss")
        loss.plot(tokens, values, color=COLOURS[5], linewidth=0.6, label="training, one batch")
        smooth = min(SMOOTHED, len(values))
        middle = tokens[(smooth - 1) // 2 :][: len(values) - smooth + 1]
        loss.plot(middle, np.convolve(values, np.ones(smooth) / smooth, "valid"), color=COLOURS[0],
                  linewidth=1.5, label=f"training, mean of {smooth}")  # fmt: skip
        loss.plot(*run.column("val_loss"), "o-", color=COLOURS[1], markersize=3, linewidth=1.2, label="validation")
        dress(loss, f"{run.name}: loss", "training tokens (millions)", "nats a token").legend()
        norm.plot(*run.column("grad_norm"), color=COLOURS[2], linewidth=0.8)
        dress(norm, "Gradient norm before clipping", "training tokens (millions)", "L2 norm").set_yscale("log")
        rate.plot(*run.column("lr"), color=INK, linewidth=1.2)
        dress(rate, "Learning rate", "training tokens (millions)").set_ylim(bottom=0)
    return figure


def draw_corpus(metas: dict[str, TokenMeta]) -> Figure:
    """What each source gives to the training split: shares of bytes, tokens and documents, and bytes a token."""
    names = sorted(metas, key=lambda name: -metas[name].utf8_bytes("train"))
    counts = {
        "bytes": [metas[name].utf8_bytes("train") for name in names],
        "tokens": [metas[name].tokens("train") for name in names],
        "documents": [sum(shard.documents for shard in metas[name].split("train")) for name in names],
    }
    with styled(9.0, 2.8) as figure:
        shares, length = figure.subplots(1, 2, width_ratios=(2.2, 1))
        left = np.zeros(3)
        for row, (name, colour) in enumerate(zip(names, np.resize(np.array(COLOURS), len(names)), strict=True)):
            widths = np.array([values[row] / sum(values) for values in counts.values()])
            shares.barh(list(counts), widths, left=left, color=colour, label=name, height=0.62)
            for place, (width, start) in enumerate(zip(widths, left, strict=True)):
                if width > 0.06:
                    shares.text(start + width / 2, place, f"{width:.0%}", ha="center", va="center", color="white")
            left += widths
        total = ", ".join(f"{sum(values):,} {kind}" for kind, values in counts.items())
        dress(shares, f"Training split: {total}", "share").invert_yaxis()
        shares.legend(ncols=len(names), loc="upper center", bbox_to_anchor=(0.5, -0.22))
        per_token = [b / t for b, t in zip(counts["bytes"], counts["tokens"], strict=True)]
        length.barh(names, per_token, color=COLOURS[0], height=0.62)
        dress(length, "Bytes of text a token", "bytes").invert_yaxis()
    return figure


@dataclass(frozen=True)
class Twin:
    """A run that differs from others by its kv heads alone, for the price of a small cache."""

    run: Run
    model: ModelConfig
    cache_bytes: int  # of one token, as KVCache counts them


def draw_cache(shapes: dict[str, ModelConfig], twins: list[Twin]) -> Figure:
    """Bytes of a sequence's cache by context, as configured and as if every head had keys; what it costs in loss."""
    with styled(10.0, 3.9) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
        context = np.geomspace(1024, 131_072, 40)
        for (name, model), colour in zip(shapes.items(), COLOURS, strict=False):
            full = replace(model, num_kv_heads=model.num_heads)
            own, all_heads = (cache_bytes_per_token(shape, 2) * context / 2**30 for shape in (model, full))
            label = f"{name}: {model.num_heads} heads, {model.num_kv_heads} with keys"
            left.plot(context, own, color=colour, label=label)
            left.plot(context, all_heads, "--", color=colour, linewidth=1)
        left.plot([], [], "--", color=INK, linewidth=1, label="dashed: if every head had its own keys")
        dress(left, "Cache of one sequence in bfloat16", "context (tokens)", "GiB")
        left.set_xscale("log", base=2)
        left.set_yscale("log", base=2)
        left.set_ylim(bottom=2**-11)  # room for the legend below the lines
        left.legend(loc="lower right")
        draw_twins(right, twins)
    return figure


def draw_twins(axes: Axes, twins: list[Twin]) -> None:
    """Validation loss at the end of training against the bytes of a token's cache."""
    dress(axes, "The same model with fewer heads that have keys", "cache of a token (bytes, float32)",
          "validation loss (nats a token)")  # fmt: skip
    points = [(twin.cache_bytes, twin.run.column("val_loss")[1][-1], twin) for twin in twins]
    axes.plot([x for x, _, _ in points], [y for _, y, _ in points], "o-", color=COLOURS[0], linewidth=1)
    for x, y, twin in points:
        kind = {1: "MQA", twin.model.num_heads: "MHA"}.get(twin.model.num_kv_heads, "GQA")
        axes.annotate(f"{kind}: {twin.model.num_kv_heads} of {twin.model.num_heads}\n{y:.3f}", (x, y),
                      xytext=(5, 5), textcoords="offset points", fontsize=8)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks([x for x, _, _ in points], [f"{x:,}" for x, _, _ in points])
    axes.minorticks_off()
    axes.margins(x=0.25, y=0.35)
