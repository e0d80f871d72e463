"""Pictures of positions: what RoPE does to them, and what a model gains from the tokens before."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llm.args import ModelConfig, RopeScaling
from llm.evaluation_context import ContextLoss
from llm.figures_style import COLOURS, INK, dress, styled
from llm.transformer import RoPE

Buckets = Sequence[dict[str, Any]]


def rope_product(rope: RoPE, head_dim: int, distances: torch.Tensor) -> np.ndarray:
    """The mean of cos over a head's pairs at each distance (n,): q k for a key that equals its query, unit length."""
    ones = torch.full((1, len(distances), 1, head_dim), head_dim**-0.5)  # (1, n, 1, D)
    turned = RoPE.rotate(ones, rope(distances[None]))
    at_zero = RoPE.rotate(ones, rope(torch.zeros_like(distances)[None]))
    return (turned * at_zero).sum(-1)[0, :, 0].numpy()


def draw_rope(model: ModelConfig, trained_len: int) -> Figure:
    """Angles by pair and position, and how a key's product with its query falls with their distance."""
    D = model.head_dim
    rope = RoPE(D, model.rope_theta, model.rope_scaling)
    with styled(10.0, 3.6) as figure:
        turns, products = figure.subplots(1, 2, width_ratios=(1, 1.4))
        cos, _ = rope(torch.arange(trained_len)[None])  # (1, T, 1, D)
        picture = turns.imshow(cos[0, :, 0, : D // 2].T.numpy(), aspect="auto", cmap="RdBu", interpolation="nearest")
        dress(turns, f"cos of the angle, theta {model.rope_theta:,.0f}, head_dim {D}", "position", "pair").grid(False)
        figure.colorbar(picture, ax=turns)
        distances = torch.unique(torch.logspace(0, math.log10(131_072), 600).long())
        variants = [
            (f"theta {model.rope_theta:,.0f}, head_dim {D}", rope, D),
            ("theta 10,000, head_dim 128", RoPE(128, 1e4), 128),
            ("theta 500,000, head_dim 128", RoPE(128, 5e5), 128),
            ("theta 500,000, Llama 3's scaling by 8", RoPE(128, 5e5, RopeScaling()), 128),
        ]
        for (name, one, head_dim), colour in zip(variants, COLOURS, strict=False):
            products.plot(distances, rope_product(one, head_dim, distances), color=colour, linewidth=1, label=name)
        products.axvline(trained_len, color=INK, linestyle=":", linewidth=1, label=f"this run's window, {trained_len}")
        dress(products, "Product of a query with an equal key", "distance (tokens)", "relative to distance 0")
        products.set_xscale("log")
        products.legend()
    return figure


def middles(buckets: Buckets) -> list[float]:
    return [math.sqrt((bucket["first"] + 1) * (bucket["last"] + 1)) for bucket in buckets]


def draw_context(by_position: Buckets, beyond: Buckets, trained_len: int, by_context: list[ContextLoss]) -> Figure:
    """Loss by position, within the trained window and beyond it, and the same tokens' loss by length of context."""
    with styled(10.0, 3.6) as figure:
        position, context = figure.subplots(1, 2)
        if beyond:
            position.plot(middles(beyond), [bucket["loss"] for bucket in beyond], "o-", color=COLOURS[1], markersize=3,
                          linewidth=1, label="in windows longer than training's")  # fmt: skip
        position.plot(middles(by_position), [bucket["loss"] for bucket in by_position], "o-", color=COLOURS[0],
                      markersize=3, label="in training's windows")  # fmt: skip
        position.axvline(trained_len, color=INK, linestyle=":", linewidth=1, label=f"trained up to here, {trained_len}")
        dress(position, "Loss by position in the window", "position", "nats a token").set_xscale("log", base=2)
        position.legend()
        draw_gain(context, by_context)
    return figure


def draw_gain(axes: Axes, by_context: list[ContextLoss]) -> None:
    lengths = [entry.context for entry in by_context]
    axes.plot(lengths, [entry.loss for entry in by_context], "o-", color=COLOURS[2], markersize=3)
    for entry in by_context[1:]:
        note = f"{-entry.gain:+.3f}\n\u00b1{entry.spread:.3f}"
        axes.annotate(note, (entry.context, entry.loss), xytext=(2, 7), textcoords="offset points", fontsize=6.5)
    dress(axes, "The same tokens, given only their last ... tokens", "context (tokens)", "nats a token")
    axes.set_xscale("log", base=2)
    axes.margins(y=0.15)
