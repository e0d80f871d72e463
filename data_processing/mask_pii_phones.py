"""The finder of phone numbers: a candidate is a run of digits and separators, a rule on its shape decides.

International numbers (+49 30 1234567, 0044 20 ...), North American ones, numbers with a trunk zero (Britain, France,
Germany, Japan, Australia and others), the mobile forms of China, India, Brazil, Russia and Spain, and any number of
fitting length after a word such as "Tel." Dates, ISBNs, lists of numbers, decimals and years keep out by their shape.
"""

import re
from collections.abc import Iterator
from itertools import pairwise

SPACE = " \u00a0\u2009\u202f"
CANDIDATE = re.compile(
    rf"(?<![\w.,$\u20ac\u00a3/+-])(?:\+|\(\+?)?\d(?:[{SPACE}().\-\u2010\u2011\u2013/]{{0,3}}\d){{5,16}}"
    r"(?![\w$\u20ac\u00a3%]|[.,:/-]\d)"
)
CONTEXT = re.compile(
    r"(?:\bt[e\u00e9]l(?:[e\u00e9](?:ph|f)on[eo]?)?s?|phone|fax|mobile?|mob|cell|handy|call|dial|ring|whatsapp|sms|"
    r"hotline|contact|\u260e|\u2706|\U0001f4de|\U0001f4f1|\u7535\u8bdd|\u96fb\u8a71)"
    r"(?: (?:me|us|him|her|at|on|number|no\.?|nr\.?|is)){0,3}[\s.:#)(-]{0,4}$",
    re.IGNORECASE,
)
CONTEXT_CHARACTERS = 40
NO_PHONE = re.compile(
    r"(?:isbn|issn|doi|pmid|order|invoice|serial|version|\bv)(?:[- ]?1[03])?[\s.:#-]{0,4}(?:no\.?\s)?$", re.IGNORECASE
)
DAY, MONTH, YEAR = r"(?:0?[1-9]|[12]\d|3[01])", r"(?:0?[1-9]|1[0-2])", r"(?:1[6-9]|20)\d\d"
DATE = re.compile(
    rf"(?:{YEAR}([-./ ]){MONTH}\1{DAY}|{DAY}([-./ ]){MONTH}\2{YEAR}|{MONTH}([-./ ]){DAY}\3{YEAR}"
    rf"|{DAY}([-./]){MONTH}\4\d\d)(?: \d\d?(?:\.\d\d)*)?|{YEAR} ?[-\u2013/] ?{YEAR}"
)
ISBN = re.compile(r"97[89][- ]?(?:\d[- ]?){9}\d|\d{1,5}-\d{1,7}-\d{1,7}-[\dX]")
SEPARATORS = rf"[{SPACE}.\-\u2010\u2011\u2013/]"
NORTH_AMERICAN = re.compile(
    rf"(?:1{SEPARATORS}?)?(?:\([2-9]\d\d\){SEPARATORS}{{0,2}}|[2-9]\d\d{SEPARATORS})[2-9]\d\d{SEPARATORS}\d{{4}}"
)
NATIONAL = [
    re.compile(pattern)
    for pattern in (
        rf"1[3-9]\d[{SPACE}-]\d{{4}}[{SPACE}-]\d{{4}}",  # China
        rf"[6-9]\d{{4}}[{SPACE}-]\d{{5}}",  # India
        rf"\(?[1-9]\d\)?[{SPACE}]?9?\d{{4}}-\d{{4}}",  # Brazil
        rf"8[{SPACE}-]?\(?[3489]\d\d\)?[{SPACE}-]?\d{{3}}[{SPACE}-]\d\d[{SPACE}-]?\d\d",  # Russia
        rf"[6-9]\d\d[{SPACE}]\d\d[{SPACE}]\d\d[{SPACE}]\d\d",  # Spain
    )
]
FRENCH_PAIRS = re.compile(r"0[1-9](?:([ .\-\u00a0])\d\d)(?:\1\d\d){3}")
TRUNK_ZERO = re.compile(
    rf"\(?0[1-9]\d{{0,4}}\)?[{SPACE}]?[/\-\u2013{SPACE}][{SPACE}]?\d{{2,9}}(?:[{SPACE}\-]\d{{1,5}}){{0,4}}"
)


def _is_counting(groups: list[int]) -> bool:
    """Whether numbers go up in equal steps: a list, not a phone number."""
    steps = {after - before for before, after in pairwise(groups)}
    return len(groups) > 2 and len(steps) == 1


def is_phone(shown: str, in_context: bool) -> bool:
    """Whether a run of digits and separators is a phone number; `in_context`: after a word such as "Tel."."""
    groups = re.findall(r"\d+", shown)
    digits = "".join(groups)
    if DATE.fullmatch(shown) or ISBN.fullmatch(shown):
        return False
    if not in_context and _is_counting([int(group) for group in groups]):
        return False
    if "+" in shown:
        return 8 <= len(digits) <= 15 and digits[0] != "0"
    if in_context:
        return 7 <= len(digits) <= 15
    if groups[0] == "011":  # abroad from North America
        return len(groups) > 2 and 11 <= len(digits) <= 17
    if digits.startswith("00"):
        return digits[2:3] not in ("", "0") and 11 <= len(digits) <= 17 and len(groups) > 1 and len(groups[0]) != 3
    if NORTH_AMERICAN.fullmatch(shown) or any(form.fullmatch(shown) for form in NATIONAL):
        return True
    if FRENCH_PAIRS.fullmatch(shown):
        return True
    return 9 <= len(digits) <= 12 and TRUNK_ZERO.fullmatch(shown) is not None


def find_phones(text: str) -> Iterator[tuple[int, int]]:
    """(start, end) of each phone number, left to right."""
    for match in CANDIDATE.finditer(text):
        start, shown = match.start(), match.group()
        if shown.startswith("(") and shown.count("(") > shown.count(")"):  # an opening bracket of the sentence
            start, shown = start + 1, shown[1:]
        before = max(start - CONTEXT_CHARACTERS, 0)
        if NO_PHONE.search(text, before, start):
            continue
        if is_phone(shown, CONTEXT.search(text, before, start) is not None):
            yield start, match.end()
