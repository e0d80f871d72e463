"""Pictures of text: bits per byte by source beside a compressor, and a sample shaded by the model's confidence."""

import lzma
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from configs.report_samples import printable
from llm.bpe_tokenizer import Tokenizer
from llm.engine import Engine
from llm.engine_request import RequestParams
from llm.evaluation_text import Text
from llm.evaluation_windows import SourceScore
from llm.figures_style import COLOURS, INK, dress, styled
from llm.figures_training import Run

CONTROL = re.compile("[\u2400-\u2422\u2424-\u2426]")  # pictures of control characters, which the font lacks
COLUMNS, LINES = 92, 26  # characters and lines of the shaded sample
FONT_SIZE = 9.0
CHARACTER = 0.602 * FONT_SIZE / 72  # width of DejaVu Sans Mono's characters in inches
LINE = 1.55 * FONT_SIZE / 72
LEAST = 1e-4  # probabilities are shaded by their logarithm, from here to 1
CONFIDENCE = LinearSegmentedColormap.from_list("confidence", ("#c8501e", "#f3a36b", "#fbe3cf", "#ffffff"))
SHADES = LogNorm(LEAST, 1.0, clip=True)


def xz_bits_per_byte(texts: Iterable[Text]) -> dict[str, float]:
    """What xz needs for each source's texts put together: it has seen no other text, so it is no fair rival."""
    joined: dict[str, list[bytes]] = defaultdict(list)
    for text in texts:
        joined[text.source].append(text.text.encode("utf-8"))
    contents = {source: b"\n".join(parts) for source, parts in joined.items()}
    return {source: 8 * len(lzma.compress(data, preset=9)) / len(data) for source, data in contents.items()}


def draw_bits(runs: list[Run], scores: dict[str, SourceScore], xz: dict[str, float]) -> Figure:
    """Validation bits per byte while runs train, and by source at the end of the first of them."""
    with styled(10.0, 3.6) as figure:
        over, by_source = figure.subplots(1, 2)
        for run, colour in zip(runs, np.resize(np.array(COLOURS), len(runs)), strict=True):
            over.plot(*run.column("val_bits_per_byte"), "o-", color=colour, markersize=2.5, linewidth=1, label=run.name)
        dress(over, "Validation", "training tokens (millions)", "bits per byte").legend(ncols=2)
        names = sorted(scores, key=lambda name: scores[name].bits_per_byte)
        places = np.arange(len(names))
        for offset, values, colour, label in (
            (-0.19, [scores[name].bits_per_byte for name in names], COLOURS[0], runs[0].name),
            (0.19, [xz[name] for name in names], COLOURS[4], "xz -9 on this text alone"),
        ):
            bars = by_source.barh(places + offset, values, height=0.36, color=colour, label=label)
            by_source.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
        by_source.set_yticks(places, names)
        by_source.margins(x=0.12)
        dress(by_source, "By source", "bits per byte").invert_yaxis()
        by_source.legend(loc="lower right", bbox_to_anchor=(1.0, 0.99), ncols=2)
    return figure


@dataclass(frozen=True)
class ShadedToken:
    """A sampled token: its text, its probability, and the likeliest tokens in its place."""

    text: str
    probability: float
    alternatives: list[tuple[str, float]]


def sample_tokens(engine: Engine, tokenizer: Tokenizer, prompt: str, params: RequestParams) -> list[ShadedToken]:
    """One completion, token by token; text that waits for a whole character is with the token that completes it."""
    request = engine.submit([tokenizer.eot_id, *tokenizer.encode(prompt)], params)
    tokens = []
    while engine.has_work:
        for event in engine.step():
            if event.request_id == request:
                others = [(tokenizer.decode([i]), math.exp(log_prob)) for i, log_prob in event.alternatives]
                tokens.append(ShadedToken(event.text, math.exp(event.log_prob), others))
    return tokens


def draw_sample(prompt: str, tokens: list[ShadedToken], title: str) -> Figure:
    """The text with each token on its shade, darker where it was less likely, and what the least likely ones beat."""
    pieces = [(prompt, None), *((token.text, token.probability) for token in tokens)]
    width = COLUMNS * CHARACTER + 0.4
    used = 1 + max(line for line, _, _, _ in layout(pieces))
    height = used * LINE + 1.9
    with styled(width, height) as figure:
        figure.set_layout_engine("none")
        axes = figure.add_axes((0.2 / width, 1.55 / height, COLUMNS * CHARACTER / width, used * LINE / height))
        axes.set(xlim=(0, COLUMNS), ylim=(used, 0))
        axes.set_axis_off()
        axes.set_title(title, loc="left")
        for line, column, text, probability in layout(pieces):
            draw_piece(axes, (line, column), text, probability)
        bar = figure.add_axes((0.2 / width, 0.85 / height, 2.2 / width, 0.13 / height))
        scale = ScalarMappable(SHADES, CONFIDENCE)
        figure.colorbar(scale, cax=bar, orientation="horizontal", label="probability of the token")
        figure.text(2.75 / width, 1.3 / height, surprises(tokens), va="top", fontsize=6.8, family="DejaVu Sans Mono")
    return figure


def layout(pieces: list[tuple[str, float | None]]) -> list[tuple[int, int, str, float | None]]:
    """Pieces cut at line ends, (line, column, text, probability), as many lines as the picture holds."""
    placed, line, column = [], 0, 0
    for text, probability in pieces:
        rest = CONTROL.sub("\u25a1", printable(text.expandtabs(4)))
        while rest and line < LINES:
            if rest[0] == "\n":
                placed.append((line, column, "\u21b5" if column < COLUMNS else "", probability))
                line, column, rest = line + 1, 0, rest[1:]
                continue
            if column == COLUMNS:
                line, column = line + 1, 0
                continue
            part = rest.split("\n")[0][: COLUMNS - column]
            placed.append((line, column, part, probability))
            column, rest = column + len(part), rest[len(part) :]
    return [entry for entry in placed if entry[0] < LINES]


def draw_piece(axes: Axes, place: tuple[int, int], text: str, probability: float | None) -> None:
    line, column = place
    if probability is not None:
        shade = CONFIDENCE(SHADES(probability))
        axes.add_patch(Rectangle((column, line + 0.04), len(text), 0.92, facecolor=shade, edgecolor="#bbbbbb",
                                 linewidth=0.3))  # fmt: skip
    weight = "bold" if probability is None else "normal"
    for offset, character in enumerate(text):  # one by one, so that columns hold whatever the renderer's hinting
        axes.text(column + offset + 0.5, line + 0.72, character.replace("$", r"\$"), fontsize=FONT_SIZE, color=INK,
                  family="DejaVu Sans Mono", weight=weight, ha="center", va="baseline")  # fmt: skip


def surprises(tokens: list[ShadedToken], count: int = 5) -> str:
    """The least likely tokens, a line each, with the three likeliest in their place."""
    least = sorted(tokens, key=lambda token: token.probability)[:count]
    lines = ["least likely tokens, and the likeliest in their place"]
    for token in least:
        others = " ".join(f"{short(text):>11} {probability:.2f}" for text, probability in token.alternatives[:3])
        lines.append(f"{short(token.text):>11} {token.probability:.1e} {others}".replace("$", r"\$"))
    return "\n".join(lines)


def short(text: str) -> str:
    """A token as it is written in code, in eleven characters at most."""
    return repr(text) if len(repr(text)) <= 11 else repr(text)[:9] + "\u2026'"
