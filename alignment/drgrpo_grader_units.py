"""Units at the end of an answer: dropped when only one side has one, compared when both sides have a known one."""

import re

# Spellings of one unit stand on one line; letters alone count as a unit only behind a number.
KNOWN = [
    "$ dollar dollars usd bucks",
    "¢ cent cents",
    "€ euro euros eur",
    "£ pound-sterling gbp",
    "mm millimeter millimeters millimetre millimetres",
    "cm centimeter centimeters centimetre centimetres",
    "m meter meters metre metres",
    "km kilometer kilometers kilometre kilometres",
    "in inch inches",
    "ft foot feet",
    "yd yard yards",
    "mi mile miles",
    "g gram grams",
    "kg kilogram kilograms kilo kilos",
    "lb lbs pound pounds",
    "oz ounce ounces",
    "s sec secs second seconds",
    "min mins minute minutes",
    "h hr hrs hour hours",
    "day days",
    "week weeks",
    "month months",
    "year years yr yrs",
    "ml milliliter milliliters",
    "l liter liters litre litres",
    "mph",
    "km/h kmh kph",
    "m/s",
    "deg degree degrees",
    "rad radian radians",
]
CANONICAL = {word: line.split()[0] for line in KNOWN for word in line.split()}
TAIL = re.compile(r"[A-Za-z][A-Za-z '/.-]*(?:\s?\^\s?\{?\s?[123]\s?\}?)?$")
COMMAND_END = re.compile(r"\\[a-z]+$")
FRONT = re.compile(r"^(?:rs\.?|usd|eur|us)\s*(?=[\d$])", re.IGNORECASE)
MAX_UNIT_WORDS = 5
NO_UNIT = set("is isn't are was be not no nor or and but if maybe either wrong right incorrect than to from".split())


def split_unit(text: str) -> tuple[str, str]:
    """(value, unit): "15 cm^2" is ("15", "cm^2"); the unit is "" when there is none or the value would be empty."""
    text = FRONT.sub("", text)
    start = tail_start(text)
    value, unit = text[:start].rstrip(), text[start:].strip()
    ends_in_value = value[-1:] in tuple("0123456789)}%.") or COMMAND_END.search(value) is not None
    if not unit or not value or not ends_in_value or len(unit.split()) > MAX_UNIT_WORDS:
        return text, ""
    if NO_UNIT & set(unit.lower().split()):
        return text, ""  # "72 is wrong" says something else than 72
    if start > 0 and text[start - 1] != " " and unit.split("^")[0].strip().lower() not in CANONICAL:
        return text, ""  # "3x" and "2\\pi r" are expressions, "3cm" is not
    return value, unit


def tail_start(text: str) -> int:
    """Where the last run of words, with an exponent behind it, begins."""
    end = len(text)
    while end > 0 and text[end - 1] in "0123456789^{} ":
        end -= 1
    if end == 0 or not text[end - 1].isalpha() or not TAIL.fullmatch(text[end - 1 :]):
        end = len(text)
    while end > 0 and (text[end - 1].isalpha() or text[end - 1] in " '/.-"):
        end -= 1
    if end > 0 and text[end - 1] == "\\":  # the word there is a command, not a unit
        while end < len(text) and text[end].isalpha():
            end += 1
    while end < len(text) and not text[end].isalpha():
        end += 1
    return end if TAIL.fullmatch(text[end:]) else len(text)


def canonical_unit(unit: str) -> str | None:
    """The unit's one name with its power, "cm^2", or None for words that are no known unit ("apples")."""
    words = unit.lower().replace("{", "").replace("}", "").replace(" ^", "^").split()
    power = ""
    if words and words[0] in ("square", "sq", "cubic", "cu"):
        power = "^2" if words[0] in ("square", "sq") else "^3"
        words = words[1:]
    if len(words) != 1:
        return None
    name, mark, exponent = words[0].rstrip(".").partition("^")
    known = CANONICAL.get(name)
    return None if known is None else known + (mark + exponent or power)


def units_conflict(one: str, other: str) -> bool:
    """Whether both are known and differ: 18 cm is not 18 m, but 18 apples may be 18 fruits."""
    a, b = canonical_unit(one), canonical_unit(other)
    return a is not None and b is not None and a != b
