"""A text as numbered words: what the rules ask of words is looked up or counted in NumPy, never in a loop over words.

A WordTable numbers the words that it meets and remembers for each chunk between white space the numbers of its words;
most chunks of a text have been met before, so that reading a text is one dictionary look-up a chunk.
"""

from functools import cached_property

import numpy as np

from data_processing.quality_filter_tokens import split_chunk

MAX_CHUNKS = 1 << 18  # then the table is begun anew: about 60 MB
GRAM_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, so that each power is a permutation of the 64-bit numbers


class WordTable:
    """`chunks`: {chunk: numbers of its words}; `lengths`, `real` and `alphabetic` are arrays by word number."""

    def __init__(self):
        self._clear()

    def _clear(self) -> None:
        self.chunks: dict[str, tuple[int, ...]] = {}
        self.numbers: dict[str, int] = {}
        self.lengths = np.zeros(1 << 12, dtype=np.int64)  # (capacity,) characters
        self.real = np.zeros(1 << 12, dtype=bool)  # (capacity,) more than punctuation
        self.alphabetic = np.zeros(1 << 12, dtype=bool)  # (capacity,) has a letter

    def number(self, word: str) -> int:
        """The word's number, a new one for a new word."""
        number = self.numbers.get(word)
        if number is not None:
            return number
        number = self.numbers[word] = len(self.numbers)
        if number == self.lengths.size:
            for name in ("lengths", "real", "alphabetic"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
        self.lengths[number] = len(word)
        self.real[number] = any(map(str.isalnum, word))
        self.alphabetic[number] = any(map(str.isalpha, word))
        return number

    def read(self, text: str) -> np.ndarray:
        """(number of words,) int64: the text's words by number; they hold until the next call."""
        if len(self.chunks) > MAX_CHUNKS:
            self._clear()
        parts, chunks = text.split(), self.chunks
        try:
            numbers = [number for chunk in parts for number in chunks[chunk]]
        except KeyError:  # new chunks: learn them, then read again
            for chunk in set(parts).difference(chunks):
                chunks[chunk] = tuple(map(self.number, split_chunk(chunk)))
            numbers = [number for chunk in parts for number in chunks[chunk]]
        return np.array(numbers, dtype=np.int64)


class TextView:
    """Words and n-grams of a text; each is computed when a rule first asks."""

    def __init__(self, text: str, table: WordTable):
        self.text, self.table = text, table

    @cached_property
    def words(self) -> np.ndarray:
        """(number of words,) int64 word numbers."""
        return self.table.read(self.text)

    @cached_property
    def word_ends(self) -> np.ndarray:
        """(number of words + 1,) int64: characters of the words up to each, white space left out."""
        words = self.words  # before the table is asked: reading may put new arrays in its place
        return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self.table.lengths[words])])

    def grams(self, n: int) -> np.ndarray:
        """(number of n-grams,) uint64 hashes; equal n-grams have equal ones."""
        numbers, count = self.words.view(np.uint64), max(len(self.words) - n + 1, 0)
        grams = np.zeros(count, dtype=np.uint64)
        for offset in range(n):
            grams *= GRAM_MULTIPLIER
            grams += numbers[offset : offset + count]
        return grams

    def gram_characters(self, start: int, n: int) -> int:
        """Characters of the n words from `start`, without what stands between them."""
        return int(self.word_ends[start + n] - self.word_ends[start])

    def longest_gram(self, n: int) -> int:
        """Characters of the longest n-gram."""
        return int((self.word_ends[n:] - self.word_ends[:-n]).max(initial=0))
