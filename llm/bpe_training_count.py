"""Counts the pieces of a corpus: all that training needs to know of it. Memory follows the number of unique pieces.

Texts come as a stream and go out to the workers in batches cut between texts; a long text is counted in blocks.
"""

from collections import Counter
from collections.abc import Iterable

from llm.bpe_tokenizer_pattern import Splitter
from llm.bpe_tokenizer_pool import group_texts, ordered_map

MAX_PIECE_CHARS = 1 << 12  # no token grows so long; a piece of 200 MB would be held as as many cells
BATCH_CHARS = 1 << 22


class CountWorker:
    """Counts the pieces of batches of texts, here or in a worker process."""

    def __init__(self, pattern: str):
        self.pattern = pattern

    def __call__(self, texts: list[str]) -> Counter:
        splitter, counter = Splitter(self.pattern), Counter()
        for text in texts:
            for pieces in splitter.blocks(text):
                counter.update(pieces)
        return counter


def count_pieces(texts: Iterable[str], pattern: str, num_processes: int = 1) -> dict[str, int]:
    """How often each piece of the texts occurs; pieces over MAX_PIECE_CHARS are counted in parts of that length."""
    total: Counter = Counter()
    if num_processes == 1:
        splitter = Splitter(pattern)
        for text in texts:
            for pieces in splitter.blocks(text):
                total.update(pieces)
    else:
        for counter in ordered_map(CountWorker(pattern), group_texts(texts, BATCH_CHARS), num_processes):
            total.update(counter)
    for piece in [piece for piece in total if len(piece) > MAX_PIECE_CHARS]:
        times = total.pop(piece)
        for start in range(0, len(piece), MAX_PIECE_CHARS):
            total[piece[start : start + MAX_PIECE_CHARS]] += times
    return total
