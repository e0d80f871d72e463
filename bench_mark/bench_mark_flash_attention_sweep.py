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
    graph_ms,
    heads_first,
    make_inputs,
    peers,
    relative_error,
)
from kernel.cost_model import document_pairs
from kernel.flash_attention_ranges import document_ranges
from kernel.flash_attention_triton_launch import (
    CAUSAL,
    RANGES,
    Attention,
    TileConfig,
    launch_key,
    launch_query,
    run_backward,
    run_delta,
    run_forward,
)
from kernel.flash_attention_triton_launch import hopper as hopper_launch

PASSED = 2e-2  # far above bf16's own error (3e-3), far below that of any wrong tile
MARK = "RESULT "

PRODUCTS = {"forward": 2, "backward": 5, "key": 4, "query": 3}  # matrix products a pair; of a kernel alone, its own
CHECKED = TileConfig(64, 64, 4, 2)  # the tile that makes the inputs of a backward


LONG_D128, LONG_D64, LONGEST, SHORT_D64, PACKED = 0, 1, 2, 3, 6  # of CASES


def tiles(*shapes: tuple[int, ...]) -> list[TileConfig]:
    """Plain tiles (block_m, block_n, warps, stages)."""
    return [TileConfig(*shape) for shape in shapes]


def hopper(kind: str, *shapes: tuple[int, int, int], heads: int = 16) -> list[TileConfig]:
    """(consumers, width of the other side, stages); registers as the warpgroups leave them."""
    found = []
    for consumers, width, stages in shapes:
        m, n = (width, 64 * consumers) if kind == "key" else (64 * consumers, width)
        found.append(TileConfig(m, n, 4, stages, consumers, 240 if consumers == 2 else 160, heads))
    return found


KEY_D128 = hopper("key", (2, 64, 2))
KEY_D64 = hopper("key", (2, 64, 4), (3, 64, 2))
QUERY_D128 = hopper("query", (2, 128, 2), (2, 64, 3), (2, 64, 4), (3, 64, 2))
QUERY_D64 = hopper("query", (2, 128, 3), (2, 64, 4), (3, 64, 3))
FORWARD_D128 = hopper("forward", (2, 128, 2), (2, 64, 3), (2, 64, 4))
FORWARD_D64 = hopper("forward", (2, 128, 2), (2, 128, 3), (2, 64, 4), (3, 128, 2), (3, 64, 3))


def plan() -> dict[tuple[int, str], list[TileConfig]]:
    """The tiles to try by case and pass: the best of the sweep before, and what is new."""
    return {
        (LONG_D128, "forward"): FORWARD_D128,
        (LONG_D128, "key"): KEY_D128,
        (LONG_D128, "query"): QUERY_D128,
        (LONG_D64, "forward"): tiles((64, 128, 4, 2)) + FORWARD_D64,
        (LONG_D64, "key"): KEY_D64,
        (LONG_D64, "query"): QUERY_D64,
        (LONGEST, "forward"): FORWARD_D128[:2],
        (LONGEST, "key"): KEY_D128,
        (LONGEST, "query"): QUERY_D128[:1],
        (SHORT_D64, "forward"): tiles((64, 128, 4, 2), (64, 64, 4, 3)) + FORWARD_D64,
        (SHORT_D64, "key"): KEY_D64,
        (SHORT_D64, "query"): QUERY_D64,
        (PACKED, "forward"): tiles((64, 64, 4, 3)) + FORWARD_D128,
        (PACKED, "key"): KEY_D128 + hopper("key", (2, 64, 2), heads=4),
        (PACKED, "query"): QUERY_D128 + hopper("query", (2, 64, 4), heads=4),
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


def make_call(variant: dict[str, Any], tensors: list[torch.Tensor], config: TileConfig | None = None, timed=False):
    """A callable that runs the variant, or its pass with another tile."""
    q, k, v, dout = (x.detach() for x in tensors)
    config, kind = config or TileConfig(**variant["config"]), variant["kind"]
    mask = make_mask(CASES[variant["case"]])
    call = Attention(scale=q.shape[-1] ** -0.5, deterministic=kind != "backward", **mask)
    if kind == "forward":
        return lambda: run_forward(q, k, v, call, config)
    out, lse = run_forward(q, k, v, call, CHECKED)
    saved = [q, k, v, out, lse, dout, None]
    other = TileConfig(64, 64, 4, 2)
    if kind == "backward":
        return lambda: run_backward(saved, call, key_config=config)
    if timed:  # one kernel alone
        return kernel_alone(kind, (q, k, v, dout), run_delta(out, lse, dout, None), call, config)
    tried = (config, other) if kind == "key" else (other, config)
    return lambda: run_backward(saved, call, *tried)


def kernel_alone(kind: str, tensors, rows, call: Attention, config: TileConfig):
    """The kernel of dK and dV, or that of dQ, without the rest of the backward."""
    q, k, v, _ = tensors
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if kind == "key":
        launch = hopper_launch().launch_key if config.consumers else launch_key
        return lambda: launch(tensors, rows, (None, dk, dv), call, config)
    launch = hopper_launch().launch_query if config.consumers else launch_query
    return lambda: launch(tensors, rows, dq, call, config)


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
    factor = PRODUCTS[variant["kind"]] * 2.0
    ms = graph_ms(make_call(variant, make_inputs(case), timed=True), rep_ms=30)
    pairs = document_pairs(document_lengths(case.T)) if case is CASES[PACKED] else case.pairs
    return {"ms": ms, "tflops": factor * case.B * case.H * pairs * case.D / ms * 1e-9}


def describe(variant: dict[str, Any]) -> str:
    config = variant["config"]
    tile = f"{config['block_m']}x{config['block_n']} w{config['warps']} s{config['stages']}"
    if config["max_registers"]:
        tile += f" r{config['max_registers']}"
    if config["consumers"]:
        tile += f" hopper c{config['consumers']} r{config['registers']}"
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
