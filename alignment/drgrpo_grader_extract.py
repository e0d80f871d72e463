"""Find the answer in a model's text: \\boxed, <answer>, ####. Every scanner here is linear in the text's length.

A text is first cut to 64 KB round its last marker, so that nothing behind this file ever sees more.
"""

import re

MAX_CHARS = 65_536
MAX_NESTING = 8
MARKERS = ("<answer>", "</answer>", "\\boxed", "\\fbox", "####")
BOX = re.compile(r"\\f?box(?:ed)?(?![A-Za-z])")


def cut(text: str, limit: int = MAX_CHARS) -> str:
    """At most `limit` characters: the part round the last marker, or the text's end when it has none."""
    if len(text) <= limit:
        return text
    at = max(text.rfind(marker) for marker in MARKERS)
    if at < 0:
        return text[-limit:]
    start = max(0, min(at - limit // 2, len(text) - limit))
    return text[start : start + limit]


def boxes(text: str) -> list[str] | None:
    """The contents of all outermost \\boxed and \\fbox, in order; None when the last has no closing brace.

    A box without braces holds the next token: "\\boxed 5" holds "5".
    """
    found, position = [], 0
    for match in BOX.finditer(text):
        if match.start() < position:
            continue  # inside the box before
        start = match.end()
        while start < len(text) and text[start] == " ":
            start += 1
        if start < len(text) and text[start] == "{":
            end = closing_brace(text, start)
            if end is None:
                return None
            found.append(text[start + 1 : end])
            position = end + 1
        else:
            word = re.compile(r"[^\s${}\\]+").match(text, start)
            if word is None:
                return None
            found.append(word.group().rstrip(".,;"))
            position = word.end()
    return found


def closing_brace(text: str, opening: int) -> int | None:
    """Where the brace at `opening` is closed; escaped braces do not count; None when it never is."""
    depth, position = 0, opening
    while position < len(text):
        char = text[position]
        if char == "\\":
            position += 1
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return None


def last_boxed(text: str) -> str | None:
    """The content of the last box, innermost when boxes are nested (up to 8 deep), or None."""
    content = None
    for _ in range(MAX_NESTING):
        found = boxes(text if content is None else content)
        if not found:
            return content if found is not None else None
        content = found[-1]
    return None
