"""Named tensors that are read when they are wanted, and safetensors files written one tensor at a time.

An import or export holds one tensor (of experts: one stacked parameter) in memory, whatever the model's size. The
layout of a safetensors file (8 bytes of header length, JSON, raw little-endian data) is written here directly, because
`safetensors.torch.save_file` wants all of a file's tensors at once.
"""

import json
import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from configs.errors import UserError

SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its shape, its dtype, and the way to read it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def as_dtype(self, dtype: torch.dtype | None) -> "StoredTensor":
        """The same values rounded to another dtype as they are read; None keeps theirs."""
        if dtype is None or dtype == self.dtype:
            return self
        return replace(self, dtype=dtype, read=lambda: rounded(self.read(), dtype))


Named = list[tuple[str, StoredTensor]]


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The values in another dtype; UserError where float16, which ends at 65,504, would make them infinite."""
    result = values.to(dtype)
    if dtype == torch.float16 and bool((result.isinf() & values.isfinite()).any()):
        raise UserError(f"a weight of {float(values.abs().max()):.3g} does not fit float16; use dtype=bfloat16")
    return result


def stacked(parts: list[StoredTensor]) -> StoredTensor:
    """E tensors of one shape as one of (E, *shape)."""
    first = parts[0]
    return StoredTensor((len(parts), *first.shape), first.dtype, lambda: torch.stack([part.read() for part in parts]))


def file_groups(tensors: Named, max_bytes: int) -> list[Named]:
    """The tensors in order, cut into files of at most `max_bytes`; one larger than that has a file of its own."""
    groups: list[Named] = []
    filled = 0
    for name, tensor in tensors:
        if not groups or filled + tensor.num_bytes > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append((name, tensor))
        filled += tensor.num_bytes
    return groups


def write_safetensors(path: Path, tensors: Named) -> None:
    """Write and sync one file, a tensor at a time; the disk that is full raises UserError, and the file is removed."""
    try:
        with open(path, "wb") as file:
            file.write(header_of(tensors))
            for name, tensor in tensors:
                write_values(file, name, tensor)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        path.unlink(missing_ok=True)
        raise UserError(f"{path} could not be written ({error}); free disk space or use another output=") from error


def write_values(file: BinaryIO, name: str, tensor: StoredTensor) -> None:
    """Read one tensor, write its bytes, and let it go."""
    values = tensor.read().contiguous()
    assert values.shape == tensor.shape and values.dtype == tensor.dtype, f"{name}: {values.dtype} {values.shape}"
    file.write(memoryview(values.reshape(-1).view(torch.uint8).numpy()))


def header_of(tensors: Iterable[tuple[str, StoredTensor]]) -> bytes:
    """The file's head: where each tensor's bytes begin and end, padded so that data begins at a multiple of 8."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors:
        span = [offset, offset := offset + tensor.num_bytes]
        header[name] = {"dtype": SAFETENSORS_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
