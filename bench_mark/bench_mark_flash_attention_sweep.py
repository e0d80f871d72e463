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
    heads_first,
    make_inputs,
    peers,
    relative_error,
    time_ms,
)
from kernel.flash_attention_triton_launch import CAUSAL, Attention, TileConfig, run_backward, run_forward

PASSED = 2e-2  # far above bf16's own error (3e-3), far below that of any wrong tile
MARK = "RESULT "


def forward_configs() -> list[TileConfig]:
    plain = [(128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 4, 3), (128, 64, 8, 3), (64, 128, 4, 2), (64, 64, 4, 3)]
    configs = [TileConfig(*tile) for tile in plain]
    for block_n, stages in ((128, 2), (64, 3), (64, 4)):
        for persistent in (True, False):
            configs.append(TileConfig(128, block_n, 4, stages, 2, 240, persistent))
    configs.append(TileConfig(192, 128, 4, 2, 3, 160, True))  # spills at D128, hardly at D64
    configs.append(TileConfig(128, 128, 4, 2, 2, 240, True, heads=4))
    configs.append(TileConfig(128, 128, 4, 2, 2, 240, True, heads=64))
    return configs


def backward_configs() -> list[TileConfig]:
    tiles = [(64, 128, 8, 2), (64, 128, 8, 1), (64, 128, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2)]
    tiles += [(32, 128, 8, 2), (32, 128, 4, 2), (64, 128, 4, 2), (128, 128, 8, 1), (128, 128, 8, 2), (128, 64, 4, 2)]
    return [TileConfig(*tile) for tile in tiles]


def variants() -> list[dict[str, Any]]:
    """Every variant as plain values: the case's index, the pass, the tile."""
    found = []
    for index in (0, 1):
        found += [{"case": index, "kind": "forward", "config": asdict(config)} for config in forward_configs()]
        found += [{"case": index, "kind": "backward", "config": asdict(config)} for config in backward_configs()]
    for config in (TileConfig(128, 64, 8, 2), TileConfig(64, 64, 4, 2), TileConfig(128, 128, 8, 1)):
        found.append({"case": 0, "kind": "deterministic", "config": asdict(config)})
    return found


def make_call(variant: dict[str, Any], tensors: list[torch.Tensor]):
    """A callable that runs the variant, and the reference it must agree with (a list of tensors)."""
    q, k, v, dout = (x.detach() for x in tensors)
    config, kind = TileConfig(**variant["config"]), variant["kind"]
    call = Attention(bounds=CAUSAL, scale=q.shape[-1] ** -0.5, deterministic=kind == "deterministic")
    if kind == "forward":
        return lambda: run_forward(q, k, v, call, config)
    out, lse = run_forward(q, k, v, call, TileConfig(128, 64, 8, 2))
    saved = [q, k, v, out, lse, dout, torch.zeros_like(lse)]
    if kind == "deterministic":
        return lambda: run_backward(saved, call, query_config=config)
    return lambda: run_backward(saved, call, key_config=config)


def reference(kind: str, case: Case, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """PyTorch's flash kernel: out, or dq, dk, dv, in our layout."""
    q, k, v, dout = heads_first(tensors)
    out = peers(case)["flash"]()(q, k, v)
    results = [out] if kind == "forward" else torch.autograd.grad(out, (q, k, v), dout)
    return [x.detach().transpose(1, 2) for x in results]


def try_variant(variant: dict[str, Any]) -> dict[str, Any]:
    """Compile, run once and compare, in this process."""
    case = CASES[variant["case"]]
    tensors = make_inputs(case)
    results = make_call(variant, tensors)()
    expected = reference(variant["kind"], case, tensors)
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
    ms = time_ms(make_call(variant, make_inputs(case)), rep_ms=60)
    return {"ms": ms, "tflops": factor * case.B * case.H * case.pairs * case.D / ms * 1e-9}


def describe(variant: dict[str, Any]) -> str:
    config = variant["config"]
    tile = f"{config['block_m']}x{config['block_n']} w{config['warps']} s{config['stages']}"
    if config["consumers"]:
        tile += f" hopper c{config['consumers']} r{config['registers']} persistent={config['persistent']:d}"
        tile += f" heads{config['heads']}"
    return f"{CASES[variant['case']].name:18} {variant['kind']:13} {tile}"


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
