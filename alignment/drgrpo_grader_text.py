"""Bring an answer into one plain spelling before anything parses it. Every step is linear in the answer's length.

Unicode look-alikes become ASCII or LaTeX, delimiters ($, \\( \\), ** **, back-quotes) and spacing commands go, \\text
and its kin are opened, and phrases such as "the answer is" are dropped. Units are split off by `split_unit`, not here.
"""

import re
import unicodedata

MAX_ANSWER_CHARS = 2_000  # longer answers are compared as text only
UNICODE = {
    **dict.fromkeys("−–—‐‑‒﹣－", "-"),
    **{"×": "\\times ", "÷": "/", "·": "\\cdot ", "⋅": "\\cdot ", "∙": "\\cdot ", "∗": "*", "⁄": "/", "∕": "/"},
    **{"√": "\\sqrt ", "π": "\\pi ", "∞": "\\infty ", "∪": "\\cup ", "∩": "\\cap ", "∅": "\\emptyset "},
    **{
        "≤": "\\le ",
        "≥": "\\ge ",
        "≠": "\\ne ",
        "≈": "\\approx ",
        "±": "\\pm ",
        "∈": "\\in ",
        "°": "^\\circ ",
        "′": "'",
        "’": "'",
    },
    **{"θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ", "λ": "\\lambda ", "“": '"', "”": '"', "\u00a0": " "},
    **{"\u2009": "\\,", "\u202f": "\\,", "，": ",", "．": ".", "％": "%", "（": "(", "）": ")"},
}
VULGAR = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5", "⅘": "4/5"}
VULGAR |= {"⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8"}
SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True))
SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
SCRIPT_RUNS = [
    (re.compile(f"[{''.join(SUPERSCRIPTS)}]+"), "^", SUPERSCRIPTS),
    (re.compile(f"[{''.join(SUBSCRIPTS)}]+"), "_", SUBSCRIPTS),
]
TABLE = str.maketrans(UNICODE | {mark: f" {value} " for mark, value in VULGAR.items()})
THIN_THOUSANDS = re.compile(r"(?<=\d)(?:\\,|\\!|\{,\}|,\\!)(?=\d{3}(?!\d))")
SPACED_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
SPACES = re.compile(r"\\[,;:! ]|~|\\q?quad(?![A-Za-z])|\\(?:displaystyle|textstyle|limits)(?![A-Za-z])")
SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\.?")
FRACTIONS = re.compile(r"\\[dtc]frac(?![A-Za-z])")
WRAPPERS = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|operatorname|bf|rm)\s*\{([^{}]*)\}"
)
DEGREES = re.compile(r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])")
OPENINGS = re.compile(
    r"^(?:so|thus|hence|therefore|then|and|is|answer|equals|final|the|result|value|approximately|about|[,:=])+"
    r"(?=[\s\d$(\[{\\+.-]|$)",
    re.IGNORECASE,
)
WORD_SPACES = re.compile(r"(?<!\d)\s+|\s+(?!\d)")
PERCENT = re.compile(r"\s?\bper\s?cent\b")
PAIRS = [("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"), ('"', '"')]
PAIRS += [("__", "__"), ("*", "*")]
TRAILING = " \t\r\n.,;:"  # not "!", which is a factorial


def clean(text: str) -> str:
    """The plain spelling of an answer of at most MAX_ANSWER_CHARS characters."""
    for pattern, mark, digits in SCRIPT_RUNS:
        text = pattern.sub(lambda run, m=mark, d=digits: m + "{" + "".join(d[c] for c in run.group()) + "}", text)
    text = unicodedata.normalize("NFKC", text.translate(TABLE))[: 2 * MAX_ANSWER_CHARS]
    text = "".join([char for char in text if unicodedata.category(char) not in ("Cf", "Cc") or char in "\n\t"])
    text = THIN_THOUSANDS.sub("", text.replace("\\\\", " \\cr "))
    text = strip_pairs(SPACES.sub(" ", text))
    text = FRACTIONS.sub(r"\\frac", SIZES.sub("", text))
    text = WRAPPERS.sub(r" \1 ", WRAPPERS.sub(r" \1 ", text))  # twice: \text{\textbf{a}}
    text = DEGREES.sub(" ", text).replace("\\$", "$").replace("\\%", "%").replace("\\&", "&")
    text = text.replace("\\varnothing", "\\emptyset").replace("\\{\\}", "\\emptyset")
    text = PERCENT.sub("%", text)
    text = " ".join(strip_pairs(drop_opening(text)).split())
    return text.replace(" ", "") if SPACED_THOUSANDS.fullmatch(text) else text


def strip_pairs(text: str) -> str:
    """Take off spaces, a closing full stop and delimiters that enclose all of the text."""
    for _ in range(4):
        before = text
        text = text.strip().rstrip(TRAILING)
        for left, right in PAIRS:
            inner = text[len(left) : len(text) - len(right)]
            if len(text) > len(left) + len(right) and text.startswith(left) and text.endswith(right):
                plain = inner.replace("\\$", "")
                if left not in plain and right not in plain:
                    text = inner
        if text == before:
            break
    return text


def drop_opening(text: str) -> str:
    """Without "the answer is", "= " and the like in front; a text of nothing else stays as it is."""
    rest = text.strip()
    for _ in range(8):
        shorter = OPENINGS.sub("", rest, count=1).strip()
        if shorter == rest or not shorter:
            break
        rest = shorter
    return rest


def words_of(text: str) -> str:
    """For comparison as text: lower case, no braces, no quotes, no spaces but those between digits."""
    return WORD_SPACES.sub("", re.sub(r"[{}'\"]+", "", text)).casefold()
