"""Time the candidate tiles of the attention kernels on this device and keep the choices where later runs find them.

One process, once a machine; what is on file already is not timed again. Prints the times of the default and of the best
candidate, and the choice; the last line is JSON.

    python3 -m bench_mark.bench_mark_flash_attention_tune --head-dims 64 128 --lengths 1024 4096 16384
"""

import argparse
import json
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton

from bench_mark.bench_mark_flash_attention_cases import document_ids
from configs.version import git_commit
from kernel.flash_attention_ranges import document_ranges
from kernel.flash_attention_triton_decode import DecodeCache, DecodeCall, choose_config, default_decode_config
from kernel.flash_attention_triton_launch import (
    CAUSAL,
    RANGES,
    Attention,
    default_config,
    run_backward,
    run_forward,
)
from kernel.flash_attention_triton_tuning import Tuner, time_call, tuned_tile

TOKENS = 16384  # of the batch a length is tuned with, as in a training step
HEADS, KV_HEADS = 16, 4
Row = tuple[str, Any, Any, list[float]]  # the pass, the default, the choice, the milliseconds of the candidates


class Recorder:
    """A timer that remembers what it measured since it was last asked."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, call: Any) -> float:
        self.times.append(time_call(call))
        return self.times[-1]

    def taken(self) -> list[float]:
        times, self.times = self.times, []
        return times


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def training_calls(T: int) -> dict[str, Attention]:
    """Causal, and causal inside 32 documents, by name."""
    ranges = document_ranges(document_ids(T)[None])
    arrays = (ranges.key_lo, ranges.key_hi, ranges.query_lo, ranges.query_hi)
    return {"causal": Attention(bounds=CAUSAL), "documents": Attention(arrays, RANGES)}


def tune_training(tuner: Tuner, D: int, T: int, call: Attention) -> list[Row]:
    """Forward, dK and dV, and dQ where it has a kernel of its own."""
    B = max(1, TOKENS // T)
    q, k, v, dout = random(B, T, HEADS, D), random(B, T, KV_HEADS, D), random(B, T, KV_HEADS, D), random(B, T, HEADS, D)
    forward, key, query = (default_config(kind, q, call) for kind in ("forward", "key", "query"))
    saved = [q, k, v, *run_forward(q, k, v, call, forward), dout, None]
    passes = {
        "forward": (forward, lambda tile: run_forward(q, k, v, call, tile)),
        "key": (key, lambda tile: run_backward(saved, call, tile, query)),
        "query": (query, lambda tile: run_backward(saved, call, key, tile)),
    }
    if not key.consumers:
        del passes["query"]
    rows = []
    for kind, (default, run) in passes.items():
        choice = tuned_tile(kind, (q, k), call, default, run, tuner)
        rows.append((kind, default, choice, tuner.timer.taken()))
    return rows


def tune_decode(tuner: Tuner, D: int, S: int, page_size: int) -> Row:
    """64 sequences of S tokens, eight heads a kv head, contiguous (page_size 0) or in pages."""
    B, K = 64, 4
    q, table, shape = random(B, 1, 8 * K, D), None, (B, S, K, D)
    if page_size:
        shape = (B * S // page_size, page_size, K, D)
        table = torch.randperm(shape[0], device="cuda").int().view(B, -1)
    k, v = random(*shape), random(*shape)
    cache = DecodeCache(k, v, torch.full((B,), S, dtype=torch.int32, device="cuda"), table)
    choice = choose_config(q, cache, DecodeCall(D**-0.5, 0.0, 0, S), tuner)
    return "decode", default_decode_config(q), choice, tuner.timer.taken()


def tune(tuner: Tuner, arguments: argparse.Namespace) -> Iterator[tuple[str, Row]]:
    """Everything asked for, under a name."""
    for D, T in product(arguments.head_dims, arguments.lengths):
        for mask, call in training_calls(T).items():
            for row in tune_training(tuner, D, T, call):
                yield f"D{D} T{T} {mask}", row
        for page_size in arguments.page_sizes:
            yield (
                f"D{D} S{T} " + (f"pages of {page_size}" if page_size else "contiguous"),
                tune_decode(tuner, D, T, page_size),
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[0, 16, 64])
    parser.add_argument("--path", type=Path, help="the file of choices; by default the one that every run reads")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("tuning needs a CUDA GPU and none was found; run it on one")
    tuner, rows, device = Tuner(arguments.path, Recorder()), [], torch.cuda.get_device_name()
    print(f"{device} · bf16 · torch {torch.__version__} · triton {triton.__version__} · {git_commit()}")
    started = time.monotonic()
    with tuner.timing():
        for name, (kind, default, choice, times) in tune(tuner, arguments):
            measured = f"default {times[0]:.4f} ms, best {min(times):.4f} ms" if times else "on file"
            print(f"{kind:8} {name:26} {measured}: {choice}", flush=True)
            kept = {"kept_default": choice == default, "choice": vars(choice), "ms": times}
            rows.append({"kind": kind, "name": name} | kept)
    seconds = round(time.monotonic() - started, 1)
    print(json.dumps({"device": device, "file": str(tuner.path), "seconds": seconds, "rows": rows}))


if __name__ == "__main__":
    main()
