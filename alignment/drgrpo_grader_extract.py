"""Find the answer in a model's text: \\boxed, <answer>, ####. Every scanner here is linear in the text's length.

A text is first cut to 64 KB round its last marker, so that nothing behind this file ever sees more.
"""

import re
from dataclasses import dataclass

MODES = ("answer_tag", "boxed", "gsm8k", "pair", "last_number")
MAX_CHARS = 65_536
MAX_NESTING = 8
MARKERS = ("<answer>", "</answer>", "\\boxed", "\\fbox", "####")
LAST_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
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


@dataclass(frozen=True)
class Extraction:
    """The answer's text, or None when the response gives none or several, and whether the form is as asked."""

    answer: str | None
    format_ok: bool


def extract(response: str, mode: str) -> Extraction:
    """The answer of a response in one of MODES; never raises on text."""
    if mode == "pair":
        return Extraction(response, True)
    if mode == "answer_tag":
        return extract_answer_tag(response)
    text = cut(response)
    if mode == "boxed":
        return extract_boxed(text)
    if mode == "gsm8k":
        return extract_gsm8k(text)
    return extract_last_number(text)


def extract_answer_tag(response: str) -> Extraction:
    """One <answer> block behind </think>; a second block or second </think> is a hedge, and nothing is taken.

    The form is right when only spaces stand between </think> and <answer>, and nothing behind </answer>.
    """
    counts = [response.count(tag) for tag in ("</think>", "<answer>", "</answer>")]
    if counts != [1, 1, 1]:
        return Extraction(None, False)
    thinking, _, rest = response.partition("</think>")
    between, opened, rest = rest.partition("<answer>")
    content, closed, behind = rest.partition("</answer>")
    if not opened or not closed:
        return Extraction(None, False)
    nested = thinking.count("<think>") > 1 or (("<think>" in thinking) and not thinking.lstrip().startswith("<think>"))
    format_ok = not (between.strip() or behind.strip() or nested or "<think>" in content) and bool(content.strip())
    content = content.strip()
    if not content or len(content) > MAX_CHARS:
        return Extraction(None, False)
    if BOX.search(content):
        return Extraction(extract_boxed(content).answer, format_ok)
    return Extraction(content, format_ok)


def extract_boxed(text: str) -> Extraction:
    """The boxed answer; several boxes must hold the same text, since the model must choose one."""
    found = boxes(text)
    if not found or len({"".join(one.split()) for one in found}) != 1:
        return Extraction(None, False)
    answer = (last_boxed(text) or "").strip()
    return Extraction(answer or None, bool(answer))


def extract_gsm8k(text: str) -> Extraction:
    """What follows the last "####" on its line."""
    _, marker, behind = text.rpartition("####")
    answer = behind.lstrip(" \t").partition("\n")[0].strip()
    return Extraction(answer or None, bool(marker and answer)) if marker else Extraction(None, False)


def extract_last_number(text: str) -> Extraction:
    """The last number of the text, for base models that know no marker: a lenient figure, no reward to train on."""
    found = LAST_NUMBER.findall(text)
    return Extraction(found[-1].rstrip(",."), True) if found else Extraction(None, False)
