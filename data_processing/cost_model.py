"""What the arithmetic stages should cost on a processor of known elementary rates: documents a second on one core.

HTML and PDF are left out: their cost is the library's, which the benchmark measures beside them.
"""

from dataclasses import dataclass

# Passes over the code points of a text in shingles.hash_words, in units of one running sum: the UTF-32
# encoding, classes, four masks and two searches of one byte each, the widening, product, sum.
SHINGLE_PASSES = 8
MINHASH_PASSES = 2  # multiply, minimum
# NumPy calls and dictionary look-ups of quality_filter with all rules on a document that most rules pass.
QUALITY_CALLS, QUALITY_TEXT_READS = 75, 2


@dataclass(frozen=True, slots=True)
class ProcessorRates:
    """Measured by the benchmark on operations that are not the stages themselves."""

    hash_bytes_per_s: float  # BLAKE2b
    element_uint64_s: float  # a running sum over an array of uint64 that fits the second-level cache
    element_uint32_s: float  # an outer product of 128 x 300 uint32
    call_s: float  # a NumPy call on a small array
    lookup_s: float  # a dictionary look-up of a string just split off, in a list


def exact_per_s(document_bytes: float, rates: ProcessorRates) -> float:
    """deduplicate: one hash, one look-up, one new entry with its journal line."""
    return 1 / (document_bytes / rates.hash_bytes_per_s + 20 * rates.lookup_s)


def minhash_per_s(characters: float, words: float, permutations: int, rates: ProcessorRates) -> float:
    """Signatures: passes over code points, and over words times permutations."""
    shingles = SHINGLE_PASSES * characters * rates.element_uint64_s
    hashes = MINHASH_PASSES * words * permutations * rates.element_uint32_s
    return 1 / (shingles + hashes + 6 * rates.call_s)


def quality_per_s(words: float, rates: ProcessorRates) -> float:
    """quality_filter with all sets of rules: reading the text (again after c4) and NumPy's overhead a call."""
    return 1 / (QUALITY_TEXT_READS * words * rates.lookup_s + QUALITY_CALLS * rates.call_s)
