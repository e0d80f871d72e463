"""FineWeb's own rules (Penedo et al. 2024): lines without end marks, short lines, repeated lines, lists."""

from dataclasses import dataclass

from data_processing.quality_filter_repetition import repeated
from data_processing.quality_filter_words import TextView

# Sentence ends of the scripts in wide use; datatrove lists 150, the rest of which ends hardly any line on the web.
TERMINAL = tuple(".?!\u3002\uff1f\uff01\uff0e\uff61\u061f\u06d4\u0964\u0965\u0589\u1362\u1367\u17d4\u104a\u104b")
TERMINAL += tuple("\u203c\u203d\u2047\u2048\u2049")


@dataclass
class FineWebConfig:
    """Bounds in 0..1 unless said otherwise; 0 switches a rule off."""

    min_end_mark_line_share: float = 0.12
    max_short_line_share: float = 0.67
    short_line_characters: int = 30
    max_repeated_character_share: float = 0.01
    max_lines_per_word: float = 0.3


def judge_fineweb(view: TextView, config: FineWebConfig) -> tuple[str, str]:
    """(reason, detail) of the first rule that the text breaks, ("", "") for none."""
    text = view.text
    lines = [line for line in text.split("\n") if line.strip()]
    total = max(len(lines), 1)
    share = sum(line.endswith(TERMINAL) for line in lines) / total
    if share < config.min_end_mark_line_share:
        return "few_end_marks", f"{share:.3f} of lines < min_end_mark_line_share={config.min_end_mark_line_share}"
    share = sum(len(line) <= config.short_line_characters for line in lines) / total
    if (bound := config.max_short_line_share) and share > bound:
        return "short_lines", f"{share:.3f} > max_short_line_share={bound}"
    share = repeated(lines)[1] / max(len(text) - text.count("\n"), 1)
    if (bound := config.max_repeated_character_share) and share > bound:
        return "repeated_characters", f"{share:.3f} > max_repeated_character_share={bound}"
    share = text.count("\n") / max(len(view.words), 1)
    if (bound := config.max_lines_per_word) and share > bound:
        return "list_like", f"{share:.3f} line ends a word > max_lines_per_word={bound}"
    return "", ""
