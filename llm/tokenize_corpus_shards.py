"""Writes token files so that a kill at any moment loses and doubles nothing.

Tokens and document offsets are appended to hidden part files, a real .npy header in front, and renamed when the shard
is full. `.progress.json` says how many documents of the corpus are in, and how long each open part file was then;
it is written after those files are synced. A later run cuts the part files back to that length and goes on from that
document. What the shards hold depends on the order of documents alone, not on when progress was saved.
"""

import hashlib
import io
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from configs.errors import UserError
from configs.run_dir import read_json, sync_directory, write_json_atomic
from llm.token_files import META_FILE, ShardMeta, TokenMeta, token_dtype, write_meta

PROGRESS_FILE = ".progress.json"
HEADER_BYTES = 128  # NumPy pads the header of a flat array to this, leaving room for any length


def source_directory(source: str) -> str:
    """A directory name for a source: itself when it is plain, else what is plain of it and a hash."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", source).strip("._-")[:64]
    if plain == source:
        return plain
    return f"{plain or 'source'}-{hashlib.sha256(source.encode('utf-8')).hexdigest()[:8]}"


def npy_header(dtype: np.dtype, length: int) -> bytes:
    """The 128 bytes in front of a flat array's data in a .npy file."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        buffer, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (length,)}
    )
    assert buffer.tell() == HEADER_BYTES, f"a .npy header of {buffer.tell()} bytes, expected {HEADER_BYTES}"
    return buffer.getvalue()


class NpyAppender:
    """A .npy file that grows: data goes to a hidden part file, `close` writes the header and renames it."""

    def __init__(self, path: Path, dtype: np.dtype, length: int):
        """Open to append behind `length` elements that an earlier run is known to have written."""
        self.path, self.dtype, self.length = path, dtype, length
        self.part = path.with_name(f".{path.name}.part")
        if length and not self.part.exists() and path.exists():
            os.replace(path, self.part)  # renamed after progress was last saved
        self.file = open(self.part, "r+b" if length else "wb")
        wanted = HEADER_BYTES + length * dtype.itemsize
        if length and os.path.getsize(self.part) < wanted:
            raise UserError(f"{self.part} is shorter than progress says; run again with overwrite=true")
        self.file.truncate(wanted)
        self.file.seek(wanted)

    def append(self, values: np.ndarray) -> None:
        self.file.write(np.ascontiguousarray(values, dtype=self.dtype).data)
        self.length += len(values)

    def sync(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.seek(0)
        self.file.write(npy_header(self.dtype, self.length))
        self.sync()
        self.file.close()
        os.replace(self.part, self.path)
        sync_directory(self.path.parent)


class OpenShard:
    """The shard that a split of a source is being written to."""

    def __init__(self, directory: Path, meta: ShardMeta, dtype: np.dtype):
        self.meta = meta
        self.tokens = NpyAppender(directory / meta.file, dtype, meta.tokens)
        self.offsets = NpyAppender(
            directory / meta.offsets_file, np.dtype(np.int64), meta.documents + 1 if meta.documents else 0
        )
        if not meta.documents:
            self.offsets.append(np.zeros(1, dtype=np.int64))

    def append(self, ids: np.ndarray, utf8_bytes: int) -> None:
        self.tokens.append(ids)
        self.meta.tokens += len(ids)
        self.meta.documents += 1
        self.meta.utf8_bytes += utf8_bytes
        self.offsets.append(np.array([self.meta.tokens], dtype=np.int64))

    def sync(self) -> None:
        self.tokens.sync()
        self.offsets.sync()

    def close(self) -> None:
        self.tokens.close()
        self.offsets.close()


@dataclass
class Split:
    """One split of one source: its finished shards and the open one."""

    source: str
    split: str
    shards: list[ShardMeta] = field(default_factory=list)
    open: OpenShard | None = None


class ShardWriter:
    """All token files of one output directory; `documents` counts those of the corpus that are in (or skipped)."""

    def __init__(self, output: str | Path, identity: dict[str, Any], vocab_size: int, eot_id: int, shard_tokens: int):
        self.output, self.identity, self.shard_tokens = Path(output), identity, shard_tokens
        self.vocab_size, self.eot_id, self.dtype = vocab_size, eot_id, token_dtype(vocab_size)
        self.documents = 0
        self.done = False
        self.splits: dict[tuple[str, str], Split] = {}
        self._restore()

    def append(self, source: str, split: str, ids: np.ndarray, utf8_bytes: int) -> None:
        """Add one document's tokens, its end-of-text id among them."""
        state = self.splits.setdefault((source, split), Split(source, split))
        if state.open is None:
            name = f"{split}_{len(state.shards):05d}"
            state.open = self._open(source, ShardMeta(f"{name}.npy", f"{name}.offsets.npy", split, 0, 0, 0))
        state.open.append(ids, utf8_bytes)
        if state.open.meta.tokens >= self.shard_tokens:
            self._close(state)

    def save(self) -> None:
        """Make what is written so far survive a kill."""
        for state in self.splits.values():
            if state.open:
                state.open.sync()
        splits = [
            {
                "source": state.source,
                "split": state.split,
                "shards": [asdict(shard) for shard in state.shards],
                "open": asdict(state.open.meta) if state.open else None,
            }
            for state in self.splits.values()
        ]
        progress = {"done": self.done, "documents": self.documents, "identity": self.identity, "splits": splits}
        write_json_atomic(self.output / PROGRESS_FILE, progress)

    def finish(self) -> dict[str, TokenMeta]:
        """Close the open shards and write every source's meta.json; returns them by source."""
        for state in self.splits.values():
            if state.open:
                self._close(state)
        metas = {}
        for source in sorted({state.source for state in self.splits.values()}):
            shards = [s for split in ("train", "val") for s in self._shards(source, split)]
            meta = TokenMeta(
                source, self.identity["tokenizer_sha256"], self.vocab_size, self.eot_id, self.dtype.name, shards
            )
            write_meta(self.output / source_directory(source), meta)
            metas[source] = meta
        self.done = True
        self.save()
        return metas

    def _shards(self, source: str, split: str) -> list[ShardMeta]:
        state = self.splits.get((source, split))
        return state.shards if state else []

    def _open(self, source: str, meta: ShardMeta) -> OpenShard:
        directory = self.output / source_directory(source)
        directory.mkdir(parents=True, exist_ok=True)
        return OpenShard(directory, meta, self.dtype)

    def _close(self, state: Split) -> None:
        state.open.close()
        state.shards.append(state.open.meta)
        state.open = None

    def _restore(self) -> None:
        path = self.output / PROGRESS_FILE
        if not path.exists():
            if any(self.output.glob(f"*/{META_FILE}")):
                raise UserError(f"output={self.output} holds token files already; name another or set overwrite=true")
            return
        progress = read_json(path)
        if progress["identity"] != self.identity:
            changed = [key for key, value in self.identity.items() if progress["identity"].get(key) != value]
            raise UserError(
                f"output={self.output} holds token files made with another {', '.join(changed)};"
                " name another or set overwrite=true"
            )
        self.documents, self.done = progress["documents"], progress["done"]
        for value in progress["splits"]:
            shards = [ShardMeta(**shard) for shard in value["shards"]]
            opened = self._open(value["source"], ShardMeta(**value["open"])) if value["open"] else None
            self.splits[value["source"], value["split"]] = Split(value["source"], value["split"], shards, opened)


def remove_token_files(output: str | Path) -> None:
    """Delete what a ShardWriter has written below `output`, its progress last, and nothing else."""
    for pattern in (f"*/{META_FILE}", "*/train_*.npy", "*/val_*.npy", "*/.*.npy.part", PROGRESS_FILE):
        for path in Path(output).glob(pattern):
            path.unlink()
