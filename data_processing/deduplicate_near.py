"""Near-duplicates by MinHash and LSH (Indyk & Motwani 1998): which documents are so alike that one of them is enough.

Signatures are cut into disjoint bands of rows; two documents that agree in all rows of a band are candidates. Candidate
pairs are compared (by their true Jaccard similarity, unless `verify` says otherwise), what holds is joined by
union-find, and of each cluster the longest document stays. datasketch chooses bands and rows: missing a pair costs far
more than comparing one in vain, since the comparison removes the false ones.

    keys = band_keys(signatures, bands, rows)
    sets = cluster((group for band in keys.T for group in buckets(band)), len(keys), similar)
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from configs.errors import UserError, check_choice, check_positive, missing_extra
from data_processing.shingles import GRAM_BASE, mix

VERIFY = ("exact", "estimate", "none")
FALSE_POSITIVE_WEIGHT, FALSE_NEGATIVE_WEIGHT = 0.02, 0.98
ALL_PAIRS_UP_TO = 12  # in a larger bucket each document is compared with the first and with its neighbour only


@dataclass
class NearConfig:
    """What counts as a near-duplicate."""

    threshold: float = 0.8  # Jaccard similarity of the sets of word n-grams
    num_permutations: int = 128
    shingle_words: int = 5
    bands: int = 0  # 0: datasketch chooses bands and rows
    rows: int = 0
    verify: str = "exact"  # exact: true Jaccard; estimate: from the signatures; none: every candidate pair counts

    def __post_init__(self):
        check_choice("deduplicate_near.verify", self.verify, VERIFY)
        check_positive(
            **{f"deduplicate_near.{name}": getattr(self, name) for name in ("num_permutations", "shingle_words")}
        )
        if not 0 < self.threshold <= 1:
            raise UserError(f"deduplicate_near.threshold={self.threshold} is out of range; use a similarity in 0..1")
        if (self.bands > 0) != (self.rows > 0) or self.bands * self.rows > self.num_permutations:
            wanted = f"num_permutations={self.num_permutations}"
            raise UserError(
                f"deduplicate_near.bands={self.bands} x rows={self.rows} do not fit {wanted}; set both or neither"
            )


def choose_bands(config: NearConfig) -> tuple[int, int]:
    """(bands, rows): those of the config, else datasketch's optimum for the threshold."""
    if config.bands:
        return config.bands, config.rows
    try:
        import datasketch  # noqa: F401
    except ImportError as error:
        raise missing_extra("datasketch", "data") from error
    return _optimal_bands(config.threshold, config.num_permutations)


@lru_cache(maxsize=16)
def _optimal_bands(threshold: float, num_permutations: int) -> tuple[int, int]:
    """datasketch's optimum: half a second of numerical integrals, and a build asks three times."""
    from datasketch.lsh import _optimal_param

    return _optimal_param(threshold, num_permutations, FALSE_POSITIVE_WEIGHT, FALSE_NEGATIVE_WEIGHT)


def band_keys(signatures: np.ndarray, bands: int, rows: int) -> np.ndarray:
    """(N, P) uint32 signatures to (N, bands) uint64 keys, equal in a band when all its rows are."""
    count = signatures.shape[0]
    cut = signatures[:, : bands * rows].reshape(count, bands, rows)  # (N, bands, rows)
    keys = np.broadcast_to(np.arange(1, bands + 1, dtype=np.uint64), (count, bands)).copy()
    for row in range(rows):
        keys *= GRAM_BASE
        keys += cut[:, :, row].astype(np.uint64) + np.uint64(1)
        mix(keys)
    return keys


def bucket_pairs(members: np.ndarray) -> list[tuple[int, int]]:
    """The pairs of one bucket's documents that are worth a comparison, each with its smaller index first."""
    ids = sorted(set(members.tolist()))
    if len(ids) <= ALL_PAIRS_UP_TO:
        return [(first, second) for at, first in enumerate(ids) for second in ids[at + 1 :]]
    return [(ids[0], other) for other in ids[1:]] + list(pairwise(ids[1:]))


def buckets(keys: np.ndarray) -> Iterator[np.ndarray]:
    """The indices, ascending, of documents with equal keys (N,), for every key that occurs twice or more."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    edges = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1], [True]]))
    for start, end in zip(edges[:-1][np.diff(edges) > 1], edges[1:][np.diff(edges) > 1], strict=True):
        yield order[start:end]


class UnionFind:
    """Disjoint sets of 0..count-1 in an int64 array; the root of a set is its smallest member."""

    def __init__(self, count: int):
        self.parent = np.arange(count, dtype=np.int64)

    def find(self, item: int) -> int:
        parent = self.parent
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = int(parent[item])
        return item

    def join(self, first: int, second: int) -> None:
        first, second = self.find(first), self.find(second)
        if first != second:
            self.parent[max(first, second)] = min(first, second)

    def roots(self) -> np.ndarray:
        """(count,) int64: every item's root."""
        return np.array([self.find(item) for item in range(len(self.parent))], dtype=np.int64)


def cluster(groups: Iterable[np.ndarray], count: int, similar: Callable[[int, int], bool]) -> UnionFind:
    """Join every candidate pair of the groups that `similar` confirms; the order of the groups changes nothing."""
    sets, refused = UnionFind(count), set()
    for members in groups:
        for first, second in bucket_pairs(members):
            if sets.find(first) == sets.find(second) or (first, second) in refused:
                continue
            if similar(first, second):
                sets.join(first, second)
            else:
                refused.add((first, second))
    return sets


def keepers(roots: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """(N,) int64: for each document the one of its cluster that stays, the longest (of equals the first)."""
    order = np.lexsort((np.arange(len(roots)), -lengths, roots))  # by cluster, then length, then place
    first = np.concatenate([[True], roots[order][1:] != roots[order][:-1]])
    best = np.empty(len(roots), dtype=np.int64)
    best[order] = order[np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))]
    return best


def jaccard(first: np.ndarray, second: np.ndarray) -> float:
    """Similarity of two sorted sets of shingles; two empty ones are equal."""
    if not first.size and not second.size:
        return 1.0
    both = np.intersect1d(first, second, assume_unique=True).size
    return both / (first.size + second.size - both)


def estimate_needed(config: NearConfig) -> bool:
    """Whether signatures must be kept for the comparison of candidates."""
    return config.verify == "estimate"
