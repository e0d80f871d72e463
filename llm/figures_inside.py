"""Pictures of what a model has inside: its embedding table in two dimensions, and its heads' attention."""

import unicodedata

from matplotlib.figure import Figure
from torch import Tensor

from llm.bpe_tokenizer import Tokenizer
from llm.evaluation_embeddings import principal_components
from llm.figures_style import COLOURS, dress, styled

KINDS = ("word, with a space", "piece of a word", "number", "punctuation", "white space", "other")
LABELLED = 70  # tokens with their text in the map


def token_kind(piece: bytes) -> str:
    """Which of KINDS a token's bytes are."""
    try:
        text = piece.decode("utf-8")
    except UnicodeDecodeError:
        return "other"
    if not text.strip():
        return "white space"
    word = text.strip()
    if word.isalpha():
        return "word, with a space" if text[0].isspace() else "piece of a word"
    if word.isdigit():
        return "number"
    return "punctuation" if all(unicodedata.category(c)[0] in "PS" for c in word) else "other"


def draw_embeddings(table: Tensor, tokenizer: Tokenizer) -> Figure:
    """Table (V, C) along its first two principal components, by kind of token; the commonest tokens are written out.

    A byte-level BPE learns its commonest merges first, so low ids past the bytes are common tokens.
    """
    components = principal_components(table, 2)
    points = components.coordinates.cpu()  # (V, 2)
    kinds = [token_kind(tokenizer.token_bytes(i)) for i in range(len(points))]
    with styled(8.5, 6.0) as figure:
        axes = figure.subplots()
        for kind, colour in zip(KINDS, COLOURS, strict=False):
            rows = [i for i, own in enumerate(kinds) if own == kind]
            axes.scatter(
                *points[rows].T.numpy(), s=6, color=colour, alpha=0.45, linewidths=0, label=f"{kind} ({len(rows)})"
            )
        for i in written_out(tokenizer, kinds, points):
            axes.annotate(
                tokenizer.decode([i]).replace(" ", "\u2423").replace("$", r"\$"), points[i].tolist(), fontsize=7
            )
        share = [f"component {n + 1}: {value:.1%} of the variance" for n, value in enumerate(components.shares)]
        dress(axes, "Input embeddings along their first two principal components", *share)
        axes.legend(markerscale=3, loc="best")
    return figure


def written_out(tokenizer: Tokenizer, kinds: list[str], points: Tensor) -> list[int]:
    """Common tokens that have room in the picture: none lies close to one that is written already."""
    spread = points.std(0)
    chosen: list[int] = []
    for i in range(256, len(points)):
        if kinds[i] in ("white space", "other"):
            continue
        if all(((points[i] - points[j]) / spread).abs().max() > 0.22 for j in chosen):
            chosen.append(i)
        if len(chosen) == LABELLED:
            break
    return chosen


def draw_attention(maps: Tensor, pieces: list[str], layers: list[int]) -> Figure:
    """A picture a head: maps (layers, H, T, T), a row says where its token looks; square roots of the shares."""
    L, H, T, _ = maps.shape
    labels = [piece.replace(" ", "\u2423").replace("\n", "\u21b5").replace("$", r"\$") for piece in pieces]
    with styled(1.0 + 1.75 * H, 0.8 + 1.75 * L) as figure:
        grid = figure.subplots(L, H, squeeze=False)
        for row, layer in enumerate(layers):
            for head in range(H):
                axes = grid[row][head]
                axes.imshow(
                    maps[row, head].float().cpu().sqrt().numpy(), cmap="magma", vmin=0, vmax=1, interpolation="nearest"
                )
                axes.set_title(f"layer {layer}, head {head}", fontsize=7, loc="left", pad=2)
                axes.set_xticks([])
                axes.set_yticks(range(T) if head == 0 and T <= 40 else [])
                if head == 0 and T <= 40:
                    axes.set_yticklabels(labels, fontsize=min(5.0, 110 / T))
        figure.suptitle("Attention of every head: a row is a token, bright is where it looks", fontsize=10)
    return figure
