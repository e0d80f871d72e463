"""Sweeps the launch shapes of the fused operations on a GPU: milliseconds on the device of each, the best one last.

python3 -m bench_mark.bench_mark_fused_ops_sweep --only norm_backward loss --out fused_sweep.json
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from bench_mark.bench_mark_flash_attention_cases import graph_ms, time_ms
from bench_mark.bench_mark_fused_ops_cases import BF16
from bench_mark.bench_mark_fused_ops_long import C, N, V
from kernel import rms_norm_kernels, swiglu
from kernel.cross_entropy import LossOptions, run_chunks
from kernel.cross_entropy_kernels import RowTiles, run_rows
from kernel.rms_norm_kernels import NormTiles, default_tiles
from kernel.rope import run_rope

Call = Callable[[], Any]
FP32 = torch.float32


def norm_inputs(rows: int, width: int, fused: bool):
    x = torch.randn(rows, width, device="cuda", dtype=BF16)
    residual = torch.randn(rows, width, device="cuda") if fused else None
    return x, residual, torch.randn(width, device="cuda", dtype=FP32 if fused else BF16)


NORM_SHAPES = [(16_384, 2048, False), (32_768, 768, True), (16_384, 2048, True)]


def norm_forward() -> Iterator[tuple[str, Call]]:
    for rows, width, fused in NORM_SHAPES:
        x, residual, weight = norm_inputs(rows, width, fused)
        for count, warps in ((1, 2), (1, 4), (1, 8), (2, 4), (2, 8), (4, 4), (4, 8)):
            tiles = replace(default_tiles(width), rows=count, warps=warps)
            name = f"{rows}x{width} fused={fused} rows={count} warps={warps}"
            yield name, lambda a=(x, residual, weight, 1e-5, BF16, tiles): rms_norm_kernels.run_forward(*a)


def norm_backward() -> Iterator[tuple[str, Call]]:
    for rows, width, fused in NORM_SHAPES:
        x, residual, weight = norm_inputs(rows, width, fused)
        _, stream, rstd = rms_norm_kernels.run_forward(x, residual, weight, 1e-5, BF16)
        dnormed, dstream = torch.randn_like(x), torch.randn_like(stream) if fused else None
        shapes = [(1, 4), (2, 4), (2, 8), (4, 8)] if width > 1024 else [(1, 4), (2, 4), (4, 4), (4, 8)]
        for prefetch, (count, warps), programs in product((True, False), shapes, (2, 3, 4, 6)):
            tiles = NormTiles(1, 4, count, warps, programs, prefetch)
            name = f"{rows}x{width} fused={fused} ahead={prefetch} rows={count} warps={warps} programs={programs}"
            saved = (stream, weight, rstd)
            yield name, lambda a=(saved, dnormed, dstream, BF16, tiles): rms_norm_kernels.run_backward(*a)


def swiglu_both() -> Iterator[tuple[str, Call]]:
    gate, up, dout = torch.randn(3, N, 8192, device="cuda", dtype=BF16)
    for block, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 8), (1024, 2)):
        yield f"forward block={block} warps={warps}", lambda a=(gate, up, block, warps): swiglu.run_forward(*a)
        yield f"backward block={block} warps={warps}", lambda a=(gate, up, dout, block, warps): swiglu.run_backward(*a)


def rope_warps() -> Iterator[tuple[str, Call]]:
    for B, T, H, K, D in ((4, 4096, 32, 8, 64), (32, 1024, 12, 12, 64), (4, 4096, 32, 8, 128)):
        q, k = (torch.randn(B, T, heads, D, device="cuda", dtype=BF16) for heads in (H, K))
        cos, sin = torch.randn(2, 1, T, 1, D, device="cuda")
        for warps in (1, 2, 4, 8):
            name = f"{B}x{T} H{H}/{K} D{D} warps={warps}"
            yield name, lambda a=(q, k, cos, sin, False, warps): run_rope(*a)


def loss_rows() -> Iterator[tuple[str, Call]]:
    """The kernel between the products, on a chunk of 4,096 rows."""
    for columns in (V, 50_304):
        logits = torch.randn(4096, columns, device="cuda", dtype=BF16)
        targets = torch.randint(columns, (4096,), device="cuda")
        statistics = torch.empty(4, 4096, device="cuda")
        numbers = (columns, 0, -100, 0.0, 1.0 / N)
        for block, warps in product((2048, 4096, 8192), (4, 8, 16)):
            arguments = (logits, targets, statistics, numbers, (True, True), RowTiles(block, warps))
            yield f"V={columns} block={block} warps={warps}", lambda a=arguments: run_rows(*a)


def loss_chunks() -> Iterator[tuple[str, Call]]:
    """The whole loss by bytes of a chunk and dtype of dW's sum."""
    x = torch.randn(N, C, device="cuda", dtype=BF16)
    weight = torch.randn(V, C, device="cuda", dtype=BF16) * 0.02
    targets = torch.randint(V, (N,), device="cuda")
    for megabytes in (192, 224, 256, 264, 320, 384, 512):  # 264 MiB: 4,224 rows, 132 x 32 tiles of 128 x 256
        for accumulate in (None, FP32):
            options = LossOptions(num_targets=N, chunk_bytes=megabytes << 20, accumulate=accumulate)
            name = f"chunk={megabytes} MiB sums={accumulate or BF16}"
            yield name, lambda a=(x, weight, targets, options, [True, True]): run_chunks(*a)
    wide = weight.float()
    options = LossOptions(num_targets=N)
    yield "chunk=256 MiB, float32 weight", lambda: run_chunks(x, wide, targets, options, [True, True])


def products() -> Iterator[tuple[str, Call]]:
    """The products of a block: forward, dx, dW in both dtypes; each projection alone, and packed side by side."""
    for rows, width, outs in (
        (32_768, 768, {"q": 768, "q k v": 2304, "gate": 2048, "gate up": 4096, "down": None}),
        (16_384, 2048, {"q": 2048, "q k v": 3072, "gate": 8192, "gate up": 16_384, "down": None}),
    ):
        for name, out in outs.items():
            inner, outer = (width, out) if out is not None else (outs["gate"], width)
            x = torch.randn(rows, inner, device="cuda", dtype=BF16)
            weight = torch.randn(outer, inner, device="cuda", dtype=BF16)
            dy = torch.randn(rows, outer, device="cuda", dtype=BF16)
            dx = torch.zeros(rows, inner, device="cuda", dtype=BF16)
            tera = 2e-12 * rows * inner * outer
            label = f"{name} {rows}x{inner}x{outer} ({tera:.4f} TFLOP)"
            yield f"{label} y", lambda x=x, w=weight: torch.mm(x, w.t())
            yield f"{label} dx", lambda dy=dy, w=weight: torch.mm(dy, w)
            yield f"{label} dx +=", lambda dx=dx, dy=dy, w=weight: dx.addmm_(dy, w)
            yield f"{label} dW bf16", lambda dy=dy, x=x: torch.mm(dy.t(), x)
            yield f"{label} dW fp32", lambda dy=dy, x=x: torch.ops.aten.mm.dtype(dy.t(), x, FP32)


SWEEPS: dict[str, Callable[[], Iterator[tuple[str, Call]]]] = {
    "norm_forward": norm_forward,
    "norm_backward": norm_backward,
    "swiglu": swiglu_both,
    "rope": rope_warps,
    "loss_rows": loss_rows,
    "loss_chunks": loss_chunks,
    "products": products,
}


def measure(call: Call, long: bool) -> dict[str, Any]:
    try:
        return {"ms": time_ms(call, 200) if long else graph_ms(call, 20)}
    except (RuntimeError, ValueError, AssertionError) as error:
        torch.cuda.synchronize()
        return {"error": f"{type(error).__name__}: {str(error)[:120]}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(SWEEPS), choices=list(SWEEPS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this sweep needs a CUDA GPU and none was found; run it on one")
    results: dict[str, dict[str, Any]] = {}
    for sweep in arguments.only:
        found = results[sweep] = {}
        for name, call in SWEEPS[sweep]():
            found[name] = measure(call, sweep == "loss_chunks")
            print(f"{sweep:14} {name:60}", found[name].get("error") or f"{found[name]['ms']:.4f} ms", flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        torch.cuda.empty_cache()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
