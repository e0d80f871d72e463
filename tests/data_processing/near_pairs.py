"""Texts with known Jaccard similarity of their word 5-grams: originals, near-duplicates, and pairs just below."""

import random

SYLLABLES = "ba de fi go ku la me ni po ru sa te vi wo za".split()


def random_words(rng: random.Random, count: int) -> list[str]:
    return ["".join(rng.choices(SYLLABLES, k=3)) for _ in range(count)]


def change_words(rng: random.Random, words: list[str], count: int) -> list[str]:
    """The words with `count` places of new words, far enough apart that each costs five 5-grams."""
    changed = list(words)
    for place in rng.sample(range(2, len(words) - 2, 7), count):
        changed[place] = "new" + "".join(rng.choices(SYLLABLES, k=3))
    return changed


def true_jaccard(first: str, second: str, n: int = 5) -> float:
    """By Python sets of tuples."""
    one, two = ({tuple(w[i : i + n]) for i in range(len(w) - n + 1)} for w in (first.split(), second.split()))
    return len(one & two) / len(one | two)


def make_pairs(count: int, seed: int) -> list[tuple[str, str, float]]:
    """(original, changed copy, similarity) of 300-word texts, from nearly equal to half changed."""
    rng, pairs = random.Random(seed), []
    for _ in range(count):
        words = random_words(rng, 300)
        first = " ".join(words)
        second = " ".join(change_words(rng, words, rng.randint(0, 20)))
        pairs.append((first, second, true_jaccard(first, second)))
    return pairs
