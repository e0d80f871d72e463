"""The stages deduplicate_lines and deduplicate_paragraphs: what stood anywhere in the corpus before is taken out.

The first occurrence stays. Units shorter than `min_characters` stay too (a closing brace, "Yes."), as do blank lines. A
document of which less than `min_kept_share` is left is dropped. Memory is 8 bytes a distinct unit: sorted arrays of
64-bit hashes that merge as they grow (a log-structured set), so that look-ups and merges are NumPy calls on whole
blocks. Among 10^9 units the chance that any two share a hash is 3%; such a pair costs one line.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass

import numpy as np

from configs.errors import UserError
from data_processing.document import Document
from data_processing.stage import Dropped

UNITS = {"line": "\n", "paragraph": "\n\n"}


@dataclass
class UnitConfig:
    """Which units take part."""

    min_characters: int = 40
    min_kept_share: float = 0.2  # of the document's characters

    def __post_init__(self):
        if self.min_characters < 1 or not 0 <= self.min_kept_share <= 1:
            raise UserError(
                f"min_characters={self.min_characters} min_kept_share={self.min_kept_share}: use 1 or more, and 0..1"
            )


class SeenHashes:
    """A set of uint64 that only grows, as a few sorted arrays, each at least twice as long as the next."""

    def __init__(self):
        self.runs: list[np.ndarray] = []

    def __len__(self) -> int:
        return sum(run.size for run in self.runs)

    def contains(self, hashes: np.ndarray) -> np.ndarray:
        """(n,) bool: which hashes are in the set."""
        found = np.zeros(hashes.size, dtype=bool)
        for run in self.runs:
            places = np.minimum(np.searchsorted(run, hashes), run.size - 1)
            found |= run[places] == hashes
        return found

    def add(self, hashes: np.ndarray) -> None:
        """Put in distinct hashes that are not in the set yet."""
        if not hashes.size:
            return
        run = np.sort(hashes)
        while self.runs and self.runs[-1].size < 2 * run.size:
            run = np.concatenate([self.runs.pop(), run])
            run.sort(kind="stable")  # two sorted halves: a merge
        self.runs.append(run)


def unit_hash(unit: str) -> int:
    """64 bits of BLAKE2b of a unit without its outer white space."""
    return int.from_bytes(hashlib.blake2b(unit.strip().encode("utf-8"), digest_size=8).digest(), "little")


class DeduplicateUnits:
    """Takes repeated lines (or paragraphs) out of documents, and drops those of which little is left."""

    has_memory = True

    def __init__(self, unit: str, config: UnitConfig):
        self.name, self.unit, self.config = f"deduplicate_{unit}s", unit, config
        self.seen, self.journal, self.counts = SeenHashes(), [], Counter()

    def run(self, block: list[Document]) -> tuple[list[Document], list[Dropped]]:
        separator = UNITS[self.unit]
        split = [document.text.split(separator) for document in block]
        long = [[len(part.strip()) >= self.config.min_characters for part in parts] for parts in split]
        hashes = np.array(
            [
                unit_hash(p)
                for parts, flags in zip(split, long, strict=True)
                for p, f in zip(parts, flags, strict=True)
                if f
            ],
            dtype=np.uint64,
        )
        fresh = self._fresh(hashes)
        kept, dropped, at = [], [], 0
        for document, parts, flags in zip(block, split, long, strict=True):
            count = sum(flags)
            stays = iter(fresh[at : at + count].tolist())
            at += count
            left = [part for part, flag in zip(parts, flags, strict=True) if not flag or next(stays)]
            self._judge(document, parts, left, kept, dropped)
        return kept, dropped

    def _fresh(self, hashes: np.ndarray) -> np.ndarray:
        """(n,) bool: the first occurrences, here and in the corpus; the set learns them."""
        _, first = np.unique(hashes, return_index=True)
        fresh = np.zeros(hashes.size, dtype=bool)
        fresh[first] = True
        fresh &= ~self.seen.contains(hashes)
        new = hashes[fresh]
        self.seen.add(new)
        self.journal.append(new.tobytes())
        return fresh

    def _judge(self, document: Document, parts: list[str], left: list[str], kept: list, dropped: list) -> None:
        gone = len(parts) - len(left)
        if not gone:
            kept.append(document)
            return
        text = UNITS[self.unit].join(left)
        if len(text.strip()) < self.config.min_kept_share * len(document.text):
            detail = f"{gone} of {len(parts)} {self.unit}s stood in the corpus before"
            dropped.append(Dropped(document, f"repeated_{self.unit}s", detail))
            return
        self.counts[f"{self.unit}s_removed"] += gone
        self.counts["characters_removed"] += len(document.text) - len(text)
        document.text = text.strip("\n")
        kept.append(document)

    def take_counts(self) -> Counter:
        taken, self.counts = self.counts, Counter()
        return taken

    def take_journal(self) -> bytes:
        taken, self.journal = b"".join(self.journal), []
        return taken

    def replay_journal(self, journal: bytes) -> None:
        self.seen.add(np.frombuffer(journal, dtype=np.uint64))
