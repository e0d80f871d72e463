"""MinHash signatures (Broder 1997) in NumPy: the share of equal entries estimates the Jaccard similarity of two texts.

Entry k is the least value of a_k x modulo 2^32 over the text's shingles x (32 bits of their 64-bit hash), with a_k odd:
each is a permutation of the 32-bit numbers, and on hashed input the least values behave as those of random ones (tests
compare the estimates with datasketch's and with the true similarity; an added constant changed nothing but the time).
Texts are worked through in batches whose arrays stay in the cache.
"""

import numpy as np

from data_processing.shingles import shingle_batches

SEED = 0x6D6577
SLICE = 1024  # shingles at a time: 128 x 1024 values of 4 bytes fit the cache
EMPTY = np.uint32(0xFFFFFFFF)  # every entry of a text without words


def multipliers(count: int) -> np.ndarray:
    """(count, 1) uint32: the odd factor of each permutation; always the same ones."""
    rng = np.random.default_rng(SEED)
    return rng.integers(0, 1 << 31, size=(count, 1), dtype=np.uint32) * np.uint32(2) + np.uint32(1)


def signatures(texts: list[str], num_permutations: int = 128, shingle_words: int = 5) -> np.ndarray:
    """(texts, num_permutations) uint32 signatures of the texts' word n-grams."""
    factors = multipliers(num_permutations)
    result = np.full((len(texts), num_permutations), EMPTY, dtype=np.uint32)
    scratch = np.empty(num_permutations * SLICE, dtype=np.uint32)
    for index, shingles in shingle_batches(texts, shingle_words):
        values = (shingles >> np.uint64(32)).astype(np.uint32)  # (S,)
        for start in range(0, values.size, SLICE):
            part = values[start : start + SLICE]
            hashed = scratch[: num_permutations * part.size].reshape(num_permutations, part.size)  # (P, s)
            np.multiply(factors, part, out=hashed)
            np.minimum(result[index], hashed.min(axis=1), out=result[index])
    return result


def estimate_jaccard(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The share of equal entries along the last axis, float64."""
    return (first == second).mean(axis=-1)
