"""Tensors to safetensors files and back, through an index that says where each piece of a tensor lies.

index["model/x"] = {"shape": [8, 4], "dtype": "float32", "pieces": [{"file": ..., "key": ..., "offsets": [0, 0],
"shape": [8, 4]}]}: a piece covers full[offsets : offsets + shape]. One rank writes one piece a tensor; a sharded writer
writes several, and the reader puts any of them together.
"""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from configs.errors import UserError
from configs.run_dir import is_plain_file_name

MAX_FILE_BYTES = 4 << 30
DTYPES = {
    name: getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}


def write_tensors(directory: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Write tensors to files of at most 4 GiB, synced, by the part of their name before "/"; returns the index."""
    index: dict[str, Any] = {}
    for file_name, names in plan_files(tensors):
        save_file({name: on_host(tensors[name]) for name in names}, directory / file_name)
        with open(directory / file_name, "rb") as file:
            os.fsync(file.fileno())
        for name in names:
            shape = list(tensors[name].shape)
            piece = {"file": file_name, "key": name, "offsets": [0] * len(shape), "shape": shape}
            index[name] = {"shape": shape, "dtype": str(tensors[name].dtype).removeprefix("torch."), "pieces": [piece]}
    return index


def plan_files(tensors: dict[str, Tensor]) -> list[tuple[str, list[str]]]:
    """(file name, tensor names): model_00000.safetensors, optimizer_00000.safetensors and so on."""
    files: list[tuple[str, list[str]]] = []
    counts: dict[str, int] = {}
    filled: dict[str, int] = {}
    for name, tensor in tensors.items():
        kind, size = name.split("/")[0], tensor.numel() * tensor.element_size()
        if kind not in counts or filled[kind] + size > MAX_FILE_BYTES:
            counts[kind] = counts.get(kind, -1) + 1
            filled[kind] = 0
            files.append((f"{kind}_{counts[kind]:05d}.safetensors", []))
        filled[kind] += size
        next(names for file, names in reversed(files) if file.startswith(f"{kind}_")).append(name)
    return files


def on_host(tensor: Tensor) -> Tensor:
    """A contiguous CPU tensor that shares its storage with no other: safetensors refuses those that do."""
    tensor = tensor.detach().cpu().contiguous()
    owns_all = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if owns_all else tensor.clone()


def read_tensors(directory: Path, index: dict[str, Any]) -> dict[str, Tensor]:
    """Every tensor of an index in full shape; UserError for an index or file that does not hold together."""
    files: dict[str, Any] = {}
    try:
        for entry in index.values():
            for name in (piece["file"] for piece in entry["pieces"]):
                if not is_plain_file_name(name):
                    raise ValueError(f"{name!r} is not a plain file name")
                if name not in files:
                    files[name] = safe_open(directory / name, framework="pt")
        return {name: assemble(entry, files) for name, entry in index.items()}
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError, OSError, SafetensorError) as error:
        raise UserError(f"{directory}: index.json and its files do not fit together ({error}); use another") from error


def assemble(entry: dict[str, Any], files: dict[str, Any]) -> Tensor:
    """One tensor from its pieces."""
    shape, dtype, pieces = tuple(entry["shape"]), DTYPES[entry["dtype"]], entry["pieces"]
    if len(pieces) == 1 and tuple(pieces[0]["shape"]) == shape:
        return checked(files[pieces[0]["file"]].get_tensor(pieces[0]["key"]), shape, dtype)
    full = torch.empty(shape, dtype=dtype)
    missing = torch.ones(shape, dtype=torch.bool)
    covered = 0
    for piece in pieces:
        value = checked(files[piece["file"]].get_tensor(piece["key"]), tuple(piece["shape"]), dtype)
        for offset, length, size in zip(piece["offsets"], piece["shape"], shape, strict=True):
            if offset < 0 or offset + length > size:
                raise ValueError(f"piece {piece['key']} at {piece['offsets']} leaves the shape {list(shape)}")
        region = tuple(slice(o, o + n) for o, n in zip(piece["offsets"], piece["shape"], strict=True))
        full[region] = value
        missing[region] = False
        covered += value.numel()
    if missing.any() or covered != full.numel():
        raise ValueError(
            f"the {len(pieces)} pieces hold {covered} elements of {full.numel()} and leave out {int(missing.sum())}; "
            f"each must be held once"
        )
    return full


def checked(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(f"a tensor is {tensor.dtype} {list(tensor.shape)}, the index says {dtype} {list(shape)}")
    return tensor
