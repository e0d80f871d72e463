"""C4's rules (Raffel et al. 2020): lines that are no sentences go, and pages with too few left, or with marks of code.

As in datatrove; the list of bad words is left out (harmful_detect does that work).
"""

import re
from dataclasses import dataclass

from data_processing.quality_filter_tokens import count_sentences

CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
TERMINAL = (".", "?", "!", '"', "'")
ELLIPSIS = "..."
POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")


@dataclass
class C4Config:
    """0 or false switches a rule off."""

    min_sentences: int = 5
    min_words_per_line: int = 3
    max_word_length: int = 1_000
    terminal_punctuation: bool = True  # lines must end in . ? ! or a quotation mark
    remove_citations: bool = True
    drop_lorem_ipsum: bool = True
    drop_curly_brackets: bool = True
    remove_javascript_lines: bool = True
    remove_policy_lines: bool = True


def _line_stays(line: str, config: C4Config) -> bool:
    words = line.split()
    if config.max_word_length and len(line) > config.max_word_length and max(map(len, words)) > config.max_word_length:
        return False
    if config.terminal_punctuation:
        shown = CITATION.sub("", line) if config.remove_citations and "[" in line else line
        if not shown.endswith(TERMINAL) or shown.endswith(ELLIPSIS):
            return False
    return len(words) >= config.min_words_per_line


def clean_c4(text: str, config: C4Config) -> tuple[str, str, str]:
    """(text of the lines that stay, reason, detail); a reason drops the document."""
    kept, sentences = [], 0
    for raw in text.splitlines():
        line = raw.strip()
        if not _line_stays(line, config):
            continue
        if config.remove_citations and "[" in line:
            line = CITATION.sub("", line)
        low = line.lower()
        if config.drop_lorem_ipsum and "lorem ipsum" in low:
            return text, "lorem_ipsum", "the words stand in the text"
        if config.remove_javascript_lines and "javascript" in low:
            continue
        if config.drop_curly_brackets and "{" in line:
            return text, "curly_bracket", "a { stands in the text"
        if config.remove_policy_lines and any(phrase in low for phrase in POLICY):
            continue
        if sentences < config.min_sentences:  # counting stops where it cannot matter
            sentences += count_sentences(line)
        kept.append(line)
    if sentences < config.min_sentences:
        return text, "few_sentences", f"{sentences} sentences < min_sentences={config.min_sentences}"
    return "\n".join(kept), "", ""
