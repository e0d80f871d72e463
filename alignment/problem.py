"""The one record that all alignment data becomes, and the split that a problem belongs to for good."""

import hashlib
from dataclasses import dataclass

HELD_OUT_SHARE = 0.2


@dataclass(frozen=True)
class Problem:
    """A question with its right answer.

    answer: the answer alone, such as "72" or "\\\\frac{1}{2}". solution: the worked reasoning that leads to it, without
    answer markers, or None. source: where it comes from, "gsm8k" or "arithmetic/mixed".
    """

    id: str
    question: str
    answer: str
    source: str
    solution: str | None = None


@dataclass(frozen=True)
class Draft:
    """What a generator draws; `key` is equal for problems that must not be on both sides of a split."""

    question: str
    solution: str
    answer: str
    key: str


def split_of(key: str) -> str:
    """ "held_out" for a fifth of all keys, else "train": the same on every machine and for every seed."""
    digest = hashlib.sha256(f"split of {key}".encode()).digest()
    share = int.from_bytes(digest[:8], "little") / 2**64
    return "held_out" if share < HELD_OUT_SHARE else "train"
