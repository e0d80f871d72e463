"""The quality_filter stage: sets of cheap rules, each rule named in the drop reason and set by config.

The set "characters" asks whether this is text at all (not a number dump, a menu, an encoded file), not whether it is
good. It counts characters, not words, so that it holds for scripts without spaces; a rule whose bound is 0 is off
(max_*) or lets everything pass (min_*). The other sets are those that the web corpora were made with, for English
prose: "repetition" and "gopher" (MassiveText), "c4" (which also takes lines out), "fineweb". They run in this order.
"""

import unicodedata
from collections import Counter
from dataclasses import dataclass, field, fields

import numpy as np

from configs.errors import UserError, check_choice
from data_processing.document import Document
from data_processing.quality_filter_c4 import C4Config, clean_c4
from data_processing.quality_filter_fineweb import FineWebConfig, judge_fineweb
from data_processing.quality_filter_gopher import GopherConfig, judge_gopher
from data_processing.quality_filter_repetition import RepetitionConfig, judge_repetition
from data_processing.quality_filter_words import TextView, WordTable
from data_processing.stage import StatelessStage

RULE_SETS = ("characters", "repetition", "gopher", "c4", "fineweb")

PUNCTUATION = frozenset(".,;:!?'\"()-\u2010\u2011\u2013\u2014\u2018\u2019\u201c\u201d\u2026、。，！？")
ASCII = bytes(range(128))
LONG_RUN = 200
SLICE_BYTES = 1 << 20


@dataclass
class QualityFilterConfig:
    """Which sets of rules run, and the bounds; shares lie in 0..1. Set a bound to 0 to switch its rule off."""

    rules: list[str] = field(default_factory=lambda: ["characters"])
    min_characters: int = 100
    max_characters: int = 0
    min_letter_share: float = 0.5  # letters and their marks, of all characters but white space
    max_symbol_share: float = 0.25  # neither letter, digit, white space nor ordinary punctuation
    max_one_character_share: float = 0.35  # the most frequent character but white space ("aaaa", "-----")
    max_repeated_line_share: float = 0.3  # characters of lines that stood in the document before (Gopher: 0.3)
    max_run_share: float = 0.3  # characters in unbroken ASCII runs of 200 or more (encoded data)
    repetition: RepetitionConfig = field(default_factory=RepetitionConfig)
    gopher: GopherConfig = field(default_factory=GopherConfig)
    c4: C4Config = field(default_factory=C4Config)
    fineweb: FineWebConfig = field(default_factory=FineWebConfig)

    def __post_init__(self):
        for name in self.rules:
            check_choice("quality_filter.rules", name, RULE_SETS)
        for f in fields(self):
            value = getattr(self, f.name)
            if not isinstance(value, int | float):
                continue
            if value < 0 or (f.name.endswith("_share") and value > 1):
                bound = "0..1" if f.name.endswith("_share") else "0 or more"
                raise UserError(f"quality_filter.{f.name}={value} is out of range; use a value in {bound}")


@dataclass(slots=True)
class CharacterShares:
    """How a text's visible characters divide; all in 0..1."""

    letters: float
    symbols: float
    most_frequent: float


def _classify(character: str) -> tuple[bool, bool, bool]:
    """(letter or combining mark, symbol, anything but white space)."""
    kind = unicodedata.category(character)[0]
    visible = not character.isspace()
    return kind in "LM", visible and kind not in "LMN" and character not in PUNCTUATION, visible


ASCII_CLASSES = np.array([_classify(chr(code)) for code in range(128)], dtype=np.int64)  # (128, 3)


def count_bytes(data: bytes) -> np.ndarray:
    """How often each byte value occurs, (256,) int64; in slices, since bincount widens its input eightfold."""
    values, counts = np.frombuffer(data, dtype=np.uint8), np.zeros(256, dtype=np.int64)
    for start in range(0, values.size, SLICE_BYTES):
        counts += np.bincount(values[start : start + SLICE_BYTES], minlength=256)
    return counts


def character_shares(text: str) -> CharacterShares:
    """Letters (with combining marks), symbols and the most frequent character as shares of the visible ones.

    ASCII is counted in one NumPy pass; only the characters beyond it are looked at one by one.
    """
    data = text.encode("utf-8")
    counts = count_bytes(data)[:128]  # (128,)
    letters, symbols, total = (int(n) for n in counts @ ASCII_CLASSES)
    most = int((counts * ASCII_CLASSES[:, 2]).max())
    rest = "" if text.isascii() else data.translate(None, ASCII).decode("utf-8")
    for character, count in Counter(rest).items():
        letter, symbol, visible = _classify(character)
        letters, symbols, total = letters + letter * count, symbols + symbol * count, total + visible * count
        most = max(most, visible * count)
    total = max(total, 1)
    return CharacterShares(letters / total, symbols / total, most / total)


def repeated_line_share(text: str) -> float:
    """Characters of lines that repeat an earlier line, of the characters of all lines (outer white space aside)."""
    seen: set[str] = set()
    repeated = total = 0
    for raw in text.split("\n"):
        line = raw.strip()
        total += len(line)
        if line in seen:
            repeated += len(line)
        seen.add(line)
    return repeated / max(total, 1)


def run_share(text: str) -> float:
    """Unbroken runs of 200 or more ASCII characters, of all characters: base64, minified code, hex dumps."""
    data = np.frombuffer(f" {text} ".encode(), dtype=np.uint8)
    breaks = np.flatnonzero(data - np.uint8(33) >= 95)  # wraps: white space, controls, any byte of another script
    runs = breaks[1:] - breaks[:-1] - 1
    return int(runs[runs >= LONG_RUN].sum()) / max(len(text), 1)


class QualityFilter(StatelessStage):
    """Drops a document at the first rule it breaks, cheapest set of rules first."""

    name = "quality_filter"

    def __init__(self, config: QualityFilterConfig):
        self.config = config
        self.rules = [name for name in RULE_SETS if name in config.rules]
        self.counts: Counter = Counter()
        self.table = WordTable()

    def judge(self, document: Document) -> tuple[str, str]:
        view, config = TextView(document.text, self.table), self.config
        for name in self.rules:
            if name == "characters":
                reason, detail = judge_characters(view.text, config)
            elif name == "repetition":
                reason, detail = judge_repetition(view, config.repetition)
            elif name == "gopher":
                reason, detail = judge_gopher(view, config.gopher)
            elif name == "fineweb":
                reason, detail = judge_fineweb(view, config.fineweb)
            else:
                cleaned, reason, detail = clean_c4(view.text, config.c4)
                if not reason and cleaned != view.text:
                    self.counts["c4_characters_removed"] += len(view.text) - len(cleaned)
                    document.text, view = cleaned, TextView(cleaned, self.table)
            if reason:
                return reason, detail
        return "", ""

    def take_counts(self) -> Counter:
        taken, self.counts = self.counts, Counter()
        return taken


def judge_characters(text: str, c: QualityFilterConfig) -> tuple[str, str]:
    """(reason, detail) of the first rule on characters and lines that the text breaks, ("", "") for none."""
    if len(text) < c.min_characters:
        return "too_short", f"{len(text)} characters < min_characters={c.min_characters}"
    if c.max_characters and len(text) > c.max_characters:
        return "too_long", f"{len(text)} characters > max_characters={c.max_characters}"
    shares = character_shares(text)
    if shares.letters < c.min_letter_share:
        return "few_letters", f"letters {shares.letters:.3f} < min_letter_share={c.min_letter_share}"
    if _above(shares.symbols, c.max_symbol_share):
        return "many_symbols", f"symbols {shares.symbols:.3f} > max_symbol_share={c.max_symbol_share}"
    if _above(shares.most_frequent, c.max_one_character_share):
        share = f"most frequent character {shares.most_frequent:.3f}"
        return "one_character", f"{share} > max_one_character_share={c.max_one_character_share}"
    if c.max_repeated_line_share and _above(lines := repeated_line_share(text), c.max_repeated_line_share):
        return "repeated_lines", f"repeated {lines:.3f} > max_repeated_line_share={c.max_repeated_line_share}"
    if c.max_run_share and _above(runs := run_share(text), c.max_run_share):
        return "long_runs", f"unbroken runs {runs:.3f} > max_run_share={c.max_run_share}"
    return "", ""


def _above(value: float, bound: float) -> bool:
    return bound > 0 and value > bound
