"""Byte-pair merging of pieces: the lowest-ranked pair of neighbours first, the leftmost of equals, until none is left.

Three routes, one result. Short pieces that come in numbers are merged together in NumPy: pieces of equal length form
a matrix, every round merges exactly one pair in each row, so the matrix loses one column a round and the rows without
a pair drop out. Few or long pieces are merged one by one with a heap and links between positions, O(n log n). A very
long piece first loses its most frequent pairs, all places of one pair at once, before the heap takes the rest:
a million spaces are twenty rounds.
"""

from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np

NO_RANK = np.int32(2**31 - 1)
MATRIX_MAX_BYTES = 32  # a longer piece costs a round a byte; the heap is faster
MATRIX_MIN_ROWS = 12  # below, NumPy's fixed cost of a round is more than the heap's work
SWEEP_MIN_TOKENS = 4096  # a piece of this many tokens is swept pair by pair ...
SWEEP_MIN_SHARE = 1 / 32  # ... while its lowest-ranked pair covers this share of it


class MergeTable:
    """The merges of a tokenizer as pair -> (rank, merged id), for single look-ups and for arrays.

    `byte_ids[b]` is the id of byte b; `merges` holds (left, right, merged id) in rank order.
    """

    def __init__(self, byte_ids: list[int], merges: list[tuple[int, int, int]]):
        self.byte_ids = np.array(byte_ids, dtype=np.int32)
        self.byte_id_list = byte_ids
        table = np.array(merges, dtype=np.int64).reshape(-1, 3)
        keys = _pair_keys(table[:, 0], table[:, 1])
        order = np.argsort(keys, kind="stable")
        self.keys = np.append(keys[order], np.iinfo(np.int64).max)
        self.ranks = np.append(order.astype(np.int32), NO_RANK)
        self.merged = table[:, 2].astype(np.int32)
        self.rank_of = {(a, b): rank for rank, (a, b, _) in enumerate(merges)}
        self.merged_list = [merged for _, _, merged in merges]
        # Ranks rise along any chain of merges unless two merges make the same token; only then may a sweep differ.
        self.can_sweep = len(set(self.merged_list)) == len(merges)

    def ranks_of(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Ranks (int32) of the pairs left[i], right[i]; NO_RANK where they do not merge. Negative ids never do."""
        keys = _pair_keys(left, right)
        place = np.searchsorted(self.keys, keys)
        return np.where(self.keys[place] == keys, self.ranks[place], NO_RANK)

    def merge_pieces(self, pieces: list[bytes]) -> list[list[int]]:
        """The token ids of each piece."""
        results: list[list[int] | None] = [None] * len(pieces)
        by_length: dict[int, list[int]] = {}
        for index, piece in enumerate(pieces):
            by_length.setdefault(len(piece), []).append(index)
        for length, indices in by_length.items():
            if not 0 < length <= MATRIX_MAX_BYTES or len(indices) < MATRIX_MIN_ROWS:
                for index in indices:
                    results[index] = self.merge_one(pieces[index])
            else:
                joined = np.frombuffer(b"".join([pieces[index] for index in indices]), dtype=np.uint8)
                ids = self.byte_ids[joined].reshape(-1, length)  # (pieces, bytes)
                for rows, tokens in self._merge_matrix(ids):
                    for row, row_tokens in zip(rows.tolist(), tokens.tolist(), strict=True):
                        results[indices[row]] = row_tokens
        return results

    def _merge_matrix(self, ids: np.ndarray):
        """Merge the rows of ids (pieces, tokens); yields (row numbers, their ids) as they are finished."""
        rows = np.arange(len(ids))
        ranks = np.full(ids.shape, NO_RANK, dtype=np.int32)  # ranks[:, j] of the pair (j, j + 1); the last has none
        ranks[:, :-1] = self.ranks_of(ids[:, :-1], ids[:, 1:])
        while True:
            width = ids.shape[1]
            place = ranks.argmin(axis=1)
            best = ranks[np.arange(len(rows)), place]
            going = best != NO_RANK
            if not going.all():
                yield rows[~going], ids[~going]
                rows, ids, ranks, place, best = rows[going], ids[going], ranks[going], place[going], best[going]
            if not len(rows):
                return
            lines = np.arange(len(rows))
            ids[lines, place] = self.merged[best]
            kept = np.arange(width) != place[:, None] + 1  # (rows, width)
            ids = ids[kept].reshape(-1, width - 1)
            ranks = ranks[kept].reshape(-1, width - 1)
            self._refresh_ranks(ids, ranks, lines, place)

    def _refresh_ranks(self, ids: np.ndarray, ranks: np.ndarray, lines: np.ndarray, place: np.ndarray) -> None:
        """Look up the two pairs beside each merged token, in place."""
        last = ids.shape[1] - 1
        after = np.where(place < last, ids[lines, np.minimum(place + 1, last)], -1)
        ranks[lines, place] = self.ranks_of(ids[lines, place], after)
        has_before = place > 0
        lines, place = lines[has_before], place[has_before]
        ranks[lines, place - 1] = self.ranks_of(ids[lines, place - 1], ids[lines, place])

    def merge_one(self, piece: bytes) -> list[int]:
        """The token ids of one piece of any length."""
        if len(piece) >= SWEEP_MIN_TOKENS and self.can_sweep:
            tokens = self._sweep(self.byte_ids[np.frombuffer(piece, dtype=np.uint8)]).tolist()
        else:
            tokens = [self.byte_id_list[byte] for byte in piece]
        return self._merge_linked(tokens)

    def _sweep(self, ids: np.ndarray) -> np.ndarray:
        """Merge every place of the lowest-ranked pair at once, while that pair is frequent enough to pay for it."""
        while len(ids) >= SWEEP_MIN_TOKENS:
            ranks = self.ranks_of(ids[:-1], ids[1:])
            best = ranks.min()
            places = np.flatnonzero(ranks == best)
            if best == NO_RANK or len(places) < SWEEP_MIN_SHARE * len(ids):
                break
            places = drop_overlaps(places)
            ids[places] = self.merged[best]
            kept = np.ones(len(ids), dtype=bool)
            kept[places + 1] = False
            ids = ids[kept]
        return ids

    def _merge_linked(self, tokens: list[int]) -> list[int]:
        """Merge a list of ids with a heap of rank * length + position; tokens are linked by position."""
        count, rank_of, merged = len(tokens), self.rank_of, self.merged_list
        heap = []
        for place, pair in enumerate(pairwise(tokens)):
            rank = rank_of.get(pair)
            if rank is not None:
                heap.append(rank * count + place)
        if not heap:
            return tokens
        heapify(heap)
        following = list(range(1, count + 1))
        previous = list(range(-1, count - 1))
        while heap:
            rank, place = divmod(heappop(heap), count)
            right = following[place]
            if right == count or rank_of.get((tokens[place], tokens[right])) != rank:
                continue  # one of the two has merged since
            token = tokens[place] = merged[rank]
            tokens[right] = -1
            after = following[place] = following[right]
            if after < count:
                previous[after] = place
                rank = rank_of.get((token, tokens[after]))
                if rank is not None:
                    heappush(heap, rank * count + place)
            before = previous[place]
            if before >= 0:
                rank = rank_of.get((tokens[before], token))
                if rank is not None:
                    heappush(heap, rank * count + before)
        return [token for token in tokens if token >= 0]


def drop_overlaps(places: np.ndarray) -> np.ndarray:
    """Of ascending places, those a pass from the left takes when each takes its neighbour too: every other of a run."""
    starts = np.flatnonzero(np.diff(places, prepend=-2) != 1)
    run_start = np.repeat(starts, np.diff(starts, append=len(places)))
    return places[(np.arange(len(places)) - run_start) % 2 == 0]


def _pair_keys(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return (left.astype(np.int64) << 32) | right.astype(np.int64)
