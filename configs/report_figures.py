"""The report's figures as plain data, drawn by the page's script: what to plot, not how it looks.

A trace's `color` names a CSS variable of the page, so that light and dark follow the reader's setting.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from configs.report_numbers import SCALES

MAX_POINTS = 2000  # a trace; a longer run is averaged in groups
Line = dict[str, Any]


@dataclass
class Figure:
    """One chart: traces in plotly's form, with a caption that says what a reader should see in it."""

    name: str
    title: str
    caption: str
    y_title: str
    traces: list[dict[str, Any]]
    x_title: str = "step"
    wide: bool = False
    log_x_switch: bool = False
    log_y: bool = False
    from_zero: bool = False
    hlines: list[dict[str, Any]] = field(default_factory=list)  # {"y", "label"}
    spans: list[dict[str, Any]] = field(default_factory=list)  # stretches of x: {"x0", "x1", "label"}


def column(lines: list[Line], name: str) -> tuple[list[float], list[float]]:
    """Steps and finite values of one field of metrics.jsonl, at most MAX_POINTS of them."""
    pairs = [(line["step"], line[name]) for line in lines if isinstance(line.get(name), int | float)]
    pairs = [(step, value) for step, value in pairs if math.isfinite(value)]
    size = -(-len(pairs) // MAX_POINTS) if pairs else 1
    groups = [pairs[start : start + size] for start in range(0, len(pairs), size)]
    return [group[-1][0] for group in groups], [sum(value for _, value in group) / len(group) for group in groups]


def trace(lines: list[Line], name: str, label: str, color: str, **style: Any) -> dict[str, Any] | None:
    """One field over steps, or None where the run has no value of it."""
    steps, values = column(lines, name)
    if not steps:
        return None
    return {"x": steps, "y": values, "name": label, "color": color, "width": 2, "mode": "lines"} | style


def loss_figure(lines: list[Line]) -> Figure | None:
    traces = [
        trace(lines, "loss", "training", "series-1", width=1.5),
        trace(lines, "val_loss", "validation", "series-2", mode="lines+markers"),
    ]
    caption = "Nats a token. On a logarithmic step axis a healthy run is close to a straight line for long."
    if any("reward" in line for line in lines):
        return policy_loss_figure(traces[0])
    return Figure(
        "loss", "Loss", caption, "loss (nats)", [t for t in traces if t], wide=True, log_x_switch=True
    )  # fmt: skip


def policy_loss_figure(loss: dict[str, Any] | None) -> Figure:
    """Reinforcement learning's: its gradient matters, its value does not."""
    caption = "Of the batch that it was computed on: near 0 on policy, whether or not anything is learned."
    return Figure("loss", "Loss of the policy", caption, "loss", [loss] if loss else [])


def single(name: str, title: str, caption: str, y_title: str, **options: Any) -> Callable[[list[Line]], Figure]:
    """A figure of one field of metrics.jsonl."""

    def build(lines: list[Line]) -> Figure:
        one = trace(lines, name, y_title, "series-1")
        return Figure(name, title, caption, y_title, [one] if one else [], **options)

    return build


SIMPLE = [
    single("lr", "Learning rate", "As the schedule set it.", "learning rate", from_zero=True),
    single("grad_norm", "Gradient norm", "Before clipping; spikes come ahead of trouble.", "norm", log_y=True),
    single("tokens_per_s", "Throughput", "Without validation and checkpoints.", "tokens / s", from_zero=True),
    single("mfu", "Model FLOPs utilisation", "Of the device's dense peak.", "MFU", from_zero=True),
    single("val_accuracy", "Held-out accuracy", "Answers that are right and well formed.", "share", from_zero=True),
    single("val_format_rate", "Well-formed answers", "Right or wrong.", "share", from_zero=True),
    single("val_response_tokens", "Length of answers", "A mean over the problems.", "tokens", from_zero=True),
]


def memory_figure(lines: list[Line], predicted_bytes: float | None) -> Figure | None:
    """Peak memory so far, with the predicted peak as a line, in the scale that suits the larger."""
    one = trace(lines, "memory_bytes", "measured peak", "series-1")
    if one is None:
        return None
    largest = max([*one["y"], predicted_bytes or 0.0])
    unit, scale = next((pair for pair in SCALES["bytes"] if largest >= pair[1]), SCALES["bytes"][-1])
    one["y"] = [value / scale for value in one["y"]]
    hlines = [{"y": predicted_bytes / scale, "label": "predicted peak"}] if predicted_bytes else []
    caption = "The highest so far; the prediction was written before step 1."
    return Figure("memory", "Memory", caption, unit, [one], from_zero=True, hlines=hlines)


def position_figure(loss_by_position: list[dict[str, Any]]) -> Figure | None:
    """Validation loss against the position in the window: how much the model gains from context."""
    # A diverged run's NaN is no point of a curve, and no JSON either.
    loss_by_position = [row for row in loss_by_position if math.isfinite(row["loss"])]
    if not loss_by_position:
        return None
    middles = [math.sqrt((row["first"] + 1) * (row["last"] + 1)) for row in loss_by_position]
    labels = [f"positions {row['first']}–{row['last']}" for row in loss_by_position]
    one = {"x": middles, "y": [row["loss"] for row in loss_by_position], "text": labels, "name": "validation"}
    one |= {"color": "series-2", "width": 2, "mode": "lines+markers"}
    caption = "Falls as long as more context helps; a rise at the end means positions that were not trained."
    return Figure(
        "position", "Loss by position in the window", caption, "loss (nats)", [one], x_title="position (log)"
    )  # fmt: skip


def build_figures(lines: list[Line], predicted_bytes: float | None, by_position: list[dict[str, Any]]) -> list[Figure]:
    """All figures that the run has data for, in the page's order."""
    figures = [loss_figure(lines), *[build(lines) for build in SIMPLE], memory_figure(lines, predicted_bytes)]
    figures.append(position_figure(by_position))
    return [figure for figure in figures if figure is not None and figure.traces]
