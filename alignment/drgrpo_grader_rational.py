"""Exact numbers as people write them: integers, decimals, fractions, mixed numbers, percent, scientific notation.

Every form is one anchored pattern without nested repetition, and digits and exponents have limits, so no input takes
long: a number of 5,000 digits or an exponent of a million is refused (None), not computed.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 400
MAX_EXPONENT = 400
CURRENCY = "$€£¥₹"
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}

PLAIN = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
SIGN = r"[+-]?\s?"
NUMBER = re.compile(
    rf"(?P<sign>{SIGN})(?P<money>[{CURRENCY}]?)\s?(?P<sign2>{SIGN})(?P<digits>{PLAIN})"
    r"(?:[eE](?P<e>[+-]?\d+)|\s?(?:\\times|\\cdot|\*|x)\s?10\s?(?:\^|\*\*)\s?(?:\{\s?(?P<t>[+-]?\s?\d+)\s?\}|(?P<u>[+-]?\d+)))?"
    rf"(?:\s(?P<scale>{'|'.join(SCALES)}))?\s?(?P<tail>%|[{CURRENCY}])?"
)
DIVISION = re.compile(
    rf"(?P<sign>{SIGN})(?P<money>[{CURRENCY}]?)(?:(?P<whole>\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\s(?:and\s)?|(?=\\frac)))?"
    rf"(?:\\frac\s?(?:\{{\s?(?P<a>[+-]?\s?(?:{PLAIN}))\s?\}}|(?P<a1>\d))\s?(?:\{{\s?(?P<b>[+-]?\s?(?:{PLAIN}))\s?\}}|(?P<b1>\d))"
    rf"|(?P<c>{PLAIN})\s?/\s?(?P<d>[+-]?(?:{PLAIN})))\s?(?P<tail>%)?"
)

REPEATING = re.compile(
    rf"(?P<sign>{SIGN})(?P<digits>\d*\.\d*)\\(?:overline|bar)\s?\{{?\s?(?P<repeated>\d+)\s?\}}?\s?(?P<tail>%)?"
)


@dataclass(frozen=True)
class Rational:
    """An exact value as written (50% is 50), whether a percent sign stood beside it, and the currency sign if any."""

    value: Fraction
    percent: bool = False
    money: str = ""


def parse_rational(text: str) -> Rational | None:
    """The number that the whole text spells, or None."""
    if sum(char.isdigit() for char in text) > MAX_DIGITS or not any(char in "0123456789" for char in text):
        return None
    text = text.strip()
    match = NUMBER.fullmatch(text)
    if match is not None:
        return number_of(match)
    match = DIVISION.fullmatch(text)
    if match is not None:
        return division_of(match)
    match = REPEATING.fullmatch(text)
    return None if match is None else repeating_of(match)


def repeating_of(match: re.Match) -> Rational:
    """0.1\\overline{6} is 1/6: the digits repeat for ever."""
    digits, repeated = match["digits"], match["repeated"]
    decimals = len(digits.partition(".")[2])
    value = plain_value(digits) + Fraction(int(repeated), 10**decimals * (10 ** len(repeated) - 1))
    return Rational(-value if match["sign"].strip() == "-" else value, match["tail"] == "%")


def number_of(match: re.Match) -> Rational | None:
    exponent = match["e"] or match["t"] or match["u"] or "0"
    exponent = exponent.replace(" ", "")
    if len(exponent) > 5 or abs(int(exponent)) > MAX_EXPONENT:
        return None
    signs = (match["sign"] + match["sign2"]).replace(" ", "")
    if len(signs) > 1:
        return None
    value = plain_value(match["digits"]) * Fraction(10) ** (int(exponent) + SCALES.get(match["scale"], 0))
    tail = match["tail"]
    money = match["money"] or (tail if tail and tail != "%" else "")
    return Rational(-value if signs == "-" else value, tail == "%", money)


def division_of(match: re.Match) -> Rational | None:
    top = match["a"] or match["a1"] or match["c"]
    bottom = match["b"] or match["b1"] or match["d"]
    over, under = signed_value(top), signed_value(bottom)
    if under == 0:
        return None
    value = over / under
    if match["whole"] is not None:
        # A mixed number has a proper fraction of whole numbers behind its whole part.
        if over < 0 or under < 0 or over.denominator != 1 or under.denominator != 1 or value >= 1:
            return None
        value += plain_value(match["whole"])
    return Rational(-value if match["sign"].strip() == "-" else value, match["tail"] == "%", match["money"])


def signed_value(text: str) -> Fraction:
    text = text.replace(" ", "")
    value = plain_value(text.lstrip("+-"))
    return -value if text.startswith("-") else value


def plain_value(text: str) -> Fraction:
    """Digits with optional thousands' commas and a decimal point."""
    whole, _, decimals = text.replace(",", "").partition(".")
    return Fraction(int((whole + decimals) or "0"), 10 ** len(decimals))
