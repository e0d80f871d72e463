"""The verdicts of the Dr. GRPO grader (Liu et al. 2025, fast mode), written anew from what it does.

It pays an answer when either of two rules does: MATH's string normalisation (Hendrycks et al. 2021), or PRM800K's
(Lightman et al. 2023), which normalises, splits tuples and asks a computer algebra system about each part. What makes
it differ from our own rules: fractions must be in lowest terms, an integer must be written as one, percent signs and
units vanish, order counts in lists, only the last box or tag is read. Where it calls sympy's parse_expr on the model's
text, our bounded parser stands. Measured agreement: docs/grading.md.
"""

import re
import unicodedata
from fractions import Fraction

from alignment.drgrpo_grader_compare import parsed, same_tree
from alignment.drgrpo_grader_extract import Extraction, closing_brace, cut, extract
from alignment.drgrpo_grader_text import MAX_ANSWER_CHARS
from alignment.drgrpo_grader_work import Work

MAX_INTEGER_CHARS = 300
ENCLOSED = re.compile(r"\\text\{(.+?)\}")
TRAILING_TEXT = re.compile(r"\\text\{[^{}]*\}$")
MATH_UNITS = (
    "degree mph kmph ft mile inch inches cm mm km m kg g gm lb yard meter metre litre liter gallon acre hour hr"
)
MATH_UNITS += (
    " minute min second sec day month year percent unit number square cubic apple coin mark men women man woman"
)
MATH_WORDS = re.compile(rf"(?:^|(?<=\W))(?:{'|'.join(MATH_UNITS.split())})s?(?=\W|$)")
PRM_UNITS = "degree centimeter cm meter mile second minute hour day week month year foot feet inch yard".split()
PRM_WORDS = re.compile(rf"(?:{'|'.join(PRM_UNITS)})(?:es)?s? *(?:\^[0-9]+)?")
COMMA = re.compile(r"(\d),(\d\d\d)($|\D)")
LOWEST = re.compile(r"-?[0-9]+.?/0*[1-9][0-9]*.?")
NOT_EVALUATED = re.compile(r"\[|\^\{|\^\(|\^[0-9]+\^|\^[0-9][0-9]+")
SIGNS = {"\\pi": "pi", "\\infty": "inf", "\\times": "*", "\\cup": "U", "\\%": "%", "\\$": "$", "\\{": "{", "\\}": "}"}
SIGNS |= {"\\cdot": "*", "\\emptyset": "∅", "\\varnothing": "∅", "\\(": "", "\\)": "", "\\[": "", "\\]": ""}
SIGNS |= {"\\quad": " ", "\\displaystyle": "", "\\;": " ", "\\!": "", "\\:": " "}
SIGNS |= {f"\\{name}": unicodedata.lookup(f"greek small letter {name}") for name in "alpha beta gamma theta".split()}
SIGNS |= {"√": "sqrt", "π": "pi", "∞": "inf", "∪": "U", "·": "*", "×": "*", "\\,": " ", "\\ ": " "}


def extract_drgrpo(response: str, mode: str) -> Extraction:
    """The answer as that grader finds it: the text behind the last <answer>, or the last box."""
    if mode not in ("answer_tag", "boxed"):
        return extract(response, mode)
    text = cut(response)
    if mode == "boxed":
        answer = last_box(text)
        return Extraction(answer, answer is not None)
    if "</think> <answer>" not in response or "</answer>" not in response:
        return Extraction(None, False)
    answer = text.rpartition("<answer>")[2].replace("</answer>", "")
    return Extraction(last_box(answer) if "\\boxed" in answer else answer, True)


def last_box(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0 or start < text.rfind("\\boxed"):
        return None
    end = closing_brace(text, start + 6)
    return None if end is None else text[start + 7 : end]


def same_answer_drgrpo(given: str, truth: str) -> bool:
    """Whether that grader would pay the answer."""
    if "\\boxed" in truth:
        truth = last_box(truth) or ""
    if len(given) > MAX_ANSWER_CHARS or len(truth) > MAX_ANSWER_CHARS:
        return given.strip() == truth.strip()
    return math_form(given) == math_form(truth) or same_by_prm800k(prm_form(given), prm_form(truth))


def math_form(text: str) -> str:
    """MATH's normal form of an answer."""
    text = text.strip()
    whole = ENCLOSED.fullmatch(text)
    text = (whole[1].strip() if whole else text).replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = re.sub(r"[td]frac", "frac", text).replace("\\left", "").replace("\\right", "")
    text = without(TRAILING_TEXT, text.replace("bmatrix", "pmatrix")).split("\\text{ ")[0]
    text = without(MATH_WORDS, text)
    text = re.sub(r"\^\\circ|\^\{\\circ\}|\\\$|\\%", "", text)
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    text = "0" + text if text.startswith(".") else text
    left, equals, right = text.partition("=")
    if equals and "=" not in right and len(left) <= 2:
        text = right
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text.replace(" ", ""))
    text = re.sub(r"\\frac([^{])([^{])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac([^{])\{", r"\\frac{\1}{", text)
    text = "\\frac{1}{2}" if text == "0.5" else text
    slash = re.fullmatch(r"(-?(?:0|[1-9]\d*))/(-?(?:0|[1-9]\d*))", text)
    return f"\\frac{{{slash[1]}}}{{{slash[2]}}}" if slash else text


def without(pattern: re.Pattern, text: str) -> str:
    """The text without what the pattern finds, unless nothing would be left."""
    shorter = pattern.sub("", text).strip()
    return shorter or text


def prm_form(text: str) -> str:
    """PRM800K's normal form of an answer."""
    whole = ENCLOSED.fullmatch(text)
    text = whole[1] if whole else text
    text = re.sub(r"\\%|\\\$|[$%]", "", text)
    text = text.replace(" or ", " , ").replace(" and ", " , ")
    for word, power in (("million", 6), ("billion", 9), ("trillion", 12)):
        text = text.replace(word, f"*10^{power}")
    text = re.sub(r"\^ *\\circ", "", PRM_WORDS.sub("", text))
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    if is_integer(text, with_commas=False):
        text = integer_form(text)
    if "\\" in text:
        text = flat_latex(text)
    text = re.sub(r"([0-9]) +([0-9])", r"\1+\2", re.sub("- *", "-", text))  # 7 3/4 is 7 + 3/4
    text = re.sub(r"[ {}]", "", text).lower()
    return integer_form(text) if is_integer(text, with_commas=True) else text


def flat_latex(text: str) -> str:
    """LaTeX as a line of text, the way pylatexenc writes it: fractions with a slash, without new parentheses."""
    text = re.sub(r"\\[td]?frac", r" \\frac", text)
    for _ in range(8):  # innermost arguments first; deeper nests stay as they are
        before = text
        text = re.sub(r"\\frac\s*(?:\{([^{}]*)\}|(\w))\s*(?:\{([^{}]*)\}|(\w))", r"\1\2/\3\4", text)
        text = re.sub(r"\\sqrt\s*(?:\{([^{}]*)\}|(\w))", r"sqrt(\1\2)", text)
        text = re.sub(r"\\(?:text|mathrm|mathbf|textbf|mbox)\s*\{([^{}]*)\}", r"\1", text)
        if text == before:
            break
    text = re.sub(r"\\(?:left|right)(?![A-Za-z])", "", text)
    for sign, plain in SIGNS.items():
        text = text.replace(sign, plain)
    return re.sub(r"\\(?=[A-Za-z])", "", text).strip()


def number_of(text: str, with_commas: bool) -> Fraction | None:
    while with_commas:
        shorter = COMMA.sub(r"\1\2\3", text)
        if shorter == text:
            break
        text = shorter
    plain = re.fullmatch(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d{1,3})?)\s*", text, re.IGNORECASE)
    return Fraction(plain[1].rstrip(".")) if plain and len(text) <= MAX_INTEGER_CHARS else None


def is_integer(text: str, with_commas: bool) -> bool:
    value = number_of(text, with_commas)
    return value is not None and abs(value - round(value)) <= Fraction(1, 10**7)


def integer_form(text: str) -> str:
    return str(round(number_of(text, with_commas=True)))


def same_by_prm800k(given: str, truth: str) -> bool:
    """Equal forms, or tuples of one shape with equal parts."""
    if given == truth:
        return True
    if not given:
        return False
    ours, theirs = parts_of(given), parts_of(truth)
    if len(theirs) > 1 and (given[0], given[-1]) != (truth[0], truth[-1]):
        return False
    return len(ours) == len(theirs) and all(same_part(a, b) for a, b in zip(ours, theirs, strict=True))


def parts_of(text: str) -> list[str]:
    for _ in range(MAX_ANSWER_CHARS):
        shorter = COMMA.sub(r"\1\2\3", text)
        if shorter == text:
            break
        text = shorter
    inner = text[1:-1]
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]" and not any(char in "()[]" for char in inner):
        return [part.strip() for part in inner.split(",")]
    return [text] if text else []


def same_part(given: str, truth: str) -> bool:
    if LOWEST.fullmatch(given) and LOWEST.fullmatch(truth):
        return given == truth  # both fractions: they must be spelled alike, so in lowest terms
    if is_integer(given, with_commas=True) != is_integer(truth, with_commas=True):
        return False
    both = f"({truth})-({given})"
    letters = {char for char in both.replace("sqrt", "").replace("frac", "") if char.isalpha()}
    if len(letters) > 2 or NOT_EVALUATED.search(both):
        return False
    left, right = number_of(given, with_commas=True), number_of(truth, with_commas=True)
    if left is not None and right is not None:
        return left == right
    left, right = parsed(given, letters=True), parsed(truth, letters=True)
    return left is not None and right is not None and same_tree(left, right, Work()) is True
