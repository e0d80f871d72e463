"""What runs in the workers: a block through the stages that need no memory, and a block's file to its signatures.

A task carries the settings as JSON; each process makes its stages, and loads their models, once.
"""

import json
from collections import Counter
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from configs.loader import load_config
from data_processing.build_corpus_config import ALONE, BuildCorpusConfig, build_stage, chosen
from data_processing.build_corpus_stats import new_record, run_stages
from data_processing.document import Document, read_documents
from data_processing.minhash import signatures
from data_processing.raw_document import text_bytes
from data_processing.shingles import shingle_sets
from data_processing.stage import Stage

BlockResult = tuple[dict[str, Any], list[Document], list[Document]]


def settings_text(config: BuildCorpusConfig) -> str:
    """The settings as a task carries them."""
    return json.dumps(asdict(config), sort_keys=True)


@lru_cache(maxsize=1)
def _stages(settings: str) -> tuple[BuildCorpusConfig, list[Stage]]:
    config = load_config(BuildCorpusConfig, json.loads(settings))
    return config, [build_stage(name, config) for name in chosen(config, ALONE)]


def process_block(settings: str, block: list[Document]) -> BlockResult:
    """(record, kept, dropped) of a block after the stages that look at documents alone."""
    config, stages = _stages(settings)
    record = new_record(block)
    kept, dropped = run_stages(record, block, stages, config.examples_per_reason)
    return record, kept, dropped


def sign_file(task: tuple[str, int, int]) -> dict[str, Any]:
    """Signatures (N, P), lengths (N,) in bytes and the bytes by source of a file's documents; task: path, P, words."""
    path, num_permutations, shingle_words = task
    documents = list(read_documents([Path(path)]))
    sources: Counter = Counter()
    for document in documents:
        sources[document.source] += text_bytes(document)
    return {
        "signatures": signatures([d.text for d in documents], num_permutations, shingle_words),
        "lengths": np.array([len(d.text) for d in documents], dtype=np.int64),
        "sources": dict(sources),
    }


def shingle_file(task: tuple[str, int, np.ndarray]) -> list[np.ndarray]:
    """Sorted shingle hashes of a file's documents at the given places; task: path, words, places (n,)."""
    path, shingle_words, places = task
    wanted = set(places.tolist())
    texts = [d.text for place, d in enumerate(read_documents([Path(path)])) if place in wanted]
    return shingle_sets(texts, shingle_words)
