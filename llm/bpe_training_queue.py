"""Pairs by count: which pair of tokens is merged next, with ties broken by a rule.

Pairs lie in buckets, one a count, and a heap holds the counts. Only the bucket that is being emptied is put in the
order of the rule. Entries are not removed when a count falls: an entry that no longer agrees with `counts` moves to
its bucket when it is met.
"""

from collections import defaultdict
from collections.abc import Callable
from heapq import heapify, heappop, heappush

PAIR_SHIFT = 24  # a pair of ids is one integer, left << 24 | right: vocabularies up to 16 million
PAIR_MASK = (1 << PAIR_SHIFT) - 1
COMPLEMENT = bytes(255 - byte for byte in range(256))


def lexicographic_key(token: bytes) -> str:
    """A string that sorts lower the greater the bytes are, also beside a prefix and when two are joined to a pair."""
    return token.translate(COMPLEMENT).decode("latin-1") + "\u0100"


class PairQueue:
    """Pops the pair with the highest count; of equals the one with the lowest `order(pair)`.

    `counts` is shared with the merge loop, which changes it and calls `push` for each pair whose count has grown.
    """

    def __init__(self, counts: dict[int, int], order: Callable[[int], str | int]):
        self.counts, self.order = counts, order
        self.buckets: dict[int, list[int]] = defaultdict(list)
        self.heights: list[int] = []  # a heap of -count
        self.open: list[tuple[str | int, int]] = []  # the heap of the bucket being emptied
        self.open_count = 0
        for pair, count in counts.items():
            self.push(pair, count)

    def push(self, pair: int, count: int) -> None:
        if count == self.open_count:
            heappush(self.open, (self.order(pair), pair))
            return
        bucket = self.buckets[count]
        if not bucket:
            heappush(self.heights, -count)
        bucket.append(pair)

    def pop(self) -> int | None:
        """The next pair to merge; None when no pair is left."""
        while True:
            if not self.open or (self.heights and -self.heights[0] > self.open_count):
                if not self._open_highest():
                    return None
            _, pair = heappop(self.open)
            count = self.counts.get(pair, 0)
            if count == self.open_count:
                return pair
            if 0 < count < self.open_count:
                self.push(pair, count)

    def _open_highest(self) -> bool:
        left_over, count = [pair for _, pair in self.open], self.open_count
        self.open, self.open_count = [], 0
        for pair in left_over:  # a token that already existed has made a pair more frequent than the open count
            self.push(pair, count)
        if not self.heights:
            return False
        self.open_count = -heappop(self.heights)
        self.open = [(self.order(pair), pair) for pair in set(self.buckets.pop(self.open_count))]
        heapify(self.open)
        return True
