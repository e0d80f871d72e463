"""The words of a corpus while pairs are merged in them, with exact pair counts and the places of every pair.

All unique words lie in one row of cells, a separator between them. `ArrayWords` does a merge in NumPy, all places of
the pair at once: right for the first thousand merges, which have thousands of places each. `LinkedWords` then goes
over the few places of later merges in plain Python. Both change the shared `counts` (pair -> weighted number of
places) and return the pairs whose count has grown. An entry of `places` may be out of date; cells tell.
"""

from collections import defaultdict

import numpy as np

from llm.bpe_tokenizer_merge import drop_overlaps
from llm.bpe_training_queue import PAIR_SHIFT

SEPARATOR, DEAD = -1, -2
WORD_END = b"\xff"  # never part of UTF-8


def lay_out_words(words: dict[str, int], byte_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Cells (token ids, int32, SEPARATOR around each word) and their weights (int64): how often the word occurs."""
    encoded = [word.encode("utf-8") for word in words]
    lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
    table = np.array(byte_ids, dtype=np.int32)
    table[WORD_END[0]] = SEPARATOR
    tokens = table[np.frombuffer(WORD_END + WORD_END.join(encoded) + WORD_END, dtype=np.uint8)]
    counts = np.fromiter(words.values(), dtype=np.int64, count=len(encoded))
    weights = np.concatenate([[0], np.repeat(counts, lengths + 1)])
    return drop_single_tokens(tokens, weights)


def drop_single_tokens(tokens: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The cells without words of one token, in which nothing is left to merge, and without dead cells."""
    alive = tokens != DEAD
    tokens, weights = tokens[alive], weights[alive]
    kept = np.ones(len(tokens), dtype=bool)
    alone = np.flatnonzero((tokens[:-2] == SEPARATOR) & (tokens[2:] == SEPARATOR))
    kept[alone + 1] = False
    kept[alone + 2] = False
    return tokens[kept], weights[kept]


def _find_pairs(tokens: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places of all pairs, grouped by pair in ascending order; where each group starts; the groups' weights."""
    places = np.flatnonzero((tokens[:-1] >= 0) & (tokens[1:] >= 0))
    pairs = (tokens[places].astype(np.int64) << PAIR_SHIFT) | tokens[places + 1]
    order = np.argsort(pairs, kind="stable")
    places, pairs = places[order], pairs[order]
    starts = np.flatnonzero(np.diff(pairs, prepend=-1))
    totals = np.add.reduceat(weights[places], starts) if len(starts) else np.zeros(0, dtype=np.int64)
    return places, starts, totals


class ArrayWords:
    """Words in arrays; `places` holds a list of position arrays for each pair."""

    def __init__(self, tokens: np.ndarray, weights: np.ndarray):
        self.tokens, self.weights = tokens, weights
        self.following = np.arange(1, len(tokens) + 1, dtype=np.int32)
        self.previous = np.arange(-1, len(tokens) - 1, dtype=np.int32)
        self.counts: dict[int, int] = defaultdict(int)
        self.places: dict[int, list[np.ndarray]] = defaultdict(list)
        places, starts, totals = _find_pairs(tokens, weights)
        for group, total in zip(np.split(places.astype(np.int32), starts[1:]), totals.tolist(), strict=False):
            pair = (int(tokens[group[0]]) << PAIR_SHIFT) | int(tokens[group[0] + 1])
            self.counts[pair] = total
            self.places[pair].append(group)

    def merge(self, left: int, right: int, new: int) -> list[int]:
        """Merge every place of the pair into the token `new`; returns the pairs whose count has grown."""
        tokens, following, previous = self.tokens, self.following, self.previous
        pair = left << PAIR_SHIFT | right
        places = np.concatenate(self.places.pop(pair))
        places = places[(tokens[places] == left) & (tokens[following[places]] == right)]
        if left == right:
            places = self._drop_overlaps(np.unique(places))
        seconds, before = following[places], previous[places]
        after, weights = following[seconds], self.weights[places]
        token_after = tokens[after]
        tokens[seconds] = DEAD
        token_before = tokens[before]  # DEAD where the pair's own previous place has just been merged
        tokens[places] = new
        following[places] = after
        previous[after] = places

        has_before, had_after = token_before >= 0, token_after >= 0
        self._lose(token_before[has_before], weights[has_before], lambda other: other << PAIR_SHIFT | left)
        self._lose(token_after[had_after], weights[had_after], lambda other: right << PAIR_SHIFT | other)
        del self.counts[pair]
        token_after = tokens[after]
        has_after = token_after >= 0
        grown = self._gain(
            token_before[has_before], before[has_before], weights[has_before], lambda o: o << PAIR_SHIFT | new
        )
        grown += self._gain(
            token_after[has_after], places[has_after], weights[has_after], lambda o: new << PAIR_SHIFT | o
        )
        return grown

    def _drop_overlaps(self, places: np.ndarray) -> np.ndarray:
        """Of the places of a pair of equal tokens, those that a pass from the left merges."""
        ordinal = np.cumsum(np.concatenate([[0], np.where(self.following[places[:-1]] == places[1:], 1, 2)]))
        return places[np.isin(ordinal, drop_overlaps(ordinal))]

    def _lose(self, others: np.ndarray, weights: np.ndarray, pair_of) -> None:
        if len(others):
            totals = np.bincount(others, weights=weights)  # float64: exact up to 2**53
            found = np.flatnonzero(totals)
            for other, total in zip(found.tolist(), totals[found].tolist(), strict=True):
                self.counts[pair_of(other)] -= int(total)

    def _gain(self, others: np.ndarray, places: np.ndarray, weights: np.ndarray, pair_of) -> list[int]:
        order = np.argsort(others.astype(np.uint16), kind="stable")  # NumPy's radix sort; ids are small this early
        others, places = others[order], places[order]
        starts = np.flatnonzero(np.diff(others, prepend=-1))
        if not len(starts):
            return []
        totals = np.add.reduceat(weights[order], starts)
        grown = []
        bounds = [*starts.tolist(), len(others)]
        for number, (other, total) in enumerate(zip(others[starts].tolist(), totals.tolist(), strict=True)):
            pair = pair_of(other)
            self.counts[pair] += total
            self.places[pair].append(places[bounds[number] : bounds[number + 1]])
            grown.append(pair)
        return grown


class LinkedWords:
    """Words in lists: the first cell of a token holds its id, its first and last cell hold its length in cells."""

    def __init__(self, tokens: np.ndarray, weights: np.ndarray):
        tokens, weights = drop_single_tokens(tokens, weights)
        self.counts: dict[int, int] = defaultdict(int)
        self.places: dict[int, list[int]] = defaultdict(list)
        places, starts, totals = _find_pairs(tokens, weights)
        lefts, rights = tokens[places[starts]].tolist(), tokens[places[starts] + 1].tolist()
        bounds, places = [*starts.tolist(), len(places)], places.tolist()
        for number, total in enumerate(totals.tolist()):
            pair = lefts[number] << PAIR_SHIFT | rights[number]
            self.counts[pair] = total
            self.places[pair] = places[bounds[number] : bounds[number + 1]]
        shared = [*range(int(tokens.max(initial=0)) + 1), DEAD, SEPARATOR]  # one object an id, not one a cell
        self.tokens = [shared[token] for token in tokens.tolist()]
        self.weights = weights.tolist()
        self.sizes = [1] * len(self.tokens)

    def merge(self, left: int, right: int, new: int) -> list[int]:
        """Merge every place of the pair into the token `new`; returns the pairs whose count has grown."""
        tokens, sizes, weights = self.tokens, self.sizes, self.weights
        counts, places = self.counts, self.places
        pair, left_of_pair, left_of_new = left << PAIR_SHIFT | right, right << PAIR_SHIFT, new << PAIR_SHIFT
        grown = set()
        found = places.pop(pair)
        if left == right:
            found.sort()
        for place in found:
            if tokens[place] != left:
                continue
            size = sizes[place]
            second = place + size
            if tokens[second] != right:
                continue
            size += sizes[second]
            after = place + size
            before = place - sizes[place - 1]
            tokens[place], tokens[second] = new, DEAD
            sizes[place] = sizes[after - 1] = size
            weight = weights[place]
            other = tokens[before]
            if other >= 0:
                other <<= PAIR_SHIFT
                counts[other | left] -= weight
                other |= new
                counts[other] += weight
                places[other].append(before)
                grown.add(other)
            other = tokens[after]
            if other >= 0:
                counts[left_of_pair | other] -= weight
                other |= left_of_new
                counts[other] += weight
                places[other].append(place)
                grown.add(other)
        del counts[pair]
        return grown
