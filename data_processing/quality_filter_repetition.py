"""Gopher's repetition rules (Rae et al. 2021, table A1): repeated paragraphs, lines and n-grams.

Two readings of the paper exist for n-grams; this is datatrove's: a top n-gram counts all its occurrences, a duplicate
n-gram counts each occurrence after the first, passing over its words. Shares are of all characters of the text.
"""

from dataclasses import dataclass, field

import numpy as np

from configs.errors import UserError
from data_processing.quality_filter_words import TextView

TOP_NS, DUPLICATE_NS = (2, 3, 4), (5, 6, 7, 8, 9, 10)


@dataclass
class RepetitionConfig:
    """Bounds in 0..1; 0 switches a rule off. The lists hold one bound for each n of TOP_NS and DUPLICATE_NS."""

    max_paragraph_share: float = 0.3
    max_paragraph_character_share: float = 0.2
    max_line_share: float = 0.3
    max_line_character_share: float = 0.2
    max_top_gram_shares: list[float] = field(default_factory=lambda: [0.2, 0.18, 0.16])
    max_duplicate_gram_shares: list[float] = field(default_factory=lambda: [0.15, 0.14, 0.13, 0.12, 0.11, 0.10])

    def __post_init__(self):
        singles = [self.max_paragraph_share, self.max_paragraph_character_share, self.max_line_share]
        for bound in [
            *singles,
            self.max_line_character_share,
            *self.max_top_gram_shares,
            *self.max_duplicate_gram_shares,
        ]:
            if not 0 <= bound <= 1:
                raise UserError(f"quality_filter.repetition: {bound} is out of range; use shares in 0..1")


def split_runs(text: str, fewest: int) -> list[str]:
    """The text cut at runs of `fewest` or more line ends; faster than a regular expression."""
    separator = "\n" * fewest
    while separator + "\n" in text:
        text = text.replace(separator + "\n", separator)
    return text.split(separator)


def repeated(parts: list[str]) -> tuple[int, int]:
    """(how many parts repeat an earlier one, their characters)."""
    if len(set(parts)) == len(parts):
        return 0, 0
    seen: set[str] = set()
    count = characters = 0
    for part in parts:
        if part in seen:
            count, characters = count + 1, characters + len(part)
        seen.add(part)
    return count, characters


def top_gram_characters(view: TextView, n: int) -> int:
    """Occurrences of the most frequent n-gram (the first of several) times its characters, spaces included."""
    grams = view.grams(n)
    if not grams.size:
        return 0
    _, first, counts = np.unique(grams, return_index=True, return_counts=True)
    most = counts.max()
    return int(most) * (view.gram_characters(int(first[counts == most].min()), n) + n - 1)


def most_frequent(grams: np.ndarray) -> int:
    """How often the most frequent n-gram occurs."""
    ordered = np.sort(grams)
    starts = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    return int((np.append(starts, grams.size) - np.append(0, starts)).max())


def covered_characters(view: TextView, n: int) -> int:
    """Characters of all words that lie in an n-gram which stood before: no less than duplicate_gram_characters."""
    grams = view.grams(n)
    order = np.argsort(grams, kind="stable")
    again = order[1:][grams[order[1:]] == grams[order[:-1]]]  # positions of n-grams that stood before
    if not again.size:
        return 0
    steps = np.zeros(len(view.words) + 1, dtype=np.int64)
    steps[again] += 1
    steps[again + n] -= 1
    lengths = view.table.lengths[view.words]
    return int(lengths[np.cumsum(steps)[:-1] > 0].sum())


def duplicate_gram_characters(view: TextView, n: int) -> int:
    """Characters of n-grams that stood before; after one, reading goes on behind its last word."""
    listed, seen, at, characters = view.grams(n).tolist(), set(), 0, 0
    while at < len(listed):
        if listed[at] in seen:
            characters += view.gram_characters(at, n)
            at += n
        else:
            seen.add(listed[at])
            at += 1
    return characters


def _judge_top_grams(view: TextView, config: RepetitionConfig) -> tuple[str, str]:
    if len(view.words) < TOP_NS[0]:
        return "", ""
    size, most = max(len(view.text), 1), most_frequent(view.grams(TOP_NS[0]))
    for n, bound in zip(TOP_NS, config.max_top_gram_shares, strict=True):
        # No n-gram is more frequent than the shorter ones in it: most texts need no look at the longer ones.
        if not bound or most * (view.longest_gram(n) + n - 1) <= bound * size:
            continue
        if (share := top_gram_characters(view, n) / size) > bound:
            return f"top_{n}_gram", f"{share:.3f} > max_top_gram_shares[{n}]={bound}"
    return "", ""


def _judge_duplicate_grams(view: TextView, config: RepetitionConfig) -> tuple[str, str]:
    bounds = [bound for bound in config.max_duplicate_gram_shares if bound]
    # A repeated longer n-gram is made of repeated shorter ones: where these cover little, no rule can be broken.
    if not bounds or covered_characters(view, DUPLICATE_NS[0]) <= min(bounds) * len(view.text):
        return "", ""
    for n, bound in zip(DUPLICATE_NS, config.max_duplicate_gram_shares, strict=True):
        if bound and (share := duplicate_gram_characters(view, n) / max(len(view.text), 1)) > bound:
            return f"duplicate_{n}_grams", f"{share:.3f} > max_duplicate_gram_shares[{n}]={bound}"
    return "", ""


def judge_repetition(view: TextView, config: RepetitionConfig) -> tuple[str, str]:
    """(reason, detail) of the first rule that the text breaks, ("", "") for none."""
    text = view.text
    size = max(len(text), 1)
    for name, parts, bounds in (
        (
            "paragraph",
            split_runs(text.strip(), 2),
            (config.max_paragraph_share, config.max_paragraph_character_share),
        ),
        ("line", split_runs(text, 1), (config.max_line_share, config.max_line_character_share)),
    ):
        count, characters = repeated(parts)
        for kind, share, bound in (("", count / len(parts), bounds[0]), ("_character", characters / size, bounds[1])):
            if bound and share > bound:
                return f"repeated_{name}{kind}s", f"{share:.3f} > max_{name}{kind}_share={bound}"
    reason, detail = _judge_top_grams(view, config)
    return (reason, detail) if reason else _judge_duplicate_grams(view, config)
