"""The scaling law's picture: losses of all runs with the law through them, its errors, and the best size by compute."""

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llm.figures_style import COLOURS, INK, dress, styled
from llm.scaling_laws_fit import Fit, held_out


def draw_scaling(found: Fit) -> Figure:
    sizes = sorted({point.parameters for point in found.points})
    shade = dict(zip(sizes, colormaps["viridis"](np.linspace(0.0, 0.88, len(sizes))), strict=True))
    with styled(10.5, 3.9) as figure:
        by_tokens, by_compute, best = figure.subplots(1, 3)
        for size in sizes:
            draw_size(by_tokens, by_compute, found, size, shade[size])
        law = found.law
        formula = f"L = {law.E:.2f} + {law.A:,.3g} / N^{law.alpha:.2f} + {law.B:,.3g} / D^{law.beta:.2f}"
        dress(by_tokens, "Measured (points) and fitted (lines)", "training tokens D", "validation loss (nats a token)")
        dress(by_compute, "The same by compute", "6 N D (FLOPs)", "validation loss (nats a token)")
        by_compute.legend(title="parameters N", title_fontsize=8, ncols=2)
        for axes in (by_tokens, by_compute):
            axes.set_xscale("log")
        draw_best(best, found)
        figure.suptitle(formula, fontsize=10, x=0.01, ha="left")
    return figure


def draw_size(by_tokens: Axes, by_compute: Axes, found: Fit, size: float, colour: tuple[float, ...]) -> None:
    points = [point for point in found.points if point.parameters == size]
    tokens, losses = np.array([p.tokens for p in points]), np.array([p.loss for p in points])
    line = np.geomspace(tokens.min(), tokens.max(), 60)
    for axes, scale in ((by_tokens, 1.0), (by_compute, 6.0 * size)):
        axes.plot(line * scale, found.law.loss(size, line), color=colour, linewidth=1.2)
        axes.scatter(tokens * scale, losses, s=9, color=colour, linewidths=0, label=f"{size / 1e6:.2f}M")


def draw_best(axes: Axes, found: Fit) -> None:
    """Sizes of least loss over the runs' compute, and what the law of the smaller runs said of the largest."""
    compute = np.array([6.0 * point.parameters * point.tokens for point in found.points])
    budgets = np.geomspace(compute.min(), compute.max(), 50)
    for index, law in enumerate(found.without.values()):
        label = "without one of the runs" if index == 0 else None
        axes.plot(budgets, law.best_parameters(budgets), color=COLOURS[5], linewidth=0.8, alpha=0.8, label=label)
    axes.plot(budgets, found.law.best_parameters(budgets), color=INK, linewidth=1.5, label="all runs")
    dress(axes, "Parameters of least loss", "6 N D (FLOPs)", "N")
    axes.set_xscale("log")
    axes.set_yscale("log")
    told = held_out(found)
    if told is not None:
        note = f"largest run's last loss: {told.point.loss:.3f},\nby the law of the others {told.predicted:.3f}"
        axes.text(0.03, 0.97, note, transform=axes.transAxes, va="top", fontsize=8)
    axes.legend(loc="lower right")
