"""Boxes of tensors to safetensors files, and any box back from them through the index.

index["model/x"] = {"shape": [8, 4], "dtype": "float32", "pieces": [{"file": ..., "key": ..., "offsets": [0, 0],
"shape": [8, 4]}]}: a piece covers full[offsets : offsets + shape], and the pieces of a tensor hold each of its elements
once. A reader takes from each file only what overlaps with the box that it wants, so a rank of any layout reads its
own part of the bytes.
"""

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from configs.errors import UserError
from configs.run_dir import is_plain_file_name
from parallel.sharded_checkpoint_pieces import Box

MAX_FILE_BYTES = 4 << 30
DTYPES = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
Index = dict[str, dict[str, Any]]


def write_boxes(directory: Path, boxes: Iterable[Box], rank: int) -> Index:
    """Write a rank's boxes to its own synced files, by the part of the name before "/"; returns its part of the index.

    Files are of at most 4 GiB: model_00003.safetensors, model_00003_1.safetensors, optimizer_00003.safetensors.
    """
    index: Index = {}
    for file_name, content in plan_files(boxes, rank):
        try:
            save_file({key_of(box): on_host(box.values) for box in content}, directory / file_name)
        except SafetensorError as error:  # its way of saying that the disk is full
            raise OSError(str(error)) from error
        with open(directory / file_name, "rb") as file:
            os.fsync(file.fileno())
        for box in content:
            dtype = str(box.values.dtype).removeprefix("torch.")
            entry = index.setdefault(box.name, {"shape": list(box.shape), "dtype": dtype, "pieces": []})
            piece = {"file": file_name, "key": key_of(box), "offsets": list(box.offsets)}
            entry["pieces"].append(piece | {"shape": list(box.values.shape)})
    return index


def plan_files(boxes: Iterable[Box], rank: int) -> list[tuple[str, list[Box]]]:
    """(file name, its boxes) in the order of the boxes, a new file where the last one would grow beyond 4 GiB."""
    files: dict[str, list[tuple[str, list[Box]]]] = {}
    filled: dict[str, int] = {}
    for box in boxes:
        kind, size = box.name.split("/")[0], box.values.numel() * box.values.element_size()
        if kind not in files or filled[kind] + size > MAX_FILE_BYTES:
            number = f"_{len(files[kind])}" if kind in files else ""
            files.setdefault(kind, []).append((f"{kind}_{rank:05d}{number}.safetensors", []))
            filled[kind] = 0
        filled[kind] += size
        files[kind][-1][1].append(box)
    return [file for kind in files.values() for file in kind]


def key_of(box: Box) -> str:
    """The tensor's name, and for a part of it where that part begins."""
    return box.name if box.values.shape == box.shape else f"{box.name}@{','.join(map(str, box.offsets))}"


def on_host(tensor: Tensor) -> Tensor:
    """A contiguous CPU tensor that shares its storage with no other: safetensors refuses those that do."""
    tensor = tensor.detach().cpu().contiguous()
    owns_all = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if owns_all else tensor.clone()


def merge_indexes(parts: Iterable[Index]) -> Index:
    """One index from those of the ranks; ValueError when they disagree or do not hold each element once."""
    merged: Index = {}
    for part in parts:
        for name, entry in part.items():
            known = merged.setdefault(name, {"shape": entry["shape"], "dtype": entry["dtype"], "pieces": []})
            for field in ("shape", "dtype"):
                if known[field] != entry[field]:
                    raise ValueError(f"{name} has {field} {known[field]} on one rank and {entry[field]} on another")
            known["pieces"] += entry["pieces"]
    for name, entry in merged.items():
        check_cover(name, entry)
    return merged


def check_cover(name: str, entry: dict[str, Any]) -> None:
    """ValueError unless the pieces of one entry lie inside the tensor and hold each of its elements exactly once."""
    shape, starts, lengths = tuple(entry["shape"]), [], []
    for piece in entry["pieces"]:
        where, size = tuple(piece["offsets"]), tuple(piece["shape"])
        fits = len(where) == len(size) == len(shape)
        if not fits or any(o < 0 or n < 0 or o + n > full for o, n, full in zip(where, size, shape, strict=True)):
            raise ValueError(f"the piece {list(size)} at {list(where)} of {name} leaves the shape {list(shape)}")
        run_starts, length = runs_of(shape, where, size)
        starts.append(run_starts)
        lengths.append(np.full(run_starts.shape, length))
    total = math.prod(shape)
    start, length = np.concatenate(starts or [np.zeros(0, int)]), np.concatenate(lengths or [np.zeros(0, int)])
    order = np.argsort(start, kind="stable")
    ends = np.maximum.accumulate(np.concatenate([[0], (start + length)[order]]))  # of all runs before
    missing = int(np.maximum(np.append(start[order], total) - ends, 0).sum())
    held = int(length.sum())
    if missing or held != total:
        raise ValueError(
            f"the {len(entry['pieces'])} pieces of {name} hold {held} elements of {total} and leave out {missing}; "
            f"each must be held once"
        )


def runs_of(shape: tuple[int, ...], offsets: tuple[int, ...], size: tuple[int, ...]) -> tuple[np.ndarray, int]:
    """First elements of the runs, contiguous in the full tensor, that make up a box, and the length of each."""
    inner = len(shape)  # dims from here on are whole, so they and the one before them lie in one run
    while inner and size[inner - 1] == shape[inner - 1]:
        inner -= 1
    split = max(inner - 1, 0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    starts = np.array([sum(o * s for o, s in zip(offsets, strides, strict=True))])
    for dim in range(split):
        starts = (starts[:, None] + np.arange(size[dim]) * strides[dim]).reshape(-1)
    return starts if math.prod(size) else starts[:0], math.prod(size[split:])


class CheckpointReader:
    """The tensors of one checkpoint directory, by name; files are opened when first wanted.

    Raises UserError for an index or file that does not hold together.
    """

    def __init__(self, directory: Path, index: Index):
        self.directory, self.index = directory, index
        self.files: dict[str, Any] = {}
        self.bytes_read = 0
        try:
            for name, entry in index.items():
                foreign = [piece["file"] for piece in entry["pieces"] if not is_plain_file_name(piece["file"])]
                if foreign:
                    raise ValueError(f"{foreign[0]!r} is not a plain file name")
                check_cover(name, entry)
                DTYPES[entry["dtype"]]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise self.fault(error) from error

    def fault(self, error: Exception) -> UserError:
        reason = f"{type(error).__name__} {error}" if isinstance(error, KeyError) else str(error)
        return UserError(f"{self.directory}: index.json and its files do not fit together ({reason}); use another")

    def names(self, prefix: str = "") -> list[str]:
        return [name for name in self.index if name.startswith(prefix)]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.index[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self.index[name]["dtype"]]

    def full(self, name: str) -> Tensor:
        """A whole tensor on the CPU; one that is stored in one piece may be a view of the mapped file."""
        entry, shape = self.index[name], self.shape(name)
        try:
            if len(entry["pieces"]) == 1:
                return self.stored(entry, entry["pieces"][0], None)
            tensor = torch.empty(shape, dtype=self.dtype(name))
        except (KeyError, TypeError, ValueError, RuntimeError, OSError, SafetensorError) as error:
            raise self.fault(error) from error
        self.fill(Box(name, shape, (0,) * len(shape), tensor))
        return tensor

    def fill(self, box: Box) -> None:
        """Copy the stored values into `box.values`, on any device and in any float dtype."""
        entry = self.index[box.name]
        assert tuple(entry["shape"]) == box.shape, f"{box.name}: {entry['shape']} stored, {box.shape} wanted"
        low, size = box.offsets, tuple(box.values.shape)
        try:
            for piece in entry["pieces"]:
                overlap = overlap_of(low, size, piece["offsets"], piece["shape"])
                if overlap is None:
                    continue
                inside = tuple(slice(a - o, b - o) for (a, b), o in zip(overlap, piece["offsets"], strict=True))
                here = tuple(slice(a - o, b - o) for (a, b), o in zip(overlap, low, strict=True))
                whole = all(b - a == n for (a, b), n in zip(overlap, piece["shape"], strict=True))
                box.values[here].copy_(self.stored(entry, piece, None if whole else inside))
        except (KeyError, TypeError, ValueError, RuntimeError, OSError, SafetensorError) as error:
            raise self.fault(error) from error

    def stored(self, entry: dict[str, Any], piece: dict[str, Any], part: tuple[slice, ...] | None) -> Tensor:
        """A stored piece, or the part of it that `part` names: nothing else of the file is read."""
        if piece["file"] not in self.files:
            self.files[piece["file"]] = safe_open(self.directory / piece["file"], framework="pt")
        file = self.files[piece["file"]]
        held = file.get_slice(piece["key"])
        tensor = file.get_tensor(piece["key"]) if part is None else held[part]
        if held.get_shape() != list(piece["shape"]) or tensor.dtype != DTYPES[entry["dtype"]]:
            raise ValueError(
                f"{piece['key']} in {piece['file']} is {tensor.dtype} {held.get_shape()}, "
                f"the index says {entry['dtype']} {piece['shape']}"
            )
        self.bytes_read += tensor.numel() * tensor.element_size()
        return tensor


def overlap_of(
    low: tuple[int, ...], size: tuple[int, ...], offsets: list[int], shape: list[int]
) -> list[tuple[int, int]] | None:
    """The [first, last) along each dim that two boxes share, None when they share nothing."""
    spans = []
    for a, n, b, m in zip(low, size, offsets, shape, strict=True):
        first, last = max(a, b), min(a + n, b + m)
        if first >= last:
            return None
        spans.append((first, last))
    return spans
