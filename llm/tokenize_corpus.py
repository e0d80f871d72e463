"""Script: documents to token files, over processes, resumable after a kill.

    python -m llm.tokenize_corpus corpus=data/x/corpus tokenizer=data/x/tokenizer output=data/x/tokens num_processes=2

Writes output/<source>/ for each source found, in the format of llm/token_files.py. A document goes to train or val by
a hash of its source and id; shards do not depend on num_processes. Special tokens written in a document stay text.
"""

import hashlib
import heapq
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import hydra
import numpy as np
from omegaconf import DictConfig
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from configs.errors import UserError, check_choice, check_positive
from configs.loader import CONFIG_DIR, run_script, start_script
from data_processing.document import Document, expand_paths, read_documents
from llm.bpe_tokenizer import Tokenizer
from llm.bpe_tokenizer_pool import ordered_map
from llm.token_files import TokenMeta, token_dtype
from llm.tokenize_corpus_shards import ShardWriter, remove_token_files

BATCH_CHARS = 1 << 20
SCORES = 1 << 64


@dataclass
class TokenizeCorpusConfig:
    """configs/tokenize_corpus.yaml."""

    corpus: str
    tokenizer: str
    output: str
    overwrite: bool = False
    val_fraction: float = 0.01
    val_documents: int = 0
    shard_tokens: int = 100_000_000
    num_processes: int = 1
    errors: str = "strict"
    save_every_s: float = 5.0

    def __post_init__(self) -> None:
        check_positive(shard_tokens=self.shard_tokens, num_processes=self.num_processes)
        check_choice("errors", self.errors, ("strict", "replace"))
        if not 0 <= self.val_fraction < 1:
            raise UserError(f"val_fraction={self.val_fraction} must be from 0 to below 1; use e.g. 0.01")
        if self.val_documents < 0 or self.save_every_s < 0:
            raise UserError(
                f"val_documents={self.val_documents} and save_every_s={self.save_every_s} must not be negative; use 0"
            )


@dataclass(slots=True)
class TokenizedDocument:
    """A document on its way from a worker to the shards; `score` draws its split, ids end with the eot id."""

    source: str
    score: int
    utf8_bytes: int
    special_names: int
    ids: np.ndarray


def split_score(source: str, document_id: str) -> int:
    """A number in 0..2^64 - 1 that only depends on what the document is called."""
    digest = hashlib.blake2b(f"{source}\0{document_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


class TokenizeWorker:
    """Turns batches of documents into TokenizedDocuments, here or in a worker process."""

    def __init__(self, content: bytes):
        self.content = content
        self.tokenizer: Tokenizer | None = None

    def __call__(self, documents: list[Document]) -> list[TokenizedDocument]:
        if self.tokenizer is None:
            self.tokenizer = Tokenizer(self.content)
        tokenizer = self.tokenizer
        dtype, eot = token_dtype(tokenizer.vocab_size), [tokenizer.eot_id]
        names = list(tokenizer.special_tokens)
        results = []
        for document, ids in zip(
            documents, tokenizer.encode_group([document.text for document in documents]), strict=True
        ):
            found = sum(document.text.count(name) for name in names)
            score, size = split_score(document.source, document.id), len(document.text.encode("utf-8"))
            tokens = np.concatenate([ids, eot]).astype(dtype)
            results.append(TokenizedDocument(document.source, score, size, found, tokens))
        return results


def group_documents(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in lists of about BATCH_CHARS characters."""
    group, size = [], 0
    for document in documents:
        group.append(document)
        size += len(document.text)
        if size >= BATCH_CHARS:
            yield group
            group, size = [], 0
    if group:
        yield group


def find_limits(config: TokenizeCorpusConfig, paths: list[Path]) -> dict[str, int]:
    """Per source, the score below which a document is for validation."""
    limits: dict[str, int] = defaultdict(lambda: int(config.val_fraction * SCORES))
    if config.val_documents:
        scores = defaultdict(list)  # per source the lowest scores, negated in a heap
        for document in read_documents(paths, config.errors):
            lowest, score = scores[document.source], split_score(document.source, document.id)
            push = heapq.heappush if len(lowest) < config.val_documents else heapq.heappushpop
            push(lowest, -score)
        limits.update({source: 1 - lowest[0] for source, lowest in scores.items()})
    return limits


def identify(config: TokenizeCorpusConfig, paths: list[Path], tokenizer: Tokenizer) -> dict:
    """What the shards follow from; a run goes on only where it is the same."""
    files = [[path.name, path.stat().st_size] for path in paths]
    return {
        "tokenizer_sha256": tokenizer.sha256,
        "corpus": hashlib.sha256(repr(files).encode()).hexdigest(),
        "val_fraction": config.val_fraction,
        "val_documents": config.val_documents,
        "shard_tokens": config.shard_tokens,
        "errors": config.errors,
    }


def write_shards(config: TokenizeCorpusConfig, paths: list[Path], tokenizer: Tokenizer, writer: ShardWriter) -> Counter:
    """Tokenise the documents that `writer` does not hold yet; returns what was counted in this run."""
    counts, limits = Counter(), find_limits(config, paths)
    documents = islice(read_documents(paths, config.errors, counts), writer.documents, None)
    sizes = None if any(path.suffix != ".jsonl" for path in paths) else sum(path.stat().st_size for path in paths)
    saved = time.monotonic()
    columns = TextColumn("tokenising"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn()
    with Progress(*columns) as progress:
        task = progress.add_task("", total=sizes, note="")
        worker = TokenizeWorker(tokenizer.content)
        for batch in ordered_map(worker, group_documents(documents), config.num_processes):
            for document in batch:
                split = "val" if document.score < limits[document.source] else "train"
                writer.append(document.source, split, document.ids, document.utf8_bytes)
                counts.update(utf8_bytes=document.utf8_bytes, special_names=document.special_names)
            writer.documents += len(batch)
            if time.monotonic() - saved >= config.save_every_s:
                writer.save()
                saved = time.monotonic()
            note = f"{writer.documents} documents, {counts['utf8_bytes'] / 1e6:.1f} MB"
            progress.update(task, completed=counts["utf8_bytes"], note=note)
        progress.update(task, total=1, completed=1)
    return counts


def body(config: TokenizeCorpusConfig) -> dict[str, TokenMeta]:
    """Tokenise the corpus and report; returns each source's meta."""
    paths, tokenizer = expand_paths(config.corpus), Tokenizer.load(config.tokenizer)
    if config.overwrite:
        remove_token_files(config.output)
    identity = identify(config, paths, tokenizer)
    writer = ShardWriter(config.output, identity, tokenizer.vocab_size, tokenizer.eot_id, config.shard_tokens)
    if writer.done:
        print(f"{config.output} is complete already; overwrite=true makes it anew")
    counts = Counter() if writer.done else write_shards(config, paths, tokenizer, writer)
    if not writer.documents:
        raise UserError(f"the corpus is empty: corpus={config.corpus} holds no document; check the path")
    metas = writer.finish()
    report(metas, counts, tokenizer)
    return metas


def report(metas: dict[str, TokenMeta], counts: Counter, tokenizer: Tokenizer) -> None:
    """One line a source, and what was out of the ordinary."""
    for source, meta in metas.items():
        train, val = meta.tokens("train"), meta.tokens("val")
        size = meta.utf8_bytes("train") + meta.utf8_bytes("val")
        print(f"{source}: {train} train and {val} val tokens, {size / max(1, train + val):.2f} bytes a token")
        if not val:
            print(f"warning: source {source} has no validation document; raise val_fraction or set val_documents")
    if counts["special_names"]:
        print(f"note: {counts['special_names']} names such as {tokenizer.eot} stand in documents and stay text")
    if counts["replaced_characters"]:
        print(f"warning: {counts['replaced_characters']} characters were not UTF-8 and became U+FFFD")


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="tokenize_corpus")
def main(config: DictConfig) -> None:
    run_script(body, TokenizeCorpusConfig, config)


if __name__ == "__main__":
    start_script(main, TokenizeCorpusConfig, "tokenize_corpus")
