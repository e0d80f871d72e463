"""The documents of a crawl on disk, appended as they come and cut back to the last commit after a kill.

    output/_documents_00000.jsonl   the shard being written; readers pass over names that begin with "_"
    output/documents_00000.jsonl    a shard that is full, or the last one when the crawl ends

A commit belongs to crawl_state's database: it holds (shard, bytes), and whatever lies beyond was never committed.
"""

import os
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from configs.errors import UserError
from configs.run_dir import sync_directory
from data_processing.document import SURROGATE, Document, document_to_json

FIELDS = [field.name for field in fields(Document)]


def replace_surrogates(value: Any) -> Any:
    """A JSON value whose strings have U+FFFD for lone surrogates, which APIs escape and UTF-8 cannot hold."""
    if isinstance(value, str):
        return SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [replace_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {replace_surrogates(name): replace_surrogates(item) for name, item in value.items()}
    return value


class DocumentLog:
    """Appends documents to shards of about `shard_bytes`; `position` is what the database must remember."""

    def __init__(self, output: Path, shard_bytes: int):
        self.output, self.shard_bytes = output, shard_bytes
        self.position = (0, 0)  # (shard, bytes in it)
        self._file = None

    def _partial(self, shard: int) -> Path:
        return self.output / f"_documents_{shard:05d}.jsonl"

    def _whole(self, shard: int) -> Path:
        return self.output / f"documents_{shard:05d}.jsonl"

    def open(self, shard: int, size: int) -> None:
        """Go on at a committed position; what a killed run wrote beyond it is cut off.

        Raises UserError when the shard is shorter than what was committed.
        """
        if self._whole(shard).exists():  # renamed after the last commit, which therefore held all of it
            shard, size = shard + 1, 0
        self.output.mkdir(parents=True, exist_ok=True)
        path = self._partial(shard)
        self._file = open(path, "ab")
        found = path.stat().st_size
        if found < size:
            self._file.close()
            raise UserError(f"{path} holds {found} bytes, {size} were written; set overwrite=true to crawl anew")
        self._file.truncate(size)
        self.position = (shard, size)

    def append(self, documents: Iterable[Document]) -> int:
        """Write documents through to the disk and return how many; they count once the new position is committed."""
        (shard, size), number = self.position, 0
        for document in documents:
            number += 1
            line = document_to_json(Document(**{name: replace_surrogates(getattr(document, name)) for name in FIELDS}))
            self._file.write(line)
            size += len(line)
        if number:
            self._file.flush()
            os.fsync(self._file.fileno())
        self.position = (shard, size)
        return number

    def roll(self, force: bool = False) -> bool:
        """Finish the shard when it is full (or, with `force`, holds anything): to be called right after a commit."""
        shard, size = self.position
        if size < (1 if force else self.shard_bytes):
            return False
        self._file.close()
        os.replace(self._partial(shard), self._whole(shard))
        sync_directory(self.output)
        self.open(shard + 1, 0)
        return True

    def close(self) -> None:
        """Close the file and remove an empty shard."""
        if self._file is not None:
            self._file.close()
            shard, size = self.position
            if size == 0:
                self._partial(shard).unlink(missing_ok=True)
            self._file = None

    def clear(self) -> None:
        """Remove all shards."""
        for pattern in ("documents_*.jsonl", "_documents_*.jsonl"):
            for path in self.output.glob(pattern):
                path.unlink()
