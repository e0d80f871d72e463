"""The normalise stage: HTML entities, Unicode form, control characters and white space, in that order of cause.

Entities come first because they may stand for control characters; those go before NFKC because one between a letter
and its accent would keep them apart; white space is last because NFKC makes spaces. ASCII text passes on fast paths
of substring searches and one byte translation; no regular expression here can run away (each is linear).
"""

import html
import re
import unicodedata
from dataclasses import dataclass
from html.entities import html5

from configs.errors import check_choice
from data_processing.document import Document
from data_processing.stage import StatelessStage

UNICODE_FORMS = ("NFKC", "NFC", "none")
# Only entities that end in a semicolon: HTML also allows "&copy" without one, which would break "?a=1&copy=2".
ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
# Beyond ASCII: C1 controls, soft hyphen, byte order mark, and the line ends NEL, LS, PS; joiners stay (emoji, Persian).
RARE_LINE_ENDS = re.compile("[\x85\u2028\u2029]")
RARE_CONTROLS = re.compile("[\x80-\x84\x86-\x9f\xad\ufeff]")
C1_UTF8 = re.compile(rb"\xc2[\x80-\x9f\xad]")
RARE_UTF8 = ("\u2028".encode(), "\u2029".encode(), "\ufeff".encode())
ASCII_CONTROLS = bytes(code for code in range(128) if (code < 32 or code == 127) and chr(code) not in "\t\n\r\v\f")
ASCII_LINE_ENDS = bytes.maketrans(b"\r\v\f", b"\n\n\n")
INNER_SPACES = re.compile(r"(?<=[^ \t\n])[ \t]{2,}")


@dataclass
class NormaliseConfig:
    """What the stage does; the defaults keep indentation and columns, since the embedded corpus holds code."""

    unescape_html: bool = True
    unicode_form: str = "NFKC"
    collapse_spaces: bool = False  # runs of spaces and tabs inside a line become one space

    def __post_init__(self):
        check_choice("normalise.unicode_form", self.unicode_form, UNICODE_FORMS)


def _unescape_one(match: re.Match) -> str:
    entity = match.group()
    return html.unescape(entity) if entity[1] == "#" else html5.get(entity[1:], entity)


def unescape_html(text: str) -> str:
    """Replace each whole HTML5 entity by its characters, once (`&amp;lt;` becomes `&lt;`)."""
    return ENTITY.sub(_unescape_one, text) if "&" in text else text


def clean_controls(text: str) -> str:
    """Make every line end a newline and remove control characters, soft hyphens and byte order marks."""
    data = text.encode("utf-8")
    if not text.isascii() and (C1_UTF8.search(data) or any(rare in data for rare in RARE_UTF8)):
        data = RARE_CONTROLS.sub("", RARE_LINE_ENDS.sub("\n", text)).encode("utf-8")
    # Bytes below 128 are never part of a longer UTF-8 sequence, so a byte translation is safe and ten times as fast.
    return data.replace(b"\r\n", b"\n").translate(ASCII_LINE_ENDS, ASCII_CONTROLS).decode("utf-8")


def clean_spaces(text: str, collapse: bool = False) -> str:
    """No spaces at line ends, at most one blank line in a row, none at the text's ends; indentation stays."""
    text = text.replace(" \n", "\n")  # the common case, a single space, at the speed of a substring search
    if " \n" in text or "\t\n" in text:
        text = "\n".join([line.rstrip(" \t") for line in text.split("\n")])
    if collapse:
        text = INNER_SPACES.sub(" ", text)
    while "\n\n\n" in text:  # a run of k newlines shrinks by a third each time
        text = text.replace("\n\n\n", "\n\n")
    return text.rstrip().lstrip("\n")


def normalise_text(text: str, config: NormaliseConfig) -> str:
    """The text in the corpus's one form; applying it to its own result changes nothing but nested entities."""
    if config.unescape_html:
        text = unescape_html(text)
    text = clean_controls(text)
    if config.unicode_form != "none" and not text.isascii():
        text = unicodedata.normalize(config.unicode_form, text)
    return clean_spaces(text, config.collapse_spaces)


class Normalise(StatelessStage):
    """Rewrites text and title; drops what is empty afterwards."""

    name = "normalise"

    def __init__(self, config: NormaliseConfig):
        self.config = config

    def judge(self, document: Document) -> tuple[str, str]:
        document.text = normalise_text(document.text, self.config)
        document.title = " ".join(normalise_text(document.title, self.config).split())
        return ("", "") if document.text.strip() else ("empty", "no text but white space")
