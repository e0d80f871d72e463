"""The products of a decoding step of a few rows: kernel/few_rows in several configurations beside cuBLAS.

    python -m bench_mark.bench_mark_engine_rows --out rows.json      # on a GPU; about 60 s

Each product runs over the weights of 16 layers one after the other, so that none is in L2, in a CUDA graph. Bound: the
weights' bytes at the copy rate measured here. What is found becomes FewRowsConfig's default.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from bench_mark.bench_mark_flash_attention_cases import measured_peaks
from configs.version import git_commit
from kernel.few_rows import ProductConfig, product, swiglu_product
from kernel.swiglu import run_forward as swiglu

LAYERS = 16
SHAPES = {
    "qkv": (3072, 2048),
    "out": (2048, 2048),
    "gated": (16384, 2048),
    "down": (2048, 8192),
    "scores": (32768, 2048),
}
CANDIDATES = {
    "qkv": [(64, 64, 2, 5), (64, 128, 2, 3), (64, 64, 3, 5), (32, 128, 1, 4), (128, 64, 4, 4)],
    "out": [(64, 64, 4, 5), (64, 128, 4, 3), (64, 128, 4, 4), (128, 64, 8, 4)],
    "gated": [(64, 64, 1, 5), (64, 64, 1, 8), (64, 128, 1, 3), (32, 128, 1, 4)],
    "down": [(64, 64, 4, 5), (64, 128, 4, 4), (64, 128, 4, 6), (128, 64, 8, 6), (64, 64, 8, 5)],
    "scores": [(128, 64, 1, 4), (128, 128, 1, 3), (64, 64, 1, 5)],
}  # block_n, block_c, parts, stages


def graph_us(step: Callable[[], None], repeats: int = 20) -> float:
    """Median microseconds of a replay of `step`."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times[3:])


def runner(name: str, weights: list[Tensor], x: Tensor, config: ProductConfig, pdl: bool) -> Callable[[], None]:
    """All layers by our kernels."""
    (M, _), N = x.shape, weights[0].shape[0]
    if name == "gated":
        out = torch.empty(M, N // 2, dtype=x.dtype, device="cuda")
        return lambda: [swiglu_product(x, weight, out, config, pdl) for weight in weights]
    kind = x.dtype if config.parts == 1 else torch.float32
    out = torch.empty(config.parts, M, N, dtype=kind, device="cuda")
    return lambda: [product(x, weight, out, config, pdl) for weight in weights]


def by_cublas(name: str, weights: list[Tensor], x: Tensor) -> Callable[[], None]:
    """The same by PyTorch, with our SwiGLU kernel after the gated product."""

    def step() -> None:
        for weight in weights:
            y = F.linear(x, weight)
            if name == "gated":
                swiglu(*y.chunk(2, dim=-1))

    return step


def candidates(name: str) -> list[tuple[ProductConfig, bool]]:
    """Every tile with overlap; the first also with eight warps, and without."""
    found = [(ProductConfig(*tile), True) for tile in CANDIDATES[name]]
    first = found[0][0]
    return [*found, (replace(first, warps=8), True), (first, False)]


def error_of(name: str, weight: Tensor, x: Tensor, config: ProductConfig) -> float:
    """The largest difference to PyTorch, in units of the largest result."""
    (M, _), N = x.shape, weight.shape[0]
    expected = F.linear(x, weight).float()
    if name == "gated":
        out = torch.empty(M, N // 2, dtype=x.dtype, device="cuda")
        swiglu_product(x, weight, out, config, True)
        gate, up = expected.chunk(2, dim=-1)
        expected, found = F.silu(gate) * up, out.float()
    else:
        parts = torch.empty(config.parts, M, N, dtype=torch.float32, device="cuda")
        product(x, weight, parts, config, True)
        found = parts.sum(0)
    return ((found - expected).abs().max() / expected.abs().max()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[64])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA GPU and none was found; run it on one")
    rate = measured_peaks().memory_bytes
    document = {"commit": git_commit(), "torch": torch.__version__, "device": torch.cuda.get_device_name()}
    print(f"{document['device']} · bfloat16 · torch {torch.__version__} · commit {document['commit']}")
    print(f"{'product':12} {'bound us':>9} {'us':>8} {'ratio':>6}  a layer; configuration")
    document["rows"] = []
    for rows, (name, (N, C)) in itertools.product(arguments.rows, SHAPES.items()):
        layers = 4 if name == "scores" else LAYERS
        weights = [torch.randn(N, C, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(layers)]
        x = torch.randn(rows, C, device="cuda", dtype=torch.bfloat16)
        bound = 1e6 * weights[0].nbytes / rate
        timed = [(graph_us(by_cublas(name, weights, x)) / layers, "cuBLAS", 0.0)]
        for config, pdl in candidates(name):
            error = error_of(name, weights[0], x, config)
            timed.append((graph_us(runner(name, weights, x, config, pdl)) / layers, f"{config} pdl={pdl}", error))
        document["rows"] += [dict(rows=rows, name=name, bound_us=bound, us=u, what=w, error=e) for u, w, e in timed]
        for us, what, error in [timed[0], *sorted(timed[1:])[:4]]:
            print(
                f"{name + ' ' + str(rows):12} {bound:9.2f} {us:8.2f} {bound / us:6.2f}  {error:.1e} {what}", flush=True
            )
        if arguments.out:
            arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
