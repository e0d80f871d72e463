"""A kernel's roofline time from what it must do: matmul FLOPs, exponentials and HBM bytes, plain numbers in and out.

The three units work side by side, so a kernel is predicted to take as long as the busiest of them:
time = max(FLOPs / matmul rate, exponentials / exp rate, bytes / bandwidth). What is measured above it is imperfect
overlap, tiles cut by the mask, and launches. Rates are the caller's: datasheet peaks or what was measured in the run.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Peaks:
    """What the device can do in a second: matmul FLOPs of the dtype, exponentials, bytes to and from HBM."""

    matmul_flops: float
    exps: float
    memory_bytes: float


@dataclass(frozen=True)
class KernelWork:
    """What a kernel must do: matmul FLOPs (2 a multiply-add), exponentials, bytes read once and written once."""

    flops: float
    exps: float
    bytes: float


@dataclass(frozen=True)
class KernelPrediction:
    """The roofline: seconds, the unit that binds ("matmul", "exp" or "memory"), and the seconds of each unit."""

    seconds: float
    bound: str
    units: dict[str, float]


@dataclass(frozen=True)
class AttentionShape:
    """One attention call: batch, query and key tokens, heads, kv heads, head_dim, bytes an element."""

    B: int
    T: int
    S: int
    H: int
    K: int
    D: int
    itemsize: int = 2


def exp_rate(num_multiprocessors: int, clock_hz: float) -> float:
    """Exponentials a second: 16 a clock of each multiprocessor (CUDA C++ guide, compute capability 9.0)."""
    return 16.0 * num_multiprocessors * clock_hz


def predict(work: KernelWork, peaks: Peaks) -> KernelPrediction:
    """The time of a kernel whose three units overlap perfectly."""
    units = {
        "matmul": work.flops / peaks.matmul_flops,
        "exp": work.exps / peaks.exps,
        "memory": work.bytes / peaks.memory_bytes,
    }
    bound = max(units, key=units.__getitem__)
    return KernelPrediction(units[bound], bound, units)


def causal_pairs(T: int, S: int) -> float:
    """(query, key) pairs under a causal mask whose last query sees all keys: T * S / 2 where T = S.

    Exactly it would be T (T + 1) / 2; half is how papers and libraries count, so that rates can be compared.
    """
    return T * S - T * T / 2


def document_pairs(lengths: list[int]) -> float:
    """(query, key) pairs inside causal documents of these lengths."""
    return sum(causal_pairs(length, length) for length in lengths)


def attention_forward(shape: AttentionShape, pairs: float | None = None) -> KernelWork:
    """Q K^T and P V over the visible `pairs` of each batch row (all T * S where None); q, k, v in, out and lse out."""
    pairs = shape.B * shape.H * (shape.T * shape.S if pairs is None else pairs)
    return KernelWork(4.0 * pairs * shape.D, pairs, 2 * _query_bytes(shape) + 2 * _key_bytes(shape) + _row_bytes(shape))


def attention_backward(shape: AttentionShape, pairs: float | None = None) -> KernelWork:
    """Five products (S, dP, dV, dK, dQ): 2.5 forwards; reads q, k, v, out, dout, lse, writes dq, dk, dv."""
    pairs = shape.B * shape.H * (shape.T * shape.S if pairs is None else pairs)
    return KernelWork(
        10.0 * pairs * shape.D, pairs, 4 * _query_bytes(shape) + 4 * _key_bytes(shape) + _row_bytes(shape)
    )


def attention_decode(shape: AttentionShape, num_keys: float | None = None) -> KernelWork:
    """T new tokens a row against a cache of S, or of `num_keys` in all rows together where they differ.

    Every key and value is read once, by all heads of its group and all new tokens together.
    """
    num_keys = shape.B * shape.S if num_keys is None else num_keys
    pairs = num_keys * shape.H * shape.T
    cache_bytes = 2 * num_keys * shape.K * shape.D * shape.itemsize
    return KernelWork(4.0 * pairs * shape.D, pairs, cache_bytes + 2 * _query_bytes(shape) + _row_bytes(shape))


def _query_bytes(shape: AttentionShape) -> float:
    return float(shape.B * shape.T * shape.H * shape.D * shape.itemsize)


def _key_bytes(shape: AttentionShape) -> float:
    return float(shape.B * shape.S * shape.K * shape.D * shape.itemsize)


def _row_bytes(shape: AttentionShape) -> float:
    return 4.0 * shape.B * shape.H * shape.T  # lse, float32
