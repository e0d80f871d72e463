"""Tile shapes of the attention kernels, tried side by side and then timed one by one.

Each variant first runs once in a process of its own (compiled, checked against PyTorch's kernel, killed when it hangs
or is wrong), many at a time; only those that passed are timed, here, from Triton's cache on disk.

    python3 -m bench_mark.bench_mark_flash_attention_sweep --out sweep.json --workers 14
"""

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench_mark.bench_mark_flash_attention_cases import (
    CASES,
    Case,
    document_ids,
    document_lengths,
    heads_first,
    make_inputs,
    peers,
    relative_error,
    time_ms,
)
from kernel.cost_model import document_pairs
from kernel.flash_attention_ranges import document_ranges
from kernel.flash_attention_triton_launch import CAUSAL, RANGES, Attention, TileConfig, run_backward, run_forward

PASSED = 2e-2  # far above bf16's own error (3e-3), far below that of any wrong tile
MARK = "RESULT "

CHECKED = TileConfig(64, 64, 4, 2)  # the tile that makes the inputs of a backward


LONG_D128, LONG_D64, SHORT_D64, PACKED = 0, 1, 3, 6  # of CASES
KEY = [(64, 128, 8, 3), (64, 128, 8, 4), (64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 8, 3), (128, 128, 8, 2)]
QUERY = [(64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 8, 2), (128, 64, 8, 3), (64, 128, 4, 2)]


def tiles(shapes: list[tuple[int, ...]], *limits: int) -> list[TileConfig]:
    """Plain tiles (block_m, block_n, warps, stages), each also under every limit of registers."""
    return [TileConfig(*shape, max_registers=limit) for shape in shapes for limit in (None, *limits)]


def hopper(*shapes: tuple[int, int], heads: int = 16, persistent: bool = False) -> list[TileConfig]:
    """Two consumers of 64 rows, (block_n, stages)."""
    return [TileConfig(128, n, 4, stages, 2, 240, persistent, heads) for n, stages in shapes]


def plan() -> dict[tuple[int, str], list[TileConfig]]:
    """The tiles to try by case and pass: neighbours of what won the sweep before."""
    wide = hopper((128, 2), heads=64) + hopper((128, 2), heads=4)
    short = [(64, 128, 4, 2), (64, 128, 4, 3), (64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 4, 3), (128, 64, 8, 3)]
    packed = [(64, 64, 4, 3), (64, 128, 4, 2), (64, 32, 4, 3), (128, 64, 8, 3)]
    return {
        (PACKED, "forward"): tiles(packed) + hopper((128, 2), (64, 3)),
        (PACKED, "backward"): tiles([(64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 8, 3), (32, 64, 4, 3)]),
        (LONG_D128, "forward"): hopper((128, 2)) + wide + tiles([(64, 64, 4, 3)]),
        (LONG_D64, "forward"): tiles([(64, 128, 4, 2), (64, 128, 4, 3), (64, 64, 4, 4)], 168) + hopper((128, 3)),
        (SHORT_D64, "forward"): tiles(short) + tiles([(64, 128, 4, 2)], 168) + hopper((128, 2), (128, 3)),
        (LONG_D128, "backward"): tiles(KEY),
        (LONG_D64, "backward"): tiles(KEY) + tiles([(64, 64, 4, 3), (32, 64, 4, 3)], 168),
        (SHORT_D64, "backward"): tiles(KEY[:4]),
        (LONG_D128, "deterministic key"): tiles(KEY),
        (LONG_D64, "deterministic key"): tiles(KEY) + tiles([(64, 64, 4, 3)], 168),
        (LONG_D128, "deterministic query"): tiles(QUERY),
        (LONG_D64, "deterministic query"): tiles(QUERY) + tiles([(64, 64, 4, 3)], 168),
    }


def variants() -> list[dict[str, Any]]:
    """Every variant as plain values: the case's index, the pass, the tile."""
    return [
        {"case": case, "kind": kind, "config": asdict(config)}
        for (case, kind), configs in plan().items()
        for config in dict.fromkeys(configs)
    ]


def make_mask(case: Case) -> dict[str, Any]:
    """The fields of Attention for causal, or for causal inside documents."""
    if case is not CASES[PACKED]:
        return {"bounds": CAUSAL}
    ranges = document_ranges(document_ids(case.T)[None])
    return {"bounds": RANGES, "ranges": (ranges.key_lo, ranges.key_hi, ranges.query_lo, ranges.query_hi)}


def make_call(variant: dict[str, Any], tensors: list[torch.Tensor], config: TileConfig | None = None):
    """A callable that runs the variant, or its pass with another tile."""
    q, k, v, dout = (x.detach() for x in tensors)
    config, kind = config or TileConfig(**variant["config"]), variant["kind"]
    mask = make_mask(CASES[variant["case"]])
    call = Attention(scale=q.shape[-1] ** -0.5, deterministic=kind.startswith("deterministic"), **mask)
    if kind == "forward":
        return lambda: run_forward(q, k, v, call, config)
    out, lse = run_forward(q, k, v, call, CHECKED)
    saved = [q, k, v, out, lse, dout, torch.zeros_like(lse)]
    if kind == "deterministic query":
        return lambda: run_backward(saved, call, query_config=config)
    return lambda: run_backward(saved, call, key_config=config)


def reference(variant: dict[str, Any], case: Case, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """PyTorch's flash kernel: out, or dq, dk, dv, in our layout; for documents our tile that the tests check."""
    if case is CASES[PACKED]:
        return list(make_call(variant, tensors, CHECKED)())
    q, k, v, dout = heads_first(tensors)
    out = peers(case)["flash"]()(q, k, v)
    results = [out] if variant["kind"] == "forward" else torch.autograd.grad(out, (q, k, v), dout)
    return [x.detach().transpose(1, 2) for x in results]


def try_variant(variant: dict[str, Any]) -> dict[str, Any]:
    """Compile, run once and compare, in this process."""
    case = CASES[variant["case"]]
    tensors = make_inputs(case)
    results = make_call(variant, tensors)()
    expected = reference(variant, case, tensors)
    errors = [relative_error(a, b) for a, b in zip(results, expected, strict=False)]
    return {"errors": errors, "passed": all(error < PASSED for error in errors)}


def try_apart(variant: dict[str, Any], seconds: int) -> dict[str, Any]:
    """The same in a process of its own, which may crash or hang without harm."""
    command = [sys.executable, "-m", "bench_mark.bench_mark_flash_attention_sweep", "--attempt", json.dumps(variant)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"passed": False, "why": f"no end after {seconds} s"}
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    return {"passed": False, "why": " ".join(done.stderr.split())[-300:]}


def time_variant(variant: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds and TFLOP/s of a variant that passed."""
    case = CASES[variant["case"]]
    factor = 4.0 if variant["kind"] == "forward" else 10.0
    ms = time_ms(make_call(variant, make_inputs(case)), rep_ms=50)
    pairs = document_pairs(document_lengths(case.T)) if case is CASES[PACKED] else case.pairs
    return {"ms": ms, "tflops": factor * case.B * case.H * pairs * case.D / ms * 1e-9}


def describe(variant: dict[str, Any]) -> str:
    config = variant["config"]
    tile = f"{config['block_m']}x{config['block_n']} w{config['warps']} s{config['stages']}"
    if config["max_registers"]:
        tile += f" r{config['max_registers']}"
    if config["consumers"]:
        tile += f" hopper c{config['consumers']} r{config['registers']} persistent={config['persistent']:d}"
        tile += f" heads{config['heads']}"
    return f"{CASES[variant['case']].name:19} {variant['kind']:19} {tile}"


def sweep(workers: int, seconds: int, budget_s: float) -> list[dict[str, Any]]:
    """Try all, time those that passed while the time budget lasts, best first within each case and pass."""
    started, found = time.monotonic(), variants()
    with ThreadPoolExecutor(workers) as pool:
        tried = list(pool.map(lambda variant: try_apart(variant, seconds), found))
    rows = [variant | result for variant, result in zip(found, tried, strict=True)]
    print(f"{sum(row['passed'] for row in rows)} of {len(rows)} passed after {time.monotonic() - started:.0f} s")
    for row in rows:
        if row["passed"] and time.monotonic() - started < budget_s:
            row.update(time_variant({key: row[key] for key in ("case", "kind", "config")}))
    return sorted(rows, key=lambda row: (row["case"], row["kind"], -row.get("tflops", 0.0)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attempt", help="one variant as JSON (what the sweep starts for itself)")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seconds", type=int, default=90, help="until an attempt counts as hanging")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds after which nothing more is timed")
    parser.add_argument("--out", type=Path, help="JSON of all rows")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA GPU and none was found; run it on one")
    if arguments.attempt:
        print(MARK + json.dumps(try_variant(json.loads(arguments.attempt))))
        return
    rows = sweep(arguments.workers, arguments.seconds, arguments.budget)
    for row in rows:
        outcome = f"{row['tflops']:7.1f} TFLOP/s" if "tflops" in row else row.get("why", str(row.get("errors")))[-110:]
        print(f"{describe(row)}: {outcome}")
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
