"""The deduplicate_near step of build_corpus: all blocks' documents at once, in memory that is linear and small.

Three passes over the blocks' files, the first two in the workers: signatures, of which only the band keys stay (8 bytes
a band and document); the shingles of candidates, kept in a file; and the verdicts. About 200 bytes a document in all.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from data_processing.build_corpus_engine import Engine
from data_processing.build_corpus_work import shingle_file, sign_file
from data_processing.deduplicate_near import (
    NearConfig,
    band_keys,
    choose_bands,
    cluster,
    estimate_needed,
    jaccard,
    keepers,
)
from data_processing.document import Document, read_documents
from data_processing.minhash import estimate_jaccard
from data_processing.stage import Dropped


class ShingleStore:
    """Sets of shingle hashes in one file, read through a memory map: document -> its sorted set."""

    def __init__(self, path: Path, documents: np.ndarray):
        self.path, self.place = path, {int(d): i for i, d in enumerate(documents)}
        self.offsets = [0]
        self.map: np.ndarray | None = None

    def write(self, sets: Iterator[list[np.ndarray]]) -> None:
        """Write the sets in the order of the documents."""
        with open(self.path, "wb") as file:
            for part in sets:
                for shingles in part:
                    file.write(shingles.tobytes())
                    self.offsets.append(self.offsets[-1] + shingles.size)
        if self.offsets[-1]:
            self.map = np.memmap(self.path, dtype=np.uint64, mode="r")

    def __getitem__(self, document: int) -> np.ndarray:
        place = self.place[document]
        start, end = self.offsets[place], self.offsets[place + 1]
        return self.map[start:end] if end > start else np.zeros(0, dtype=np.uint64)


class NearDuplicates:
    """Finds which documents of the files have a longer near-duplicate."""

    def __init__(self, config: NearConfig, engine: Engine, work: Path):
        self.config, self.engine, self.work = config, engine, work

    def find(self, files: list[Path]) -> np.ndarray:
        """(N,) int64: for every document, numbered through the files, the one that stays in its place."""
        keys, lengths, self.counts = self._sign(files)
        edges = np.concatenate([[0], np.cumsum(self.counts)])
        candidate = np.zeros(len(lengths), dtype=bool)
        for members in self.engine.groups(keys):
            candidate[members] = True
        similar = self._judge(files, edges, candidate)
        sets = cluster(self.engine.groups(keys), len(lengths), similar)
        return keepers(sets.roots(), lengths)

    def _sign(self, files: list[Path]) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """(band keys (N, bands) uint64, lengths (N,), documents of each file); signatures go to a file if needed."""
        bands, rows = choose_bands(self.config)
        keys, lengths = [np.zeros((0, bands), dtype=np.uint64)], [np.zeros(0, dtype=np.int64)]
        tasks = ((str(f), self.config.num_permutations, self.config.shingle_words) for f in files)
        with open(self.work / "signatures.bin", "wb") as file:
            for result in self.engine.map(sign_file, tasks):
                keys.append(band_keys(result["signatures"], bands, rows))
                lengths.append(result["lengths"])
                if estimate_needed(self.config):
                    file.write(result["signatures"].tobytes())
        return np.concatenate(keys), np.concatenate(lengths), [part.size for part in lengths[1:]]

    def _judge(self, files: list[Path], edges: np.ndarray, candidate: np.ndarray):
        """The function that says whether two candidates are near-duplicates."""
        config = self.config
        if config.verify == "none":
            return lambda first, second: True
        if config.verify == "estimate":
            shape = (len(candidate), config.num_permutations)
            known = np.memmap(self.work / "signatures.bin", dtype=np.uint32, mode="r", shape=shape)
            return lambda first, second: estimate_jaccard(known[first], known[second]) >= config.threshold
        documents = np.flatnonzero(candidate)
        store = ShingleStore(self.work / "shingles.bin", documents)
        places = [documents[(documents >= a) & (documents < b)] - a for a, b in pairwise(edges)]
        tasks = ((str(f), config.shingle_words, p) for f, p in zip(files, places, strict=True) if p.size)
        store.write(self.engine.map(shingle_file, tasks))
        return lambda first, second: jaccard(store[first], store[second]) >= config.threshold


def split_by_keepers(
    files: list[Path], best: np.ndarray
) -> Iterator[tuple[list[Document], list[Document], list[Dropped]]]:
    """Per file (all documents, kept, dropped); a dropped one names the document that stays."""
    wanted = {int(k) for number, k in enumerate(best) if k != number}
    ids: dict[int, str] = {}
    number = 0
    for file in files:  # the keeper may stand in a later file, so their ids are collected first
        for document in read_documents([file]):
            if number in wanted:
                ids[number] = document.id
            number += 1
    number = 0
    for file in files:
        documents, kept, dropped = list(read_documents([file])), [], []
        for document in documents:
            keeper = int(best[number])
            if keeper == number:
                kept.append(document)
            else:
                dropped.append(
                    Dropped(document, "near_duplicate", f"nearly the text of {ids[keeper]}, which is longer")
                )
            number += 1
        yield documents, kept, dropped


def describe_near(config: NearConfig, best: np.ndarray) -> dict[str, Any]:
    """Facts for the statistics: bands, rows, clusters."""
    bands, rows = choose_bands(config)
    dropped = best != np.arange(len(best))
    return {"bands": bands, "rows": rows, "clusters": len(set(best[dropped].tolist()))}
