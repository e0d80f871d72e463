"""Counts the pieces of a corpus: all that training needs to know of it. Memory follows the number of unique pieces.

Texts come as a stream and go out to the workers in batches cut between texts; a long text is counted in blocks. Where
pieces are found in arrays (GPT-2's pattern, ASCII), those of up to eight bytes, nine of ten, are counted as 64-bit
integers by sorting and never become strings one by one.
"""

from collections import Counter
from collections.abc import Iterable

import numpy as np

from llm.bpe_tokenizer_ascii import MARK, piece_starts
from llm.bpe_tokenizer_pattern import Splitter
from llm.bpe_tokenizer_pool import group_texts, ordered_map

MAX_PIECE_CHARS = 1 << 12  # no token grows so long; a piece of 200 MB would be held as as many cells
BATCH_CHARS = 1 << 22
KEY_BYTES = 8
PENDING_KEYS = 1 << 20  # sorted together; 8 MB
KEY_MASKS = np.array([(1 << 8 * length) - 1 for length in range(KEY_BYTES + 1)], dtype=np.uint64)


class PieceCounter:
    """How often each piece occurs in the texts added."""

    def __init__(self, pattern: str):
        self.splitter = Splitter(pattern)
        self.counter: Counter = Counter()
        self.pending: list[np.ndarray] = []  # keys of pieces, each a piece's bytes with zeros behind
        self.num_pending = 0
        self.keys, self.times = np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.int64)

    def add(self, text: str) -> None:
        """Count the pieces of one text."""
        if self.splitter.is_long(text) or not self.splitter.fits_arrays(text) or "\0" in text:
            for pieces in self.splitter.blocks(text):
                self.counter.update(pieces)
            return
        parts, stretches = self.splitter.take_apart(text)
        for stretch in stretches:
            self.counter.update(self.splitter.split_unicode(stretch))
        self._add_ascii(MARK.join(parts))

    def total(self) -> Counter:
        """All counts; pieces over MAX_PIECE_CHARS are counted in parts of that length."""
        self._sort_pending()
        pieces = self.keys.astype("<u8").view(f"S{KEY_BYTES}").tolist()
        self.counter.update({piece.decode(): times for piece, times in zip(pieces, self.times.tolist(), strict=True)})
        for piece in [piece for piece in self.counter if len(piece) > MAX_PIECE_CHARS]:
            times = self.counter.pop(piece)
            for start in range(0, len(piece), MAX_PIECE_CHARS):
                self.counter[piece[start : start + MAX_PIECE_CHARS]] += times
        return self.counter

    def _add_ascii(self, text: str) -> None:
        data = text.encode("ascii")
        chars = np.frombuffer(data, dtype=np.uint8)
        places = np.flatnonzero(piece_starts(chars))
        lengths = np.diff(places, append=len(chars))
        short = lengths <= KEY_BYTES
        # A view of the eight bytes from each place on, as one little-endian integer.
        windows = np.ndarray(len(chars), dtype="<u8", buffer=data + bytes(KEY_BYTES), strides=(1,))
        keys = windows[places[short]] & KEY_MASKS[lengths[short]]
        self.pending.append(keys[keys != ord(MARK)])
        self.num_pending += len(keys)
        starts, ends = places[~short], places[~short] + lengths[~short]
        self.counter.update([text[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)])
        if self.num_pending >= PENDING_KEYS:
            self._sort_pending()

    def _sort_pending(self) -> None:
        if self.pending:
            keys, times = np.unique(np.concatenate(self.pending), return_counts=True)
            self.pending, self.num_pending = [], 0
            both, place = np.unique(np.concatenate([self.keys, keys]), return_inverse=True)
            self.times = np.bincount(place, weights=np.concatenate([self.times, times])).astype(np.int64)
            self.keys = both


class CountWorker:
    """Counts the pieces of batches of texts in a worker process."""

    def __init__(self, pattern: str):
        self.pattern = pattern

    def __call__(self, texts: Iterable[str]) -> Counter:
        counter = PieceCounter(self.pattern)
        for text in texts:
            counter.add(text)
        return counter.total()


def count_pieces(texts: Iterable[str], pattern: str, num_processes: int = 1) -> Counter:
    """How often each piece of the texts occurs, by PieceCounter, in this process or over workers."""
    if num_processes == 1:
        return CountWorker(pattern)(texts)
    total: Counter = Counter()
    for counter in ordered_map(CountWorker(pattern), group_texts(texts, BATCH_CHARS), num_processes):
        total.update(counter)
    return total
