"""Checkpoints that are whole or not there, written by all ranks together and loadable under any layout.

`step_00000100/` holds safetensors files of each rank, index.json (each tensor's full shape and the pieces it lies in),
state.json, what else the caller adds, and manifest.json (size and sha256 of every other file). It is written beside its
place, synced, and renamed when all ranks have written; a kill at any moment leaves the checkpoint before it. One rank
is the case without messages, not another path. All ranks must see the directory on one file system.
"""

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.errors import UserError
from configs.run_dir import read_json, sync_directory, write_json_atomic
from parallel.mesh import Mesh
from parallel.sharded_checkpoint_agree import SharedFault, broadcast_numbers, rank_of, together
from parallel.sharded_checkpoint_files import CheckpointReader, Index, merge_indexes, write_boxes
from parallel.sharded_checkpoint_manifest import (
    Manifest,
    damage,
    manifest_of,
    remove,
    remove_leftovers,
    remove_older,
    step_path,
)
from parallel.sharded_checkpoint_pieces import Piece, boxes_of, pieces_to_write

FORMAT = "mew-checkpoint-1"


@dataclass
class Save:
    """What rank 0 adds to the tensors: state.json's content, further files, and how many checkpoints stay."""

    state: dict[str, Any]
    write_extras: Callable[[Path], None] | None = None  # puts further synced files into the directory
    keep_last: int | None = None


def save_pieces(
    directory: str | Path, step: int, pieces: Iterable[Piece], save: Save, mesh: Mesh | None = None
) -> Path:
    """Write checkpoints/step_<step>/ from every rank's pieces and return it; all ranks of the mesh call it.

    Older checkpoints beyond `keep_last` go once it is in place. Raises UserError on every rank when one could not write
    (a full disk): the partial directory is removed, the older checkpoints stay.
    """
    directory = Path(directory)
    target, partial = step_path(directory, step), directory / f".step_{step:08d}.partial"
    if broadcast_numbers(mesh, [target.exists()])[0] and not damage(target, mesh):
        return target  # the same step of the same run: a resumed run that was stopped before its first step
    state = {"step": step} | save.state
    try:
        together(mesh, on_rank_0, mesh, make_partial, partial)
        own = together(mesh, write_part, partial, pieces, rank_of(mesh)[0])
        together(mesh, on_rank_0, mesh, publish, partial, target, own, rank_of(mesh)[1], replace(save, state=state))
    except SharedFault as error:
        if rank_of(mesh)[0] == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"checkpoint {target} could not be written ({error}); if the disk is full, free disk space or point "
            f"runs_dir at another disk, then run the same command: older checkpoints are kept"
        ) from error
    if save.keep_last is not None:
        together(mesh, on_rank_0, mesh, remove_older, directory, step, save.keep_last)
    return target


def on_rank_0(mesh: Mesh | None, body: Callable[..., None], *arguments: object) -> None:
    if rank_of(mesh)[0] == 0:
        body(*arguments)


def make_partial(partial: Path) -> None:
    partial.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(partial.parent)
    partial.mkdir()


def write_part(partial: Path, pieces: Iterable[Piece], rank: int) -> tuple[Index, Manifest]:
    """This rank's files, synced; ranks other than 0 leave what they wrote in a file of its own for rank 0."""
    boxes = [box for piece in pieces_to_write(pieces) for box in boxes_of(piece)]
    index = write_boxes(partial, boxes, rank)
    names = {piece["file"] for entry in index.values() for piece in entry["pieces"]}
    manifest = manifest_of([partial / name for name in sorted(names)])
    if rank:
        write_json_atomic(part_path(partial, rank), {"index": index, "manifest": manifest})
    return index, manifest


def part_path(partial: Path, rank: int) -> Path:
    return partial / f".rank_{rank:05d}.json"


def publish(partial: Path, target: Path, own: tuple[Index, Manifest], world_size: int, save: Save) -> None:
    """Rank 0, when all have written: the common index, the state, the manifest, and the rename."""
    indexes, manifest = [own[0]], dict(own[1])
    for rank in range(1, world_size):
        part = read_json(part_path(partial, rank))
        indexes.append(part["index"])
        manifest |= part["manifest"]
        part_path(partial, rank).unlink()
    write_json_atomic(partial / "index.json", {"format": FORMAT, "tensors": merge_indexes(indexes)})
    write_json_atomic(partial / "state.json", save.state)
    if save.write_extras is not None:
        save.write_extras(partial)
    others = [path for path in sorted(partial.iterdir()) if path.name not in manifest]
    write_json_atomic(partial / "manifest.json", manifest | manifest_of(others))
    remove(target)
    os.rename(partial, target)
    sync_directory(target.parent)


def open_checkpoint(path: str | Path, prefix: str = "") -> tuple[CheckpointReader, dict[str, Any]]:
    """A reader of the tensors whose name begins with `prefix`, and state.json; nothing is verified but the index.

    Raises UserError for a foreign or broken index.
    """
    path = Path(path)
    index = read_json(path / "index.json")
    if not isinstance(index, dict) or index.get("format") != FORMAT or not isinstance(index.get("tensors"), dict):
        raise UserError(f"{path}/index.json is not of format {FORMAT!r}; use a checkpoint that llm.training saved")
    wanted = {name: entry for name, entry in index["tensors"].items() if name.startswith(prefix)}
    return CheckpointReader(path, wanted), read_json(path / "state.json")


def load_pieces(reader: CheckpointReader, pieces: Iterable[Piece]) -> None:
    """Fill every piece's memory from a checkpoint of any layout; UserError for one that is missing or misshapen."""
    for piece in pieces:
        if piece.name not in reader.index:
            raise UserError(f"{reader.directory} holds no tensor {piece.name}; use a checkpoint of the same model")
        if reader.shape(piece.name) != piece.shape:
            raise UserError(
                f"{reader.directory} holds {piece.name} of shape {list(reader.shape(piece.name))}, "
                f"the model has {list(piece.shape)}; use the model config that it was trained with"
            )
        for box in boxes_of(piece):
            reader.fill(box)
