"""Tiles chosen by timing a few on this device, once, and kept in a JSON file.

A choice belongs to a device, a pass, a head_dim, a dtype, a kind of mask and a length (a power of two). Looking one up
is all that an ordinary call does; without a choice it takes the table of default_config. Timing happens only inside
`with shared_tuner().timing():`, and never while torch.compile traces or a CUDA graph is captured. Ranks that timed for
themselves could differ: tune in one process (`python -m bench_mark.bench_mark_flash_attention_tune`), and all ranks
read the same file. Another tile adds in another order: results are equal to the last bit only beside the same file.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from configs.run_dir import write_json_atomic

FORMAT = 1  # of the file; another is ignored
MARGIN = 0.97  # a candidate replaces the default only when it takes less than this of its time: runs spread by 3%
WARMUP_MS, TIMED_MS = 10, 40
HOPPER = "sm9"  # ends the device's name in a key

TILE_FIELDS = ("block_m", "block_n", "warps", "stages", "consumers", "registers", "max_registers")
DECODE_FIELDS = ("block_n", "warps", "stages", "programs")
# By pass and padded head_dim, 16-bit: what came near the best in a sweep on an H200 (docs/kernels.md). Those with
# consumers are the warp-specialised kernels, which only compute capability 9 runs.
CANDIDATES: dict[tuple[str, int], list[tuple]] = {
    ("forward", 64): [
        (64, 128, 4, 2, 0, 240, None), (64, 128, 4, 3, 0, 240, None), (64, 64, 4, 3, 0, 240, None),
        (128, 128, 4, 2, 2, 240, None),
    ],
    ("forward", 128): [
        (128, 128, 4, 2, 2, 240, None), (128, 64, 4, 3, 2, 240, None), (128, 128, 8, 3, 0, 240, None),
        (64, 64, 4, 3, 0, 240, None),
    ],
    ("key", 64): [
        (64, 192, 4, 2, 3, 160, None), (64, 128, 4, 2, 2, 240, None), (64, 64, 4, 3, 0, 240, None),
        (64, 128, 8, 3, 0, 240, None),
    ],
    ("key", 128): [(64, 128, 4, 2, 2, 240, None), (64, 128, 8, 3, 0, 240, None), (64, 64, 4, 3, 0, 240, None)],
    ("query", 64): [(128, 128, 4, 3, 2, 240, None), (128, 64, 8, 3, 0, 240, None), (64, 64, 4, 3, 0, 240, None)],
    ("query", 128): [
        (128, 128, 4, 2, 2, 240, None), (192, 64, 4, 2, 3, 160, None), (128, 64, 8, 3, 0, 240, None),
        (64, 64, 4, 3, 0, 240, None),
    ],
    ("decode", 64): [(128, 4, 3, 3), (128, 8, 3, 2), (64, 4, 3, 6), (32, 1, 4, 8)],
    ("decode", 128): [(64, 4, 3, 3), (64, 4, 2, 3), (128, 4, 2, 2), (32, 1, 4, 4)],
}  # fmt: skip


class TuningKey(NamedTuple):
    """What a choice belongs to; device holds the compute capability, length is rounded up to a power of two."""

    device: str
    kind: str
    head_dim: int
    dtype: str
    mask: str
    length: int


def make_key(kind: str, x: Tensor, mask: str, length: int) -> TuningKey:
    """The key of a call whose tensors are like `x` (..., D), over `length` keys."""
    bucket = 1 << (length - 1).bit_length()
    return TuningKey(device_name(x.device), kind, x.shape[-1], str(x.dtype).removeprefix("torch."), mask, bucket)


@cache
def device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    return f"{torch.cuda.get_device_name(device)} sm{torch.cuda.get_device_capability(device)[0]}"


def candidates_of(key: TuningKey, default: Any) -> list[Any]:
    """The default first, then the set of the key as configurations like it; float32 has none besides the default."""
    block_d = 1 << (key.head_dim - 1).bit_length()
    rows = CANDIDATES.get((key.kind, block_d), []) if key.dtype != "float32" else []
    fields = DECODE_FIELDS if key.kind == "decode" else TILE_FIELDS
    others = [replace(default, **dict(zip(fields, row, strict=True))) for row in rows]
    if not key.device.endswith(HOPPER):
        others = [config for config in others if not getattr(config, "consumers", 0)]
    return [default, *(config for config in others if config != default)]


def default_path() -> Path:
    return Path.home() / ".cache" / "mew" / "attention_tiles.json"


def time_call(call: Callable[[], object]) -> float:
    """Median milliseconds of a call on the current CUDA device."""
    from triton.testing import do_bench

    return do_bench(call, warmup=WARMUP_MS, rep=TIMED_MS, return_mode="median")


def may_time() -> bool:
    """Not without a GPU, not while torch.compile traces, not while a CUDA graph is captured."""
    if not torch.cuda.is_available() or torch.compiler.is_compiling():
        return False
    return not torch.cuda.is_current_stream_capturing()


class Tuner:
    """The choices of one file; `timer` gives the milliseconds of a call, `allowed` says whether it may be used now."""

    def __init__(
        self,
        path: Path | None = None,
        timer: Callable[[Callable[[], object]], float] = time_call,
        allowed: Callable[[], bool] = may_time,
    ):
        self.path = path or default_path()
        self.timer = timer
        self.allowed = allowed
        self.times_calls = False
        self.stored = read_choices(self.path)
        self.resolved: dict[TuningKey, Any] = {}  # None: no choice on file

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Inside, a call without a choice times its candidates first."""
        before, self.times_calls = self.times_calls, True
        self.resolved.clear()
        try:
            yield
        finally:
            self.times_calls = before

    def choose(self, key: TuningKey, default: Any, run: Callable[[Any], object]) -> Any:
        """The configuration to use: the choice on file, else timed here if that is on, else `default`.

        default: a dataclass with the fields of the candidates; run(configuration) runs the kernel with it.
        """
        if key in self.resolved:
            return self.resolved[key] or default
        chosen = self.find(key, default)
        if chosen is None and self.times_calls:
            candidates = candidates_of(key, default)
            if len(candidates) == 1 or not self.allowed():
                return default
            chosen = self.fastest(candidates, run)
            self.store(key, chosen)
        self.resolved[key] = chosen
        return chosen or default

    def find(self, key: TuningKey, default: Any) -> Any | None:
        """The choice on file, if it is one of today's candidates: a file may be older than the code."""
        fields = self.stored.get("|".join(map(str, key)))
        if fields is None:
            return None
        return next((config for config in candidates_of(key, default) if asdict(config) == fields), None)

    def fastest(self, candidates: Sequence[Any], run: Callable[[Any], object]) -> Any:
        """The first candidate unless another is faster by more than the spread."""
        times = [self.milliseconds(config, run) for config in candidates]
        best = min(range(len(times)), key=times.__getitem__)
        return candidates[best] if times[best] < MARGIN * times[0] else candidates[0]

    def milliseconds(self, config: Any, run: Callable[[Any], object]) -> float:
        """Infinite for a tile that does not fit this device."""
        from triton.compiler.errors import CompilationError
        from triton.runtime.errors import OutOfResources, PTXASError

        try:
            return self.timer(lambda: run(config))
        except (CompilationError, OutOfResources, PTXASError) as error:
            print(f"tile {config} left out: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
            return math.inf

    def store(self, key: TuningKey, config: Any) -> None:
        """Add the choice to the file, beside what other processes wrote since it was read."""
        self.stored = read_choices(self.path) | {"|".join(map(str, key)): asdict(config)}
        write_json_atomic(self.path, {"format": FORMAT, "choices": self.stored})


def tuned_tile(
    kind: str,
    qk: tuple[Tensor, Tensor],
    call: Any,
    default: Any,
    run: Callable[[Any], object],
    tuner: Tuner | None = None,
) -> Any:
    """The tile of a pass over q (B, T, H, D) and k (B, S, K, D); call: its Attention, default: its TileConfig."""
    q, k = qk
    if not q.is_cuda or call.softcap:  # tanh has a table of its own, and no candidates
        return default
    mask = ("none", "causal", "ranges")[call.bounds] + (" deterministic" if call.deterministic else "")
    key = make_key(kind, q, mask, max(q.shape[1], k.shape[1]))
    return (tuner or shared_tuner()).choose(key, default, run)


def read_choices(path: Path) -> dict[str, dict[str, Any]]:
    """The choices of a file; none, with one line on stderr, when it is not what `store` writes."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        choices = document["choices"]
        if document["format"] == FORMAT and all(isinstance(fields, dict) for fields in choices.values()):
            return choices
        reason = f"format {document['format']}, not {FORMAT}"
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
    print(f"warning: {path} is ignored ({reason}); delete it and tune again", file=sys.stderr)
    return {}


@cache
def shared_tuner() -> Tuner:
    """The tuner of this process, whose file is read at the first call."""
    return Tuner()
