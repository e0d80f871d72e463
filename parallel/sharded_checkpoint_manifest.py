"""Which checkpoints there are and which are whole: manifest.json holds the size and sha256 of every other file.

Each rank hashes what it wrote; on resume the files are shared out by size, each is hashed by one rank, and all agree.
"""

import hashlib
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from configs.errors import UserError
from configs.run_dir import is_plain_file_name, read_json
from parallel.mesh import Mesh
from parallel.sharded_checkpoint_agree import broadcast_numbers, first_reason, rank_of

REQUIRED_FILES = ("index.json", "state.json")
HASH_THREADS = 4
Manifest = dict[str, dict[str, Any]]


def manifest_of(files: list[Path]) -> Manifest:
    """Size and sha256 of some files, by name."""
    hashes = sha256_of_files(files)
    return {p.name: {"bytes": p.stat().st_size, "sha256": digest} for p, digest in zip(files, hashes, strict=True)}


def sha256_of_files(files: list[Path]) -> list[str]:
    """Hashes on a few threads: hashlib works outside the interpreter's lock."""

    def sha256(path: Path) -> str:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(HASH_THREADS) as pool:
        return list(pool.map(sha256, files))


def damage(path: Path, mesh: Mesh | None = None) -> str | None:
    """What is wrong with a checkpoint directory by its manifest, or None; every rank gets the same answer."""
    return first_reason(mesh, damage_of_share(path, *rank_of(mesh)))


def damage_of_share(path: Path, rank: int, world_size: int) -> str | None:
    """As far as this rank looks: all names and sizes, and the hashes of its share of the files."""
    try:
        manifest = read_json(path / "manifest.json")
        absent = [name for name in REQUIRED_FILES if name not in manifest]
        if absent:
            return f"manifest.json does not name {absent[0]}"
        for name, entry in manifest.items():
            file = path / name
            if not is_plain_file_name(name) or not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != entry["bytes"]:
                return f"{name} has {file.stat().st_size} bytes, not {entry['bytes']}"
        share = share_of_files(manifest, rank, world_size)
        hashes = sha256_of_files([path / name for name in share])
    except (UserError, OSError, AttributeError, KeyError, TypeError) as error:
        return f"manifest.json: {error}"
    wrong = [name for name, found in zip(share, hashes, strict=True) if found != manifest[name]["sha256"]]
    return f"{wrong[0]} has another sha256 than when it was saved" if wrong else None


def share_of_files(manifest: Manifest, rank: int, world_size: int) -> list[str]:
    """The files that one rank hashes: the largest first, each to the rank with least so far."""
    loads, share = [0] * world_size, []
    for name in sorted(manifest, key=lambda name: (-manifest[name]["bytes"], name)):
        chosen = loads.index(min(loads))
        loads[chosen] += manifest[name]["bytes"]
        if chosen == rank:
            share.append(name)
    return share


def find_checkpoint(directory: str | Path, mesh: Mesh | None = None) -> Path | None:
    """The newest whole checkpoint, verified by size and sha256; damaged ones are named on stderr and passed over.

    All ranks of the mesh call it, share the hashing and get the same answer. None when there is no checkpoint at all;
    UserError when there are some and none is whole.
    """
    directory = Path(directory)
    steps = broadcast_numbers(mesh, [step_of(path) for path in list_checkpoints(directory)])
    for path in [step_path(directory, step) for step in reversed(steps)]:
        reason = damage(path, mesh)
        if not reason:
            return path
        if rank_of(mesh)[0] == 0:
            print(f"warning: checkpoint {path} is damaged ({reason}); trying the one before it", file=sys.stderr)
    if steps:
        raise UserError(f"{directory} has {len(steps)} checkpoints and none is whole; use resume=none and another name")
    return None


def list_checkpoints(directory: Path) -> list[Path]:
    """Every step directory, by rising step, whole or not."""
    found = [path for path in directory.glob("step_*") if path.is_dir() and path.name[5:].isdecimal()]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def step_path(directory: Path, step: int) -> Path:
    return directory / f"step_{step:08d}"


def remove_older(directory: Path, step: int, keep_last: int) -> None:
    """Delete all but the last `keep_last` checkpoints up to `step`, which is whole.

    A checkpoint of a later step is a damaged one that the run was resumed before: it does not count, else it could push
    out the whole ones. It is replaced when the run gets there.
    """
    for path in [path for path in list_checkpoints(directory) if step_of(path) <= step][:-keep_last]:
        remove(path)


def remove(path: Path) -> None:
    """Delete a checkpoint; renamed first, so that a kill in between leaves no half of one under its name."""
    if path.exists():
        doomed = path.with_name(f".{path.name}.{os.getpid()}.removed.partial")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        shutil.rmtree(doomed)


def remove_leftovers(directory: Path) -> None:
    """Delete what killed saves left behind."""
    for path in directory.glob(".step_*.partial"):
        shutil.rmtree(path)
