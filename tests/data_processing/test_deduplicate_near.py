"""Near-duplicates: recall and precision on known pairs, buckets and clusters against brute force, memory."""

import random
import tracemalloc
from itertools import combinations

import numpy as np
import pytest

from configs.errors import UserError
from data_processing.deduplicate_near import (
    NearConfig,
    UnionFind,
    band_keys,
    bucket_pairs,
    buckets,
    choose_bands,
    cluster,
    jaccard,
    keepers,
)
from data_processing.minhash import signatures
from data_processing.shingles import shingle_sets
from tests.data_processing.near_pairs import make_pairs
from tests.tolerances import NEAR_PRECISION, NEAR_RECALL


def found_pairs(texts: list[str], config: NearConfig) -> set[tuple[int, int]]:
    """Pairs in one cluster."""
    keys = band_keys(signatures(texts), *choose_bands(config))
    sets = shingle_sets(texts, config.shingle_words)
    similar = lambda a, b: jaccard(sets[a], sets[b]) >= config.threshold  # noqa: E731
    roots = cluster((group for band in keys.T for group in buckets(band)), len(texts), similar).roots()
    groups: dict[int, list[int]] = {}
    for index, root in enumerate(roots.tolist()):
        groups.setdefault(root, []).append(index)
    return {pair for group in groups.values() for pair in combinations(group, 2)}


def test_recall_and_precision_on_known_pairs():
    pairs = make_pairs(1200, seed=7)
    texts = [text for first, second, _ in pairs for text in (first, second)]
    positives = {(2 * i, 2 * i + 1) for i, (_, _, s) in enumerate(pairs) if s >= 0.8}
    unsure = {(2 * i, 2 * i + 1) for i, (_, _, s) in enumerate(pairs) if 0.7 <= s < 0.8}
    assert len(positives) > 300 and len(pairs) - len(positives) - len(unsure) > 300
    found = found_pairs(texts, NearConfig())
    assert len(found & positives) >= NEAR_RECALL * len(positives)
    assert len(found & (positives | unsure)) >= NEAR_PRECISION * len(found)


def test_bands_are_disjoint_and_datasketch_chooses_them():
    bands, rows = choose_bands(NearConfig())
    assert bands * rows <= 128 and 1 - (1 - 0.8**rows) ** bands > 0.95
    assert choose_bands(NearConfig(bands=4, rows=32)) == (4, 32)
    signed = signatures(["a b c d e f g"] * 2)
    signed[1, 10] += np.uint32(1)  # row 3 of band 1
    equal = band_keys(signed, bands, rows)[0] == band_keys(signed, bands, rows)[1]
    assert equal.sum() == bands - 1 and not equal[10 // rows]
    one = band_keys(np.zeros((1, 128), dtype=np.uint32), 4, 32)[0]
    assert len(set(one.tolist())) == 4, "the band is part of its key"


def test_buckets_match_brute_force():
    keys = np.random.default_rng(0).integers(0, 40, size=100).astype(np.uint64)
    groups = {key: [i for i, k in enumerate(keys.tolist()) if k == key] for key in set(keys.tolist())}
    expected = sorted(group for group in groups.values() if len(group) > 1)
    assert sorted(group.tolist() for group in buckets(keys)) == expected
    assert list(buckets(np.zeros(0, dtype=np.uint64))) == []


def test_clusters_do_not_hang_on_the_order_of_groups():
    rng = random.Random(4)
    edges = {tuple(sorted(rng.sample(range(60), 2))) for _ in range(45)}
    groups = [np.array(rng.sample(range(60), rng.randint(2, 20))) for _ in range(25)]
    similar = lambda a, b: (a, b) in edges  # noqa: E731
    results = []
    for _ in range(4):
        rng.shuffle(groups)
        results.append(cluster(groups, 60, similar).roots().tolist())
    assert all(result == results[0] for result in results) and len(set(results[0])) < 60
    wanted = UnionFind(60)
    for group in groups:
        for pair in bucket_pairs(group):
            if pair in edges:
                wanted.join(*pair)
    assert wanted.roots().tolist() == results[0]


def test_the_longest_of_a_cluster_stays():
    roots = np.array([0, 1, 0, 0, 4, 1])
    lengths = np.array([5, 7, 9, 9, 1, 6])
    assert keepers(roots, lengths).tolist() == [2, 1, 2, 2, 4, 1]
    assert keepers(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)).size == 0


def test_jaccard_by_hand():
    one, two = np.array([1, 2, 3], dtype=np.uint64), np.array([2, 3, 4, 5], dtype=np.uint64)
    assert jaccard(one, two) == 2 / 5 and jaccard(one, one[:0]) == 0 and jaccard(one[:0], one[:0]) == 1


def test_memory_is_linear_and_under_a_kilobyte_a_document():
    """Keys, candidates and sets of 1,500 and 3,000 documents; signatures are on disk in a build."""
    peaks = []
    for count in (1500, 3000):
        signed = np.random.default_rng(1).integers(0, 1 << 32, size=(count, 128), dtype=np.uint32)
        signed[count // 2 :] = signed[: count - count // 2]  # every document has its double
        tracemalloc.start()
        keys = band_keys(signed, 17, 7)
        sets = cluster((group for band in keys.T for group in buckets(band)), count, lambda a, b: True)
        keepers(sets.roots(), np.ones(count, dtype=np.int64))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 3000 * 1024 and peaks[1] < 2.2 * peaks[0]


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ({"threshold": 0.0}, "threshold=0.0 is out of range"),
        ({"bands": 4}, "bands=4 x rows=0 do not fit"),
        ({"bands": 20, "rows": 20}, "do not fit num_permutations=128"),
        ({"verify": "maybe"}, "verify='maybe' is unknown"),
        ({"shingle_words": 0}, "shingle_words=0 must be positive"),
    ],
)
def test_settings_that_make_no_sense_are_refused(bad, problem):
    with pytest.raises(UserError, match=problem):
        NearConfig(**bad)
