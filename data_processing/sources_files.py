"""Input files as every file source sees them: identity, size, names fit for ids, and no file twice.

Equal files are found before anything is parsed, by a cascade in which each step looks only at what the one before could
not tell apart: size, a hash of the first kilobyte, a hash of the whole file.
"""

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

HEAD_BYTES, CHUNK_BYTES = 1024, 1 << 20


def describe_files(files: list[Path]) -> dict[str, Any]:
    """The identity of input files: name and size in bytes."""
    return {"files": [[str(path), path.stat().st_size] for path in files]}


def plain_bytes(files: list[Path]) -> int | None:
    """The files' size in bytes, None when one is compressed."""
    packed = any(path.suffix in (".gz", ".zst") for path in files)
    return None if packed else sum(path.stat().st_size for path in files)


def relative_names(files: list[Path]) -> list[str]:
    """Names below the files' common folder, fit for an id: distinct, without this machine's folders, valid UTF-8."""
    common = os.path.commonpath([path.parent.absolute() for path in files])
    names = [path.absolute().relative_to(common).as_posix() for path in files]
    return [name.encode("utf-8", errors="backslashreplace").decode("utf-8") for name in names]


def _file_size(path: Path) -> int:
    return path.stat().st_size


def _head_hash(path: Path) -> bytes:
    with open(path, "rb") as file:
        return hashlib.blake2b(file.read(HEAD_BYTES), digest_size=16).digest()


def _full_hash(path: Path) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.digest()


def _alike(files: list[Path], key: Callable[[Path], Hashable]) -> list[list[Path]]:
    """The groups of two and more files that `key` cannot tell apart."""
    groups: dict[Hashable, list[Path]] = defaultdict(list)
    for path in files:
        groups[key(path)].append(path)
    return [group for group in groups.values() if len(group) > 1]


def duplicate_files(files: list[Path]) -> dict[Path, Path]:
    """{a file that repeats an earlier one's bytes: that earlier file}; empty files are no duplicates."""
    groups = _alike([path for path in files if _file_size(path)], _file_size)
    for key in (_head_hash, _full_hash):
        groups = [alike for group in groups for alike in _alike(group, key)]
    return {path: group[0] for group in groups for path in group[1:]}
