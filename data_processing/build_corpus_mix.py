"""The mix step of build_corpus: files of documents to a shuffled corpus with each source's share, in bounded memory."""

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from data_processing.document import Document, document_to_json, read_documents
from data_processing.mix import CopyCounter, MixConfig, Shuffler, SourceShare
from data_processing.raw_document import text_bytes
from data_processing.stage import Dropped

FLUSH_BYTES = 1 << 20  # written to the buckets at once, of all of them together
MAX_BUCKETS = 4096


class Buckets:
    """Append-only JSONL files in a folder of their own."""

    def __init__(self, folder: Path, count: int):
        self.folder, self.count = folder, count
        shutil.rmtree(folder, ignore_errors=True)  # what a killed run left
        folder.mkdir(parents=True)
        self.waiting: dict[int, list[bytes]] = {}
        self.size = 0

    def path(self, bucket: int) -> Path:
        return self.folder / f"bucket_{bucket:05d}.jsonl"

    def add(self, bucket: int, document: Document) -> None:
        line = document_to_json(document)
        self.waiting.setdefault(bucket, []).append(line)
        self.size += len(line)
        if self.size >= FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        for bucket, lines in self.waiting.items():
            with open(self.path(bucket), "ab") as file:
                file.writelines(lines)
        self.waiting, self.size = {}, 0

    def read(self, bucket: int) -> list[Document]:
        return list(read_documents([self.path(bucket)])) if self.path(bucket).exists() else []


class MixStep:
    """Deals the documents of files out to buckets, then gives each bucket as a shuffled block."""

    def __init__(self, config: MixConfig, shares: dict[str, SourceShare], block_bytes: int, work: Path):
        self.config, self.counter, self.counts = config, CopyCounter(shares), Counter()
        planned = sum(share.epochs * share.available_tokens for share in shares.values())
        available = sum(share.available_tokens for share in shares.values())
        self.growth = planned / max(available, 1)
        self.block_bytes, self.work = block_bytes, work

    def deal(
        self, files: list[Path], total_bytes: int
    ) -> Iterator[tuple[list[Document], list[Document], list[Dropped]]]:
        """Per file (all documents, those that come at least once, those that do not); fills the buckets."""
        count = min(max(round(self.growth * total_bytes / self.block_bytes), 1), MAX_BUCKETS)
        self.buckets, self.shuffler = Buckets(self.work / "mix", count), Shuffler(self.config, count)
        seen = 0
        for file in files:
            documents, kept, dropped = list(read_documents([file])), [], []
            for document in documents:
                seen += text_bytes(document)
                copies = self.counter.copies(document.source, text_bytes(document))
                if not copies:
                    share = self.counter.shares[document.source]
                    dropped.append(Dropped(document, "not_sampled", f"its source comes {share.epochs:.3f} times"))
                    continue
                kept.append(document)
                self.counts["repeated_documents"] += copies - 1
                for copy in range(copies):
                    name = f"{document.id}#{copy + 1}" if copy else document.id
                    self.buckets.add(self.shuffler.bucket(seen / max(total_bytes, 1)), replace(document, id=name))
            yield documents, kept, dropped
        self.buckets.flush()

    def blocks(self) -> Iterator[tuple[int, list[Document]]]:
        """(bucket, its documents in their new order), for the buckets that hold some."""
        for bucket in range(self.buckets.count):
            documents = self.buckets.read(bucket)
            if documents:
                yield bucket, [documents[place] for place in self.shuffler.order(bucket, len(documents))]
