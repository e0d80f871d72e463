"""GGUF's quantised blocks to float32, after the layouts of ggml's ggml-common.h.

Each format packs 32 values (256 for the K formats) into one record: 4- to 8-bit integers q, a scale d in float16, and
in some a minimum m; a value is d q + m. K formats give each group of 16 or 32 values an integer scale of its own.
Results equal those of the `gguf` package bit for bit (tests/llm/test_hf_gguf.py).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

CHUNK_BLOCKS = 1 << 15  # blocks unpacked at a time, so that temporaries stay a few megabytes


@dataclass(frozen=True)
class BlockFormat:
    """A GGUF tensor type: `record` is the layout of one block, of `size` values, which `unpack` makes (n, size)."""

    name: str
    size: int
    record: np.dtype
    unpack: Callable[[np.ndarray], np.ndarray]


def nibbles(packed: np.ndarray) -> np.ndarray:
    """(..., n) bytes -> (..., 2n): all low halves, then all high halves."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=-1)


def column(field: np.ndarray) -> np.ndarray:
    """A float16 number a block as (n, 1) float32."""
    return field.astype(np.float32)[:, None]


def high_bits(words: np.ndarray) -> np.ndarray:
    """(n,) uint32 -> (n, 32): bit i of a word, moved to the fifth place."""
    return ((words[:, None] >> np.arange(32, dtype=np.uint32)) & 1).astype(np.uint8) << 4


def unpack_q4_0(block: np.ndarray) -> np.ndarray:
    return column(block["d"]) * (nibbles(block["qs"]).astype(np.float32) - 8)


def unpack_q4_1(block: np.ndarray) -> np.ndarray:
    return column(block["d"]) * nibbles(block["qs"]).astype(np.float32) + column(block["m"])


def unpack_q5_0(block: np.ndarray) -> np.ndarray:
    q = nibbles(block["qs"]) | high_bits(block["qh"])
    return column(block["d"]) * (q.astype(np.float32) - 16)


def unpack_q5_1(block: np.ndarray) -> np.ndarray:
    q = nibbles(block["qs"]) | high_bits(block["qh"])
    return column(block["d"]) * q.astype(np.float32) + column(block["m"])


def unpack_q8_0(block: np.ndarray) -> np.ndarray:
    return column(block["d"]) * block["qs"].astype(np.float32)


def group_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """12 bytes (n, 12) -> eight 6-bit scales and eight 6-bit minima, each (n, 8) float32.

    The first four of each are the low six bits of bytes 0-3 and 4-7; the last four have their low four bits in the
    halves of bytes 8-11 and their upper two at the top of bytes 0-3 and 4-7.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 0x3F, (third & 0x0F) | ((first >> 6) << 4)], axis=1)
    minima = np.concatenate([second & 0x3F, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def scale_groups(block: np.ndarray, q: np.ndarray) -> np.ndarray:
    """q (n, 8, 32) -> (n, 256): each group of 32 by its own scale, minus its own minimum."""
    scales, minima = group_scales(block["scales"])
    d, m = column(block["d"]) * scales, column(block["dmin"]) * minima  # (n, 8)
    return (d[..., None] * q.astype(np.float32) - m[..., None]).reshape(len(block), 256)


def unpack_q4_k(block: np.ndarray) -> np.ndarray:
    # 32 bytes hold group 2j in their low halves and group 2j + 1 in their high halves.
    return scale_groups(block, nibbles(block["qs"].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def unpack_q5_k(block: np.ndarray) -> np.ndarray:
    q = nibbles(block["qs"].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    fifth = (block["qh"][:, None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1  # bit g of byte i: value i, group g
    return scale_groups(block, q | (fifth << 4))


def unpack_q6_k(block: np.ndarray) -> np.ndarray:
    low = nibbles(block["ql"].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)  # in halves of 128 values, by quarters
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high = (block["qh"].reshape(-1, 2, 1, 32) >> shifts) & 3  # (n, 2, 4, 32)
    q = (low | (high << 4)).astype(np.float32) - 32
    scales = column(block["d"]) * block["scales"].astype(np.float32)  # (n, 16)
    return (scales[..., None] * q.reshape(-1, 16, 16)).reshape(-1, 256)


def block_format(name: str, size: int, fields: list[tuple], unpack: Callable) -> BlockFormat:
    return BlockFormat(name, size, np.dtype(fields), unpack)


D, M, Q4, QH = ("d", "<f2"), ("m", "<f2"), ("qs", "u1", (16,)), ("qh", "<u4")
K_HEAD = [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", (12,))]
FORMATS = {
    2: block_format("Q4_0", 32, [D, Q4], unpack_q4_0),
    3: block_format("Q4_1", 32, [D, M, Q4], unpack_q4_1),
    6: block_format("Q5_0", 32, [D, QH, Q4], unpack_q5_0),
    7: block_format("Q5_1", 32, [D, M, QH, Q4], unpack_q5_1),
    8: block_format("Q8_0", 32, [D, ("qs", "i1", (32,))], unpack_q8_0),
    12: block_format("Q4_K", 256, [*K_HEAD, ("qs", "u1", (128,))], unpack_q4_k),
    13: block_format("Q5_K", 256, [*K_HEAD, ("qh", "u1", (32,)), ("qs", "u1", (128,))], unpack_q5_k),
    14: block_format("Q6_K", 256, [("ql", "u1", (128,)), ("qh", "u1", (64,)), ("scales", "i1", (16,)), D], unpack_q6_k),
}


def dequantise(data: np.ndarray, form: BlockFormat) -> np.ndarray:
    """Bytes (n,) of whole blocks -> their values (n / bytes of a block * size,) float32."""
    blocks = data.view(form.record)
    values = np.empty((len(blocks), form.size), dtype=np.float32)
    with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale may be infinite
        for start in range(0, len(blocks), CHUNK_BLOCKS):
            values[start : start + CHUNK_BLOCKS] = form.unpack(blocks[start : start + CHUNK_BLOCKS])
    return values.reshape(-1)
