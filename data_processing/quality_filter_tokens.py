"""Words as spaCy's English tokenizer cuts them, whose counts the web corpora's rules were set with.

The algorithm (spacy.io/usage/linguistic-features#how-tokenizer-works): a chunk between white space loses prefixes and
suffixes one by one unless it is a known exception; what is left is cut at infixes. The tables here are the short form
of spaCy's: rare emoticons and contractions without an apostrophe are left out. Chunks come back often: the cuts of
the last CACHED_CHUNKS are remembered.
"""

import re
import unicodedata
from functools import lru_cache

CACHED_CHUNKS = 1 << 17
LONGEST_CHUNK = 200  # a longer one (base64, a minified file) is one word
PUNCTUATION = "\u2026,:;!?\u00bf\u061f\u00a1()[]{}<>_#*&"
PUNCTUATION += "\u3002\uff1f\uff01\uff0c\u3001\uff1b\uff1a\uff5e\u00b7\u0964\u060c\u06d4\u061b\u066a"
QUOTES = "'\"\u201d\u201c`\u2018\u00b4\u2019\u201a\u201e\u00bb\u00ab"
QUOTES += "\u300c\u300d\u300e\u300f\uff08\uff09\u3014\u3015\u3010\u3011\u300a\u300b\u3008\u3009"
CURRENCY = "$\u00a3\u20ac\u00a5\u0e3f\u20bd\u20b4\u20b8\u20b9\u20a9"
ICONS = "\u00a6\u00a9\u00ae\u00b0\u2100-\u214f\u2190-\u23ff\u2500-\u27bf\u2b00-\u2bff\ufffc\ufffd\U0001f000-\U0001faff"
UNITS = "km\u00b2?|km\u00b3|m\u00b2?|m\u00b3|dm|cm\u00b2?|mm|mg|kg|g|t|lb|oz|mph"
UNITS += "|kPa|hPa|Pa|mbar|mb|MB|kb|KB|gb|GB|tb|TB|T|G|M|K|%"
MARK = re.escape(PUNCTUATION + QUOTES)
LOWER, UPPER = (
    "a-z\u00df-\u00f6\u00f8-\u00ff\u03ac-\u03ce\u0430-\u045f",
    "A-Z\u00c0-\u00d6\u00d8-\u00de\u0386-\u03ab\u0400-\u042f",
)
PREFIX = re.compile(rf"\.\.+|[\u00a7%=\u2014\u2013{MARK}{re.escape(CURRENCY)}{ICONS}]|\+(?![0-9])")
SUFFIX = re.compile(
    rf"(?:\.\.+|['\u2019][sS]|[\u2014\u2013{MARK}{ICONS}]|(?<=[0-9])\+|(?<=[0-9])[{re.escape(CURRENCY)}]"
    rf"|(?<=[0-9])(?:{UNITS})|(?<=[0-9{LOWER}%\u00b2\-+{MARK}])\.|(?<=[{UPPER}][{UPPER}])\.)$"
)
INFIX = re.compile(
    rf"\.\.+|\u2026|[{ICONS}]|(?<=[0-9])[+\-*^](?=[0-9-])|(?<=[{LOWER}{re.escape(QUOTES)}])\.(?=[{UPPER}{re.escape(QUOTES)}])"
    r"|(?<=[^\W\d_]),(?=[^\W\d_])|(?<=[^\W_])(?:\u2014\u2014|---?|[-\u2013\u2014~])(?=[^\W\d_])"
    r"|(?<=[^\W_])[:<>=/](?=[^\W\d_])"
)
SUFFIX_LONGEST = 8
ONE_MARK = frozenset('.,;:!?)]"\u201d')
IRREGULAR_ENDS = ("not", "nna", "tta")  # cannot, gonna, gotta
ABBREVIATIONS = frozenset(
    "Adm. Ak. Ala. Apr. Ariz. Ark. Aug. Bros. Calif. Co. Colo. Conn. Corp. D.C. Dec. Del. Dr. E.G. E.g. Feb. Fla. Ga."
    " Gen. Gov. I.E. I.e. Ia. Id. Ill. Inc. Ind. Jan. Jr. Jul. Jun. Kan. Kans. Ky. La. Ltd. Mar. Mass. Md. Messrs."
    " Mich. Minn. Miss. Mo. Mont. Mr. Mrs. Ms. Mt. N.C. N.D. N.H. N.J. N.M. N.Y. Neb. Nebr. Nev. Nov. Oct."
    " Okla. Ore. Pa. Ph.D. Prof. Rep. Rev. S.C. Sen. Sep. Sept. St. Tenn. Va. Wash. Wis. a.m. co. e.g. i.e."
    " p.m. v.s. vs. and/or w/o C++ 's 'd 'll 're 'S \u2019s \u2019d \u2019ll \u2019re \u2019S ): :) (: :( ;)"
    " (; :] [: =) (= =] [= :/ <3 :D :P :p :o :x"
    " ma'am o'clock Ma'am O'clock ma\u2019am o\u2019clock 'em \u2019em 'cause '' \\\") <space> ' \u2019".split()
    + [f"{letter}." for letter in "abcdefghijklmnopqrstuvwxyz\u00e4\u00f6\u00fc"]
)
PEOPLE = "i|you|he|she|it|we|they|who|what|when|where|why|how|there|that|this|these|those"
HELPERS = "ai|are|ca|can|could|dare|did|do|does|had|has|have|is|may|might|must|need|ought|sha|should|was|were|wo|would"
CONTRACTED = re.compile(
    rf"({PEOPLE})(['\u2019](?:ll|d|ve|re|m|s))(['\u2019]ve)?|({HELPERS}|should|could|would)(n['\u2019]t)(['\u2019]ve)?"
    r"|(could|should|would|might|must|let)(['\u2019](?:ve|s))|(can)(not)|(gon|got|wan)(na|ta)",
    re.IGNORECASE,
)
URL = re.compile(
    r"(?:[\w+.-]{2,20}://)?(?:[^\s@]{1,64}@)?"
    rf"(?:(?:\d{{1,3}}\.){{3}}\d{{1,3}}|(?:[A-Za-z0-9\u00a1-\uffff][A-Za-z0-9\u00a1-\uffff_-]{{0,62}}\.){{1,10}}[{LOWER}]{{2,63}})"
    r"(?::\d{2,5})?(?:[/?#]\S*)?"
)


def _exception(chunk: str) -> tuple[str, ...] | None:
    """The words of an exception, None for an ordinary chunk."""
    if chunk in ABBREVIATIONS:
        return (chunk,)
    if ("'" in chunk or "\u2019" in chunk or chunk[-3:].lower() in IRREGULAR_ENDS) and (
        found := CONTRACTED.fullmatch(chunk)
    ):
        return tuple(part for part in found.groups() if part)
    return None


def _cut_infixes(chunk: str) -> tuple[str, ...]:
    if "." in chunk and URL.fullmatch(chunk):
        return (chunk,)
    words, at = [], 0
    for found in INFIX.finditer(chunk):
        if found.start() > at:
            words.append(chunk[at : found.start()])
        words.append(found.group())
        at = found.end()
    return (*words, chunk[at:]) if at < len(chunk) else tuple(words)


@lru_cache(maxsize=CACHED_CHUNKS)
def split_chunk(chunk: str) -> tuple[str, ...]:
    """The words of a text without white space."""
    if chunk.isalpha():
        return (chunk,) if chunk[-3:].lower() not in IRREGULAR_ENDS else _exception(chunk) or (chunk,)
    if len(chunk) > LONGEST_CHUNK:
        return (chunk,)
    stem, mark = chunk[:-1], chunk[-1]
    # Most new chunks are a word and one mark: no need to try every expression on them.
    if mark in ONE_MARK and len(stem) > 2 and stem.isalpha() and stem[-3:].lower() not in IRREGULAR_ENDS:
        if mark != "." or (stem[-1].islower() and chunk not in ABBREVIATIONS):
            return (stem, mark)
    before, after, known = [], [], _exception(chunk)
    while chunk and known is None:
        prefix, suffix = PREFIX.match(chunk), SUFFIX.search(chunk, max(len(chunk) - SUFFIX_LONGEST, 0))
        if prefix and (known := _exception(chunk[prefix.end() :])):
            before.append(prefix.group())
            break
        if suffix and (known := _exception(chunk[: suffix.start()])):
            after.append(suffix.group())
            break
        if not prefix and not suffix:
            break
        if prefix:
            before.append(prefix.group())
        if suffix and suffix.start() >= (prefix.end() if prefix else 0):
            after.append(suffix.group())
            chunk = chunk[: suffix.start()]
        chunk = chunk[prefix.end() :] if prefix else chunk
        known = _exception(chunk) if chunk else None
    middle = known if known is not None else _cut_infixes(chunk) if chunk else ()
    return (*before, *middle, *reversed(after))


def split_words(text: str) -> list[str]:
    """All words of a text; punctuation marks are words too."""
    return [word for chunk in text.split() for word in split_chunk(chunk)]


def is_punctuation(word: str) -> bool:
    return not word.isalnum() and all(unicodedata.category(character)[0] == "P" for character in word)


SENTENCE_MARKS = frozenset(".!?\u3002\uff1f\uff01\u2026\u0964\u0965\u061f\u06d4\u203c\u203d\u2047\u2048\u2049\uff61")


def count_sentences(line: str) -> int:
    """Sentences of a line: one ends with a mark, and what punctuation follows the mark belongs to it."""
    count, ended = 0, True
    for word in split_words(line):
        if word in SENTENCE_MARKS:
            count, ended = max(count, 1), True
        elif ended and not is_punctuation(word):
            count, ended = count + 1, False
    return count
