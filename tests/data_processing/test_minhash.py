"""Shingles against Python sets, signatures against the true similarity and datasketch, in time and memory that hold."""

import random
import re

import numpy as np
import pytest
from datasketch import MinHash

from data_processing import shingles as shingles_module
from data_processing.minhash import EMPTY, estimate_jaccard, signatures
from data_processing.shingles import batches, hash_words, shingle_sets
from tests.data_processing.near_pairs import make_pairs
from tests.tolerances import MINHASH_DEVIATIONS

WORD = re.compile(r"[^\W_]+")
TEXTS = [
    "",
    "one",
    "one two three",
    "A b; C d... e-f (g)  h\n\ti " * 3,
    "Größe und Maß, naïve café — οδός Привет " * 4,
    "天地玄黄，宇宙洪荒。日月盈昃 mixed with Latin",
    "ひらがなとカタカナ",
    "שלום עולם, مرحبا بالعالم " * 5,
    "emoji 😀 👩‍👩‍👧 only 😀",
    "under_score and 3.14 or 10,000 x² ½",
    "\x00\x01 ... !!!",
]


def plain_words(text: str) -> list[str]:
    """The definition: runs of letters, marks and digits, and single characters of scripts without spaces."""
    import unicodedata

    words, current = [], ""
    for character in text.lower():
        alone = any(low <= ord(character) <= high for low, high in shingles_module.ALONE_RANGES)
        inside = unicodedata.category(character)[0] in "LMN"
        if inside and not alone:
            current += character
            continue
        if current:
            words.append(current)
        current = ""
        if inside and alone:
            words.append(character)
    return [*words, current] if current else words


def test_words_match_the_plain_definition():
    hashes = hash_words(TEXTS)
    names: dict[int, str] = {}
    for index, text in enumerate(TEXTS):
        words = plain_words(text)
        mine = hashes.hashes[hashes.starts[index] : hashes.starts[index + 1]].tolist()
        assert len(mine) == len(words), text
        for value, word in zip(mine, words, strict=True):
            assert names.setdefault(value, word) == word
    assert len(set(names.values())) == len(names)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_shingle_sets_match_python_sets(n):
    seen: dict[tuple, int] = {}
    for text, found in zip(TEXTS, shingle_sets(TEXTS, n), strict=True):
        words = plain_words(text)
        grams = {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}
        if 0 < len(words) < n:
            grams = {("short", *words)}
        assert len(found) == len(grams) and np.all(found[1:] > found[:-1])
        for value in found.tolist():
            seen[value] = seen.get(value, 0) + 1
    assert sum(shingle_sets([t], n)[0].size for t in TEXTS) == sum(seen.values()), "a batch changes nothing"


def test_a_long_text_in_pieces_gives_the_set_of_the_whole(monkeypatch):
    rng = random.Random(3)
    text = " ".join(str(rng.randint(0, 5000)) for _ in range(30_000))
    (whole,) = shingle_sets([text], 5)
    monkeypatch.setattr(shingles_module, "PIECE_CHARACTERS", 10_000)
    (pieces,) = shingle_sets([text], 5)
    assert np.array_equal(pieces, whole)
    unbroken = "天" * 30_000
    assert shingle_sets([unbroken], 5)[0].size == 1
    assert np.array_equal(signatures([text])[0], signatures([text, "x"])[0])


def test_batches_cover_all_texts_in_order():
    lengths = [10, 70_000, 5, 60_000, 60_000, 0, 0]
    found = batches(["x" * n for n in lengths])
    assert [i for batch in found for i in batch] == list(range(len(lengths)))
    assert all(len(b) == 1 or sum(lengths[i] for i in b) <= shingles_module.BATCH_CHARACTERS for b in found)
    assert batches([]) == []


def test_estimates_are_as_good_as_theory_and_as_datasketch():
    """Bias and spread over 300 pairs within MINHASH_DEVIATIONS standard errors, and datasketch's spread beside ours."""
    ours, theirs, expected = [], [], []
    for first, second, similarity in make_pairs(300, seed=2):
        signed = signatures([first, second])
        ours.append(float(estimate_jaccard(signed[0], signed[1])) - similarity)
        expected.append(similarity * (1 - similarity) / 128)
        hashes = []
        for words in (first.split(), second.split()):
            minhash = MinHash(num_perm=128)
            minhash.update_batch([" ".join(words[i : i + 5]).encode() for i in range(len(words) - 4)])
            hashes.append(minhash)
        theirs.append(hashes[0].jaccard(hashes[1]) - similarity)
    variance = np.mean(expected)
    assert abs(np.mean(ours)) < MINHASH_DEVIATIONS * np.sqrt(variance / len(ours))
    # The sample variance of n nearly normal values has a relative standard error of sqrt(2 / n).
    slack = MINHASH_DEVIATIONS * np.sqrt(2 / len(ours))
    assert (1 - slack) * variance < np.mean(np.square(ours)) < (1 + slack) * variance
    assert np.mean(np.square(ours)) < (1 + slack) * np.mean(np.square(theirs))


def test_signatures_of_equal_short_and_empty_texts():
    signed = signatures(["a b c", "A, b! C", "", "a b d", "?!"])
    assert np.array_equal(signed[0], signed[1]) and (signed[2] == EMPTY).all() and (signed[4] == EMPTY).all()
    assert estimate_jaccard(signed[0], signed[3]) < 0.1
    assert signatures([]).shape == (0, 128)
