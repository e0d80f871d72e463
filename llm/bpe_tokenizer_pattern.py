"""How text is split into pieces before merging, and where a stream may be cut without changing the pieces.

The patterns are those of GPT-2 and GPT-4 (cl100k), as published with tiktoken, and those of Llama 3, Qwen 2, SmolLM and
GPT-4o for tokenizers loaded from elsewhere. ASCII text goes through the standard `re` with the classes spelled out in
ASCII, which finds the same pieces about twice as fast as `regex` does, and for GPT-2's pattern through NumPy
(bpe_tokenizer_ascii); only the stretch around other characters, from a safe space to a safe space, goes through
`regex`. \\p{L} and \\p{N} follow the Unicode version of `regex`, newer than that of `tokenizers`: characters assigned
in between may be split differently there.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise

import regex

from configs.errors import UserError
from llm.bpe_tokenizer_ascii import MARK, MIN_CHARS, split_gpt2_ascii

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PATTERNS = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "gpt4": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
QWEN2 = PATTERNS["gpt4"].replace(r"\p{N}{1,3}", r"\p{N}")
# SmolLM and StarCoder cut out each digit first and then apply GPT-2's pattern to what stands between digits. In one
# pattern: a digit is a piece, and white space before a digit is like white space at the end of a text.
SMOLLM = r"\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Patterns whose pieces never run on from a character that is not white space into a space, and which look at most
# three characters beyond a piece that no run of white space or of one class is cut from: these can be cut.
CUTTABLE = {*PATTERNS.values(), QWEN2, SMOLLM, _GPT4O}
LOOKAHEAD = 3  # characters: a lone apostrophe may still become 'll

_ASCII_CLASSES = {
    r"\p{L}": "A-Za-z",
    r"\p{N}": "0-9",
    r"\p{Lu}": "A-Z",
    r"\p{Ll}": "a-z",
    r"\p{Lt}": "",
    r"\p{Lm}": "",
    r"\p{Lo}": "",
    r"\p{M}": "",
    r"\s": r"\t-\r ",
}
_ELEMENT = re.compile(r"\\p\{\w+\}|\\.|\[\^?|\]|.", re.DOTALL)
_NON_ASCII = re.compile("[^\x00-\x7f]+")
_SAFE_SPACE = re.compile(r"(?<=\S) ")  # `re`'s \S is inside every \S in use, so a cut here is safe for all of them
BLOCK_CHARS = 1 << 20


def ascii_pattern(pattern: str) -> str | None:
    """The same pattern for `re` on ASCII text: Unicode classes spelled out; None when it holds other constructs."""
    parts, inside = [], False
    for element in _ELEMENT.findall(pattern):
        if element in _ASCII_CLASSES:
            chars = _ASCII_CLASSES[element]
            if not inside and not chars:
                return None
            element = chars if inside else f"[{chars}]"
        elif element == r"\S" and not inside:
            element = r"[^\t-\r ]"
        elif element.startswith("\\") and element[1:2].isalpha() and element not in (r"\r", r"\n", r"\t"):
            return None
        elif element.startswith("["):
            inside = True
        elif element == "]":
            inside = False
        parts.append(element)
    return "".join(parts)


class Splitter:
    """Cuts text into pre-token pieces by one pattern; the pieces joined are the text.

    `cuttable` says whether a long text may be cut into blocks (see `blocks`).
    """

    def __init__(self, pattern: str):
        self.pattern = PATTERNS.get(pattern, pattern)
        self.cuttable = self.pattern in CUTTABLE
        self.split_unicode = _compile_unicode(self.pattern)
        spelled_out = ascii_pattern(self.pattern) if self.cuttable else None
        self._find_ascii = re.compile(spelled_out).findall if spelled_out else self.split_unicode
        self._in_arrays = self.pattern == PATTERNS["gpt2"]

    def split(self, text: str) -> list[str]:
        """The pieces of a text, in order."""
        if text.isascii():
            return self.split_ascii(text)
        if not self.cuttable:
            return self.split_unicode(text)
        parts, stretches = self.take_apart(text)
        if self.fits_arrays(text):
            ascii_pieces, done = split_gpt2_ascii(MARK.join(parts)), 0
            pieces = []
            for stretch in stretches:
                gap = ascii_pieces.index("", done)
                pieces += ascii_pieces[done:gap]
                pieces += self.split_unicode(stretch)
                done = gap + 2
            return pieces + ascii_pieces[done:]
        pieces = self._find_ascii(parts[0])
        for stretch, part in zip(stretches, parts[1:], strict=True):
            pieces += self.split_unicode(stretch)
            pieces += self._find_ascii(part)
        return pieces

    def fits_arrays(self, text: str) -> bool:
        """Whether bpe_tokenizer_ascii may split the ASCII parts of this text, joined by MARK."""
        return self._in_arrays and len(text) >= MIN_CHARS and MARK not in text

    def take_apart(self, text: str) -> tuple[list[str], list[str]]:
        """ASCII parts, and the stretches with other characters that stand between them: one fewer."""
        bounds = list(_unicode_stretches(text))
        parts = [text[end:start] for (_, end), (start, _) in pairwise([(0, 0), *bounds, (len(text), 0)])]
        return parts, [text[start:end] for start, end in bounds]

    def split_ascii(self, text: str) -> list[str]:
        """The pieces of a text that is ASCII."""
        if self.fits_arrays(text):
            return split_gpt2_ascii(text)
        return self._find_ascii(text)

    def is_long(self, text: str) -> bool:
        """Whether `blocks` cuts the text."""
        return self.cuttable and len(text) > 2 * BLOCK_CHARS

    def blocks(self, text: str) -> Iterator[list[str]]:
        """The pieces of a text in blocks of about a million characters, so that memory does not follow its length."""
        if not self.is_long(text):
            yield self.split(text)
        else:
            windows = (text[start : start + BLOCK_CHARS] for start in range(0, len(text), BLOCK_CHARS))
            yield from self.stream(windows)

    def stream(self, chunks: Iterable[str]) -> Iterator[list[str]]:
        """The pieces of the joined chunks, in blocks, holding little more than a block at a time.

        A pattern that cannot be cut, or a single piece without end, is held as a whole.
        """
        held, wanted = "", 0
        for chunk in chunks:
            held += chunk
            if len(held) < wanted or not self.cuttable:
                continue
            pieces, used = self.whole_pieces(held)
            if used:
                yield pieces
                held = held[used:]
            # What could not be cut grows twofold before it is looked at again: linear time for any chunks.
            wanted = 2 * len(held)
        if held:
            yield self.split(held)

    def whole_pieces(self, text: str) -> tuple[list[str], int]:
        """The leading pieces that no text appended to `text` could change, and their length in characters.

        A piece is settled when it ends before the run of white space at the end of the text, and before the
        LOOKAHEAD characters in front of it.
        """
        settled = len(text.rstrip()) - LOOKAHEAD - 1
        pieces, used = self.split(text), len(text)
        while pieces and used > settled:
            used -= len(pieces.pop())
        return pieces, used


def _compile_unicode(pattern: str):
    try:
        compiled = regex.compile(pattern)
    except regex.error as error:
        raise UserError(f"split pattern {pattern!r} is not a regular expression ({error}); use gpt2 or gpt4") from error
    if compiled.groups:
        raise UserError(f"split pattern {pattern!r} captures groups; write them as (?:...)")
    return compiled.findall


def _unicode_stretches(text: str) -> Iterator[tuple[int, int]]:
    """(start, end) of the parts, cut at safe spaces, that hold every character outside ASCII."""
    start = end = 0
    if text.isascii():
        return
    for match in _NON_ASCII.finditer(text):
        if match.start() < end:
            continue
        before = _safe_space_before(text, end, match.start())
        if before > end:  # else this stretch goes on from the last one, or from the start of the text
            if end:
                yield start, end
            start = before
        after = _SAFE_SPACE.search(text, match.end())
        end = after.start() if after else len(text)
    yield start, end


def _safe_space_before(text: str, low: int, position: int) -> int:
    """The last place in low..position where a space follows something else, or `low`."""
    while (position := text.rfind(" ", low, position)) > low:
        if not text[position - 1].isspace():
            return position
    return low
