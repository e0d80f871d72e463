"""What kind of thing an answer is: a tuple, an interval, a set, a list, a union, a matrix, a relation, or one value.

Only brackets, commas and relation signs at the outermost level are looked at; the pieces stay text. Bare commas, "and"
and "or" make a list, whose order does not count; (a, b) and [a, b) keep order and brackets; 1 \\pm a is the list of its
two values; inequalities in one variable become intervals.
"""

import re
from dataclasses import dataclass

OPEN, CLOSE = "([{", ")]}"
MAX_ITEMS = 16
MAX_BRACKETS = 8
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
ENVIRONMENT = re.compile(r"\\begin\{([pbvB]?matrix|array)\}(?:\{[lcr| ]*\})?(.*)\\end\{\1\}")
JOINERS = re.compile(r",?\s+(?:and|or)\s+")
UNION = re.compile(r"\\cup(?![A-Za-z])|(?<=[)\]}])\s*U\s*(?=[(\[\\])")
RELATION = re.compile(r"\\(?:leq?|geq?|neq?|lt|gt|leqslant|geqslant)(?![A-Za-z])|<=|>=|!=|[=<>]")
SPELLINGS = {"\\le": "<=", "\\leq": "<=", "\\leqslant": "<=", "\\ge": ">=", "\\geq": ">=", "\\geqslant": ">="}
SPELLINGS |= {"\\lt": "<", "\\gt": ">", "\\ne": "!=", "\\neq": "!="}
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
NAME = re.compile(r"[A-Za-z](?:_\{?\w+\}?)?|\\[a-z]+")
MEMBER = re.compile(r"^(?:[A-Za-z]|\\[a-z]+)\s*\\in(?![A-Za-z])")


@dataclass(frozen=True)
class Structure:
    """kind: single, list, tuple, set, union, matrix or relation; `items` are the texts of its parts.

    A tuple's `mark` is its two brackets, a relation's its signs in order, a matrix's its number of columns.
    """

    kind: str
    items: tuple[str, ...]
    mark: str = ""


def parse_structure(text: str, depth: int = 0) -> Structure:
    """The structure of a cleaned answer; a text with unbalanced brackets or too many items is a single value."""
    text = MEMBER.sub("", text.strip()).strip()
    matrix = matrix_of(text)
    if matrix is not None:
        return matrix
    parts = split_top(text, UNION)
    if len(parts) > 1:
        return Structure("union", tuple(parts))
    items = split_commas(JOINERS.sub(", ", text))
    if 1 < len(items) <= MAX_ITEMS:
        return Structure("list", tuple(items))
    sides, signs = split_relation(text)
    if signs:
        return interval_of(sides, signs) or Structure("relation", tuple(sides), " ".join(signs))
    return bracketed(text, depth) or plus_minus(text) or Structure("single", (text,))


def bracketed(text: str, depth: int) -> Structure | None:
    """A tuple, an interval or a set, when one pair of brackets encloses everything; (72) is 72, up to 8 deep."""
    if depth > MAX_BRACKETS:
        return None
    if text.startswith("\\{") and text.endswith("\\}"):
        inner = text[2:-2].strip()
        return Structure("set", tuple(split_commas(inner)) if inner else ())
    if len(text) < 2 or text[0] not in "([{" or text[-1] not in ")]}" or not encloses(text):
        return None
    items = split_commas(text[1:-1])
    if text[0] == "{" and text[-1] == "}":
        return Structure("set", tuple(items)) if len(items) > 1 else parse_structure(text[1:-1], depth + 1)
    if 1 < len(items) <= MAX_ITEMS:
        return Structure("tuple", tuple(items), text[0] + text[-1])
    return parse_structure(text[1:-1], depth + 1) if text[0] == "(" and text[-1] == ")" and items[0] else None


def encloses(text: str) -> bool:
    """Whether the bracket at the start is closed at the very end and not before; kinds may differ, as in [0, 1)."""
    depth = 0
    for position, char in enumerate(text):
        depth += (char in OPEN) - (char in CLOSE)
        if depth == 0:
            return position == len(text) - 1
    return False


def split_top(text: str, separator: re.Pattern) -> list[str]:
    """The parts between separators that stand outside all brackets; [text] when brackets do not balance."""
    pieces, start = [], 0
    matches = {match.start(): match for match in separator.finditer(text)}
    depth = position = 0
    while position < len(text):
        char = text[position]
        depth += (char in OPEN) - (char in CLOSE)
        if depth < 0:
            return [text]
        match = matches.get(position)
        if match is not None and depth == 0 and match.end() > position:
            pieces.append(text[start:position].strip())
            start = position = match.end()
        else:
            position += 1
    return [*pieces, text[start:].strip()] if depth == 0 else [text]


def split_commas(text: str) -> list[str]:
    """The items between outer commas; "1,000, 2,000" has two, since its separators are followed by spaces."""
    has_spaced = re.search(r",\s", text) is not None
    protected = THOUSANDS.sub("", text) if has_spaced else text
    items = split_top(protected, re.compile("[,;]"))
    return items if all(items) else [text]


def split_relation(text: str) -> tuple[list[str], list[str]]:
    """The sides and the signs between them; no signs when a side is empty."""
    sides = split_top(text, RELATION)
    if len(sides) < 2 or not all(sides) or len(sides) > MAX_ITEMS:
        return [text], []
    signs, depth = [], 0
    matches = {match.start(): match.group() for match in RELATION.finditer(text)}
    for position, char in enumerate(text):
        depth += (char in OPEN) - (char in CLOSE)
        if depth == 0 and position in matches:
            signs.append(SPELLINGS.get(matches[position], matches[position]))
    return sides, signs


def interval_of(sides: list[str], signs: list[str]) -> Structure | None:
    """x > 3 as (3, inf), 1 <= x < 2 as [1, 2); None for what is no inequality in one named variable."""
    if not all(sign in FLIPPED for sign in signs):
        return None
    if len(sides) == 3 and NAME.fullmatch(sides[1]):
        if signs[0][0] != signs[1][0]:
            return None
        if signs[0][0] == ">":
            sides, signs = sides[::-1], [FLIPPED[sign] for sign in signs[::-1]]
        return span(sides[0], sides[2], "[" if "=" in signs[0] else "(", "]" if "=" in signs[1] else ")")
    if len(sides) != 2 or bool(NAME.fullmatch(sides[0])) == bool(NAME.fullmatch(sides[1])):
        return None
    sign, bound = (signs[0], sides[1]) if NAME.fullmatch(sides[0]) else (FLIPPED[signs[0]], sides[0])
    if sign[0] == ">":
        return span(bound, "\\infty", "[" if "=" in sign else "(", ")")
    return span("-\\infty", bound, "(", "]" if "=" in sign else ")")


def span(low: str, high: str, left: str, right: str) -> Structure:
    return Structure("tuple", (low, high), left + right)


def plus_minus(text: str) -> Structure | None:
    """The two values of a \\pm b; with \\mp it takes the other sign; None when \\pm is not there."""
    if not re.search(r"\\pm(?![A-Za-z])", text):
        return None
    both = [re.sub(r"\\mp(?![A-Za-z])", other, re.sub(r"\\pm(?![A-Za-z])", sign, text)) for sign, other in ("+-", "-+")]
    return Structure("list", tuple(both))


def matrix_of(text: str) -> Structure | None:
    match = ENVIRONMENT.fullmatch(text)
    if match is None or len(match[2]) > 1_000:
        return None
    rows = [row.split("&") for row in match[2].split("\\cr") if row.strip()]
    cells = tuple(cell.strip() for row in rows for cell in row)
    if not rows or len({len(row) for row in rows}) != 1 or not all(cells):
        return None
    return Structure("matrix", cells, str(len(rows[0])))
