"""The container: a GGUF file's metadata and tensors, from bytes that nobody vouches for.

Layout (ggml's gguf.md, versions 2 and 3, little-endian): magic, version, counts, key-value pairs, tensor descriptions,
padding, data. Every length is checked against what the file holds before it is used, so that a broken or hostile file
ends in one line, not in an allocation of its choosing. The file is mapped; a tensor is read when it is wanted.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.errors import UserError
from llm.hf_gguf_blocks import FORMATS, dequantise
from llm.hf_tensors import StoredTensor

NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
STRING, ARRAY = 8, 9
PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
MAX_DIMS = 4


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies; `shape` is outermost first, as torch counts (the file has it the other way round)."""

    shape: tuple[int, ...]
    kind: int
    offset: int  # from the beginning of the file


class GgufFile:
    """Metadata by key and tensors by name of one mapped file; UserError for a file that does not hold together."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            self.data = np.memmap(self.path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise UserError(f"{path} could not be opened ({error}); give a .gguf file") from error
        self.metadata: dict[str, Any] = {}
        self.infos: dict[str, TensorInfo] = {}
        self._place = 0
        try:
            self._read_head()
        except (ValueError, UnicodeDecodeError, OverflowError) as error:
            raise UserError(f"{path} is no whole GGUF file ({error}); fetch it again") from error

    def _read_head(self) -> None:
        if bytes(self._take(4)) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._number("<u4")
        if version not in (2, 3):
            raise ValueError(f"version {version}, and 2 and 3 are read")
        num_tensors, num_pairs = self._number("<u8"), self._number("<u8")
        for _ in range(num_pairs):  # a count beyond the file's end fails at the first pair that is not there
            key = self._string()
            self.metadata[key] = self._value(self._number("<u4"))
        described = [self._description() for _ in range(num_tensors)] if num_tensors <= self.data.size else None
        if described is None:
            raise ValueError(f"{num_tensors} tensors in {self.data.size} bytes")
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise ValueError(f"general.alignment={alignment!r}")
        start = -(-self._place // alignment) * alignment
        for name, shape, kind, offset in described:
            if name in self.infos:
                raise ValueError(f"two tensors are named {name!r}")
            self.infos[name] = TensorInfo(shape, kind, start + offset)
            self._check_extent(name)

    def _take(self, count: int) -> np.ndarray:
        if count > self.data.size - self._place:
            raise ValueError(f"{count} bytes are wanted at {self._place} and the file ends at {self.data.size}")
        self._place += count
        return self.data[self._place - count : self._place]

    def _number(self, kind: str) -> Any:
        return self._take(np.dtype(kind).itemsize).view(kind)[0].item()

    def _string(self) -> str:
        return bytes(self._take(self._number("<u8"))).decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind in NUMBERS:
            return self._number(NUMBERS[kind])
        if kind != ARRAY:
            raise ValueError(f"value of unknown type {kind}")
        inner, count = self._number("<u4"), self._number("<u8")
        if inner in NUMBERS:
            return self._take(count * np.dtype(NUMBERS[inner]).itemsize).view(NUMBERS[inner]).tolist()
        if inner != STRING:
            raise ValueError(f"array of type {inner}")
        return self._strings(count)

    def _strings(self, count: int) -> list[str]:
        """Many strings (a vocabulary), out of one buffer."""
        if count * 8 > self.data.size - self._place:
            raise ValueError(f"{count} strings do not fit into the file")
        rest, place, values = memoryview(self.data)[self._place :], 0, []
        for _ in range(count):
            if place + 8 > len(rest):
                raise ValueError("the file ends within an array of strings")
            (length,) = struct.unpack_from("<Q", rest, place)
            if length > len(rest) - place - 8:
                raise ValueError(f"a string of {length} bytes does not fit into the file")
            values.append(bytes(rest[place + 8 : place + 8 + length]).decode("utf-8"))
            place += 8 + length
        self._place += place
        return values

    def _description(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dims = self._string(), self._number("<u4")
        if not 1 <= dims <= MAX_DIMS:
            raise ValueError(f"tensor {name!r} has {dims} dims")
        shape = tuple(self._number("<u8") for _ in range(dims))[::-1]
        kind, offset = self._number("<u4"), self._number("<u8")
        return name, shape, kind, offset

    def _check_extent(self, name: str) -> None:
        info = self.infos[name]
        if info.kind not in PLAIN and info.kind not in FORMATS:
            known = ["F32", "F16", "BF16", *(form.name for form in FORMATS.values())]
            raise UserError(
                f"{self.path}: {name!r} is of GGUF type {info.kind}, which is not read; use {', '.join(known)}"
            )
        if info.kind in FORMATS and info.shape[-1] % FORMATS[info.kind].size:
            raise ValueError(f"rows of {info.shape[-1]} values of {name!r} are no whole blocks")
        if 0 in info.shape or info.offset + self.num_bytes(name) > self.data.size:
            raise ValueError(f"{name!r} {list(info.shape)} ends beyond the file")

    def num_bytes(self, name: str) -> int:
        """The bytes of a tensor in the file."""
        info = self.infos[name]
        count = math.prod(info.shape)
        if info.kind in PLAIN:
            return count * PLAIN[info.kind].itemsize
        return count // FORMATS[info.kind].size * FORMATS[info.kind].record.itemsize

    def read(self, name: str) -> Tensor:
        """A tensor's values: float32 of a quantised one, else in its own dtype."""
        info = self.infos[name]
        raw = np.asarray(self.data[info.offset : info.offset + self.num_bytes(name)])
        if info.kind in FORMATS:
            values = torch.from_numpy(dequantise(raw, FORMATS[info.kind]))
        else:
            values = torch.frombuffer(bytearray(raw), dtype=PLAIN[info.kind])
        return values.view(info.shape)

    def stored(self, name: str) -> StoredTensor:
        info = self.infos[name]
        return StoredTensor(info.shape, PLAIN.get(info.kind, torch.float32), lambda: self.read(name))
