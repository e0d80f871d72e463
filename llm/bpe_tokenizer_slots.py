"""The memory of an encoder: each piece seen before has a slot, and a slot holds the piece's token ids.

A text becomes slots by one dictionary look-up a piece, and ids by one NumPy gather: `first[slot]` is the id of a piece
that is a single token (nine of ten), and -1 - place says where in `flat` the ids of the others lie, their number first.
"""

from itertools import islice

import numpy as np

from llm.bpe_tokenizer_files import BpeModel
from llm.bpe_tokenizer_merge import MergeTable

MAX_SLOTS = 1 << 20  # pieces remembered, a few hundred bytes each; then the memory starts anew
MAX_FLAT = 1 << 23  # ids remembered
MAX_PIECE_CHARS = 1 << 16  # a longer piece is not worth its place


class Slots(dict):
    """piece -> slot; an unknown piece gets the next slot."""

    def __missing__(self, piece: str) -> int:
        slot = self[piece] = len(self)
        return slot


class SlotTable:
    """Encodes lists of pieces, remembering what it has merged."""

    def __init__(self, model: BpeModel, merges: MergeTable):
        self.merges = merges
        self.missing = model.missing_bytes
        self.whole = _whole_tokens(model) if model.ignore_merges else {}
        self.forget()

    def forget(self) -> None:
        """Drop everything remembered."""
        self.slots = Slots()
        self.first = np.empty(1 << 12, dtype=np.int32)
        self.flat = np.empty(1 << 12, dtype=np.int32)
        self.num_slots = self.num_flat = 0

    def encode_pieces(self, pieces: list[str]) -> np.ndarray:
        """The ids (int32) of pieces in order."""
        return self.encode_parts(pieces, [])[0]

    def encode_parts(self, pieces: list[str], cuts: list[int]) -> list[np.ndarray]:
        """The ids (int32) of pieces[: cuts[0]], pieces[cuts[0] : cuts[1]] and so on: one array more than cuts."""
        slots = np.fromiter(map(self.slots.__getitem__, pieces), dtype=np.int32, count=len(pieces))
        oversize = self._fill() if len(self.slots) > self.num_slots else False
        first = self.first[slots]
        many = np.flatnonzero(first < 0)
        if len(many):
            ids, extra = self._gather(first, many)
            cuts = cuts + np.concatenate([[0], np.cumsum(extra)])[np.searchsorted(many, cuts)]
        else:
            ids = first
        if oversize or self.num_slots > MAX_SLOTS or self.num_flat > MAX_FLAT:
            self.forget()
        return np.split(ids, cuts) if len(cuts) else [ids]

    def _fill(self) -> bool:
        """Merge the pieces that got a slot since the last call; True when one of them is too long to keep."""
        new = list(islice(reversed(self.slots), len(self.slots) - self.num_slots))[::-1]
        encoded = [piece.encode("utf-8") for piece in new]
        if self.missing:  # dropped before merging, as `tokenizers` does: their neighbours may merge
            encoded = [piece.translate(None, self.missing) for piece in encoded]
        if self.whole:
            results = [[self.whole[p]] if p in self.whole else None for p in encoded]
            merged = iter(self.merges.merge_pieces([p for p in encoded if p not in self.whole]))
            results = [ids or next(merged) for ids in results]
        else:
            results = self.merges.merge_pieces(encoded)
        self._store(results)
        return max(map(len, new)) > MAX_PIECE_CHARS

    def _store(self, results: list[list[int]]) -> None:
        lengths = np.fromiter(map(len, results), dtype=np.int64, count=len(results))
        first = np.fromiter([ids[0] if ids else 0 for ids in results], dtype=np.int32, count=len(results))
        many = np.flatnonzero(lengths != 1)  # none: every byte of the piece was missing
        sizes = lengths[many] + 1
        places = self.num_flat + np.cumsum(sizes) - sizes
        first[many] = -1 - places
        flat = [token for i in many.tolist() for token in (len(results[i]), *results[i])]
        self.first = _append(self.first, self.num_slots, first)
        self.flat = _append(self.flat, self.num_flat, np.array(flat, dtype=np.int32))
        self.num_slots += len(results)
        self.num_flat += len(flat)

    def _gather(self, first: np.ndarray, many: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all pieces, given `first` of each and which are several tokens; and their tokens beyond one."""
        places = -1 - first[many].astype(np.int64)
        counts = self.flat[places].astype(np.int64)
        extra = counts - 1
        ends = np.cumsum(counts)
        within = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        targets = np.repeat(many + np.cumsum(extra) - extra, counts) + within
        ids = np.empty(len(first) + int(extra.sum()), dtype=np.int32)
        single = np.ones(len(ids), dtype=bool)
        single[targets] = False
        ids[targets] = self.flat[np.repeat(places + 1, counts) + within]
        ids[single] = first[first >= 0]
        return ids, extra


def _append(array: np.ndarray, used: int, new: np.ndarray) -> np.ndarray:
    """The array with `new` written behind its first `used` entries, grown by doubling."""
    needed = used + len(new)
    if needed > len(array):
        array = np.concatenate([array[:used], np.empty(max(needed, 2 * used) - used, dtype=array.dtype)])
    array[used:needed] = new
    return array


def _whole_tokens(model: BpeModel) -> dict[bytes, int]:
    special = set(model.special_tokens.values())
    return {token: index for index, token in enumerate(model.token_bytes) if token and index not in special}
