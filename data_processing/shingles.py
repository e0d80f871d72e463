"""Word n-grams of many texts at once, as 64-bit hashes, with no Python loop over words: for MinHash and decontaminate.

A word is a run of letters, marks and digits in lower case; a character of a script without spaces (Han, kana, Thai,
Lao, Khmer, Burmese) is a word of its own. A word's hash is a polynomial in its code points, taken from prefix sums of
the whole batch modulo 2^64, so that the work is a few passes over an array of code points. Two different n-grams agree
with a chance of about 2^-60; nobody who knows the constants is kept from making such a pair on purpose.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

BASE = 0x9E3779B97F4A7C15  # odd: invertible modulo 2^64
GRAM_BASE = np.uint64(0xD6E8FEB86659FD93)
MASK = (1 << 64) - 1
LETTER, ALONE = 1, 2  # classes of code points: part of a word, a word of its own; 0 is neither
ALONE_RANGES = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x3400, 0x4DBF))
ALONE_RANGES += ((0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x323AF))
BREAK = "\x00"  # between texts of a batch: a code point that is no letter
BATCH_CHARACTERS = 1 << 16  # a batch's arrays fit the cache
PIECE_CHARACTERS = 1 << 20  # a longer text is read in pieces, which bounds the memory
OVERLAP_CHARACTERS = 1 << 10  # between pieces, so that no n-gram is lost at a cut


@lru_cache(maxsize=1)
def code_point_classes() -> np.ndarray:
    """(0x110000,) uint8: LETTER, ALONE or 0 for every code point; 0.2 s once in a process."""
    import unicodedata

    classes = np.zeros(0x110000, dtype=np.uint8)
    for code in range(0x323B0):  # beyond it no letter is assigned
        if unicodedata.category(chr(code))[0] in "LMN":
            classes[code] = LETTER
    for first, last in ALONE_RANGES:
        classes[first : last + 1] *= ALONE
    return classes


@lru_cache(maxsize=8)
def _powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """(BASE^i, BASE^-i) modulo 2^64 for i < count, (count,) uint64 each."""
    inverse = pow(BASE, -1, 1 << 64)
    tables = []
    for base in (BASE, inverse):
        table = np.full(count, base & MASK, dtype=np.uint64)
        table[0] = 1
        tables.append(np.multiply.accumulate(table))
    return tables[0], tables[1]


@dataclass(slots=True)
class WordHashes:
    """The words of a batch: `hashes` (W,) uint64, and of text i those from starts[i] to starts[i + 1]."""

    hashes: np.ndarray
    starts: np.ndarray


def mix(values: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit numbers that spreads every bit (splitmix64's finaliser), in place."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values ^= values >> np.uint64(shift)
        values *= np.uint64(factor)
    values ^= values >> np.uint64(31)
    return values


def hash_words(texts: list[str]) -> WordHashes:
    """The words of texts; keep a batch to about BATCH_CHARACTERS (one longer text is a batch of its own)."""
    joined = BREAK.join(["", *(text.lower() for text in texts), ""])
    codes = np.frombuffer(joined.encode("utf-32-le", errors="replace"), dtype=np.uint32)  # (C,)
    classes = code_point_classes()[codes]  # (C,)
    # A word begins where a letter follows something else, or at any character that is a word alone.
    inside = classes == LETTER
    alone = classes == ALONE
    begins = np.flatnonzero((inside & ~np.concatenate([[False], inside[:-1]])) | alone)  # (W,)
    ends = np.flatnonzero((inside & ~np.concatenate([inside[1:], [False]])) | alone) + 1  # (W,)
    size = 1 << max(int(codes.size).bit_length(), 12)  # few different table sizes
    powers, inverses = _powers(size)
    sums = np.zeros(codes.size + 1, dtype=np.uint64)
    np.cumsum((codes.astype(np.uint64) + np.uint64(0x100)) * powers[: codes.size], out=sums[1:])
    hashes = (sums[ends] - sums[begins]) * inverses[begins]
    breaks = np.cumsum([1, *(len(text.lower()) + 1 for text in texts)]) if len(texts) else np.zeros(1)
    return WordHashes(mix(hashes), np.searchsorted(begins, breaks))


def batches(texts: list[str]) -> list[range]:
    """Index ranges of consecutive texts with about BATCH_CHARACTERS together."""
    found, start, size = [], 0, 0
    for index, text in enumerate(texts):
        if size and size + len(text) > BATCH_CHARACTERS:
            found.append(range(start, index))
            start, size = index, 0
        size += len(text)
    return [*found, range(start, len(texts))] if len(texts) > start else found


def hash_shingles(words: WordHashes, n: int) -> tuple[np.ndarray, np.ndarray]:
    """(hashes of all n-grams, (S,) uint64; starts (texts + 1,)): text i has those from starts[i] to starts[i + 1].

    A text of fewer than n words gives one shingle of all its words, and none when it has no word.
    """
    counts = np.diff(words.starts)  # (texts,)
    total = int(words.hashes.size)
    grams = np.zeros(max(total - n + 1, 0), dtype=np.uint64)
    for offset in range(n):
        grams *= GRAM_BASE
        grams += words.hashes[offset : offset + grams.size]
    numbers = np.maximum(counts - n + 1, 0)  # n-grams of each text
    short = (counts > 0) & (counts < n)
    starts = np.concatenate([[0], np.cumsum(numbers + short)])
    shingles = np.empty(int(starts[-1]), dtype=np.uint64)
    # Of all windows over the batch, those that cross from one text into the next are left out.
    within = np.repeat(words.starts[:-1] - np.concatenate([[0], np.cumsum(numbers)[:-1]]), numbers)
    places = np.arange(int(numbers.sum())) + within
    keep = np.repeat(~short, numbers + short)
    shingles[keep] = grams[places]
    for index in np.flatnonzero(short):
        value = 0
        for word in words.hashes[words.starts[index] : words.starts[index + 1]].tolist():
            value = (value * int(GRAM_BASE) + word) & MASK
        shingles[starts[index]] = value ^ 0x5851F42D4C957F2D  # no n-gram of a long text
    return mix(shingles), starts


def _pieces(text: str) -> Iterator[str]:
    """The text in overlapping pieces, cut at spaces where there are some."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        end = text.rfind(" ", start + PIECE_CHARACTERS // 2, start + PIECE_CHARACTERS)
        end = end if end >= 0 else start + PIECE_CHARACTERS
        yield text[start:end]
        overlap = text.find(" ", end - OVERLAP_CHARACTERS, end)
        start = overlap + 1 if overlap >= 0 else end - OVERLAP_CHARACTERS
    yield text[start:]


def shingle_batches(texts: list[str], n: int) -> Iterator[tuple[int, np.ndarray]]:
    """(index of a text, hashes of its n-grams (S,) uint64); a long text comes several times, a piece at a time."""
    for batch in batches(texts):
        if len(batch) == 1 and len(texts[batch[0]]) > PIECE_CHARACTERS:
            for piece in _pieces(texts[batch[0]]):
                yield batch[0], hash_shingles(hash_words([piece]), n)[0]
            continue
        shingles, starts = hash_shingles(hash_words([texts[i] for i in batch]), n)
        for place, index in enumerate(batch):
            yield index, shingles[starts[place] : starts[place + 1]]


def shingle_sets(texts: list[str], n: int) -> list[np.ndarray]:
    """For each text its distinct n-grams, sorted, (S_i,) uint64."""
    sets = [np.zeros(0, dtype=np.uint64)] * len(texts)
    for index, shingles in shingle_batches(texts, n):
        found = np.unique(shingles)
        sets[index] = np.union1d(sets[index], found) if sets[index].size else found
    return sets
