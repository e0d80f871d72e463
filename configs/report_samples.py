"""samples.txt: what the model wrote, each text under a heading that says when and how it was made.

    === 2026-01-31T12:00:00+00:00 | step 1000 | temperature 0.8 | top_k 50 | seed 1 ===
    Once upon a time [...]

A model's output is untrusted: a line of it that would read as a heading is indented by one space, and control
characters (an escape sequence could drive the terminal that shows it) become visible ones.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

FILE_NAME = "samples.txt"
HEADING = re.compile(r"^=== (.*) ===$", re.MULTILINE)
CONTROL_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}  # ESC becomes U+241B
CONTROL_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
CONTROL_PICTURES |= dict.fromkeys(range(0xD800, 0xE000), 0xFFFD)  # lone surrogates: UTF-8 cannot hold them


@dataclass
class Sample:
    heading: str
    text: str


def printable(text: str) -> str:
    """Text fit for a terminal or a page: control characters other than newline and tab become their pictures."""
    return text.translate(CONTROL_PICTURES)


def append_samples(run_dir: str | Path, texts: list[str], **settings: object) -> None:
    """Append texts (prompt and completion together) made with `settings`, for example step=1000, temperature=0.8."""
    made = [datetime.now(UTC).isoformat(timespec="seconds")]
    heading = " | ".join(made + [f"{name} {value}" for name, value in settings.items()])
    safe = [HEADING.sub(r" \g<0>", printable(text)) for text in texts]
    blocks = [f"=== {heading} ===\n{text}\n\n" for text in safe]
    with open(Path(run_dir) / FILE_NAME, "a", encoding="utf-8", errors="replace") as file:
        file.write("".join(blocks))


def read_samples(run_dir: str | Path) -> list[Sample]:
    """All samples of a run, oldest first; none when there is no file."""
    path = Path(run_dir) / FILE_NAME
    if not path.exists():
        return []
    # HEADING has one group, so split gives: before the first heading, then heading and text in turn.
    parts = HEADING.split(path.read_text(encoding="utf-8", errors="replace"))[1:]
    return [Sample(heading, text.strip("\n")) for heading, text in zip(parts[::2], parts[1::2], strict=True)]
