"""The decontaminate stage: documents that hold word n-grams of an evaluation set go.

The n-grams (13 words, as for GPT-3) of every text field of the evaluation files are hashed once; a document is dropped
when it has at least `min_hits` of them. An evaluation text shorter than n words but of `min_words` or more counts as
one n-gram of its own length. The build's identity holds the files' hash, so another file is another corpus.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from configs.errors import UserError, check_positive
from data_processing.document import DOCUMENT_SUFFIXES, Document, expand_paths, read_json_objects
from data_processing.shingles import shingle_batches
from data_processing.stage import Dropped, StatelessStage


@dataclass
class DecontaminateConfig:
    """Evaluation files and what an overlap is."""

    files: list[str] = field(default_factory=list)  # JSONL: gsm8k/test.jsonl, a directory, a glob
    fields: list[str] = field(default_factory=list)  # keys whose texts count; empty: every string
    ngram_words: int = 13
    min_words: int = 8
    min_hits: int = 1

    def __post_init__(self):
        for name in ("ngram_words", "min_words", "min_hits"):
            check_positive(**{f"decontaminate.{name}": getattr(self, name)})


def evaluation_texts(config: DecontaminateConfig) -> list[str]:
    """All texts of the evaluation files; UserError when there is none."""
    texts = []
    for pattern in config.files:
        for path in expand_paths(pattern, DOCUMENT_SUFFIXES):
            for _, row in read_json_objects(path):
                wanted = config.fields or list(row)
                texts += [row[name] for name in wanted if isinstance(row.get(name), str)]
    if not texts:
        raise UserError(
            f"decontaminate.files={config.files} decontaminate.fields={config.fields} give no text; name JSONL files"
            " and keys that they have"
        )
    return texts


def files_digest(patterns: list[str]) -> str:
    """One hash of the contents of evaluation files, for the build's identity."""
    digest = hashlib.blake2b(digest_size=16)
    for pattern in patterns:
        for path in expand_paths(pattern, DOCUMENT_SUFFIXES):
            digest.update(Path(path).read_bytes())
    return digest.hexdigest()


class EvaluationIndex:
    """{length in words: sorted hashes of the evaluation n-grams of that length}."""

    def __init__(self, config: DecontaminateConfig):
        self.config = config
        texts = evaluation_texts(config)
        lengths = np.array([words.size for _, words in _words(texts)])
        self.hashes: dict[int, np.ndarray] = {}
        for n in sorted({config.ngram_words, *(int(m) for m in lengths if config.min_words <= m < config.ngram_words)}):
            chosen = [t for t, m in zip(texts, lengths, strict=True) if m == n or (n == config.ngram_words and m > n)]
            parts = [shingles for _, shingles in shingle_batches(chosen, n)]
            if parts:
                self.hashes[n] = np.unique(np.concatenate(parts))

    def hits(self, texts: list[str]) -> np.ndarray:
        """(texts,) int64: how many n-grams of each text are in the evaluation set."""
        counts = np.zeros(len(texts), dtype=np.int64)
        for n, known in self.hashes.items():
            for index, shingles in shingle_batches(texts, n):
                places = np.minimum(np.searchsorted(known, shingles), known.size - 1)
                counts[index] += int((known[places] == shingles).sum())
        return counts


def _words(texts: list[str]) -> list[tuple[int, np.ndarray]]:
    """(index, hashes of the words) of each text."""
    sizes: dict[int, list[np.ndarray]] = {index: [] for index in range(len(texts))}
    for index, words in shingle_batches(texts, 1):
        sizes[index].append(words)
    return [(index, np.concatenate(parts) if parts else np.zeros(0)) for index, parts in sizes.items()]


class Decontaminate(StatelessStage):
    """Drops documents that overlap with the evaluation files; blocks are looked up as a whole."""

    name = "decontaminate"

    def __init__(self, config: DecontaminateConfig):
        self.config, self.index = config, None

    def run(self, block: list[Document]) -> tuple[list[Document], list[Dropped]]:
        if self.index is None:  # in the process that runs it
            self.index = EvaluationIndex(self.config)
        hits = self.index.hits([document.text for document in block])
        kept, dropped = [], []
        for document, count in zip(block, hits.tolist(), strict=True):
            if count >= self.config.min_hits:
                detail = f"{count} n-grams of {self.config.ngram_words} words stand in the evaluation files"
                dropped.append(Dropped(document, "contaminated", detail))
            else:
                kept.append(document)
        return kept, dropped
