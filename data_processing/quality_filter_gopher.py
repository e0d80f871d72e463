"""Gopher's quality rules (Rae et al. 2021, appendix A1): word count and length, symbols, bullets, letters, stop words.

They were made for English: documents without spaces between words, and other languages than the stop words', fail them.
"""

from dataclasses import dataclass, field

import numpy as np

from data_processing.quality_filter_words import TextView

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
BULLETS = ("\u2022", "-")
ELLIPSES = ("...", "\u2026")


@dataclass
class GopherConfig:
    """Bounds; 0 switches a rule off."""

    min_words: int = 50
    max_words: int = 100_000
    min_mean_word_length: float = 3.0
    max_mean_word_length: float = 10.0
    max_symbol_word_ratio: float = 0.1  # "#", and ellipses, to words
    max_bullet_line_share: float = 0.9
    max_ellipsis_line_share: float = 0.3
    min_alphabetic_word_share: float = 0.8  # words with a letter, of all words
    min_stop_words: int = 2  # different ones
    stop_words: list[str] = field(default_factory=lambda: list(STOP_WORDS))


def _word_rules(view: TextView, config: GopherConfig) -> tuple[str, str]:
    """Number and length of the words that are more than punctuation."""
    words, table = view.words, view.table
    lengths = table.lengths[words[table.real[words]]]
    count, mean = lengths.size, float(lengths.mean()) if lengths.size else 0.0
    if config.min_words and count < config.min_words:
        return "few_words", f"{count} words < min_words={config.min_words}"
    if config.max_words and count > config.max_words:
        return "many_words", f"{count} words > max_words={config.max_words}"
    if config.min_mean_word_length and mean < config.min_mean_word_length:
        return "short_words", f"mean length {mean:.2f} < min_mean_word_length={config.min_mean_word_length}"
    if config.max_mean_word_length and mean > config.max_mean_word_length:
        return "long_words", f"mean length {mean:.2f} > max_mean_word_length={config.max_mean_word_length}"
    return "", ""


def _symbol_rules(view: TextView, config: GopherConfig) -> tuple[str, str]:
    text, count, bound = view.text, max(len(view.words), 1), config.max_symbol_word_ratio
    if bound and (ratio := text.count("#") / count) > bound:
        return "many_hashes", f"{ratio:.3f} a word > max_symbol_word_ratio={bound}"
    if bound and (ratio := (text.count("...") + text.count("\u2026")) / count) > bound:
        return "many_ellipses", f"{ratio:.3f} a word > max_symbol_word_ratio={bound}"
    return "", ""


def _line_rules(view: TextView, config: GopherConfig) -> tuple[str, str]:
    lines = view.text.splitlines()
    total = max(len(lines), 1)
    if bound := config.max_bullet_line_share:
        share = sum(line.lstrip().startswith(BULLETS) for line in lines) / total
        if share > bound:
            return "bullet_lines", f"{share:.3f} > max_bullet_line_share={bound}"
    if (bound := config.max_ellipsis_line_share) and ("..." in view.text or "\u2026" in view.text):
        share = sum(line.rstrip().endswith(ELLIPSES) for line in lines) / total
        if share > bound:
            return "ellipsis_lines", f"{share:.3f} > max_ellipsis_line_share={bound}"
    return "", ""


def _language_rules(view: TextView, config: GopherConfig) -> tuple[str, str]:
    words, table = view.words, view.table
    if bound := config.min_alphabetic_word_share:
        share = int(table.alphabetic[words].sum()) / max(len(words), 1)
        if share < bound:
            return "few_alphabetic_words", f"{share:.3f} < min_alphabetic_word_share={bound}"
    if config.min_stop_words:
        stop_words = np.array([table.number(word) for word in config.stop_words], dtype=np.int64)
        found = int((words[:, None] == stop_words).any(axis=0).sum())
        if found < config.min_stop_words:
            return "few_stop_words", f"{found} different ones < min_stop_words={config.min_stop_words}"
    return "", ""


def judge_gopher(view: TextView, config: GopherConfig) -> tuple[str, str]:
    """(reason, detail) of the first rule that the text breaks, ("", "") for none."""
    for rules in (_word_rules, _symbol_rules, _line_rules, _language_rules):
        reason, detail = rules(view, config)
        if reason:
            return reason, detail
    return "", ""
