"""Decode attention on a GPU: predicted, measured, ratio and bound, beside PyTorch's kernels, and of the copy bandwidth.

One new token (or a few) a sequence over bf16 caches, contiguous and in pages, equal and unequal lengths. Every key and
value counts once. "graph" is the same call replayed from a CUDA graph, so without the host. --sweep times a grid of
configurations before. The last line is JSON.

    python3 -m bench_mark.bench_mark_flash_attention_decode --out flash_attention_decode.json --sweep
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench_mark.bench_mark_flash_attention_cases import measured_peaks, relative_error, time_ms
from configs.version import git_commit
from kernel.cost_model import AttentionShape, Peaks, attention_decode, predict
from kernel.flash_attention_triton_decode import (
    DecodeCache,
    DecodeCall,
    DecodeConfig,
    DecodeOptions,
    flash_attention_decode,
    run_decode,
)


@dataclass(frozen=True)
class DecodeCase:
    """B sequences of S tokens (uneven: of S / 2 on average), T new ones each; page_size 0: contiguous."""

    name: str
    B: int
    S: int
    H: int
    K: int
    D: int
    T: int = 1
    page_size: int = 0
    uneven: bool = False

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(self.B, self.T, self.S, self.H, self.K, self.D)


CASES = [
    DecodeCase("B64 S8192 H32/4 D128", 64, 8192, 32, 4, 128),
    DecodeCase("B64 S8192 H64/8 D128", 64, 8192, 64, 8, 128),
    DecodeCase("the same, pages of 16", 64, 8192, 64, 8, 128, page_size=16),
    DecodeCase("the same, pages of 64", 64, 8192, 64, 8, 128, page_size=64),
    DecodeCase("the same, uneven, 64", 64, 8192, 64, 8, 128, page_size=64, uneven=True),
    DecodeCase("the same, 4 tokens", 64, 8192, 64, 8, 128, T=4),
    DecodeCase("B64 S8192 H32/4 D64", 64, 8192, 32, 4, 64),
    DecodeCase("B1 S131072 H32/8 D128", 1, 131072, 32, 8, 128),
    DecodeCase("B8 S2048 H32/8 D128", 8, 2048, 32, 8, 128),
]
# (keys a tile, warps, stages, programs that a processor holds)
SWEPT = [
    (64, 4, 3, 3), (64, 4, 3, 2), (64, 4, 3, 6), (64, 4, 2, 3), (64, 4, 2, 6), (64, 4, 4, 2), (64, 2, 3, 3),
    (32, 1, 4, 4), (32, 1, 5, 3), (32, 2, 4, 4), (128, 4, 2, 2), (128, 4, 3, 1), (128, 8, 2, 2), (128, 4, 3, 3),
    (128, 8, 3, 2),
]  # fmt: skip
SWEPT_CASES = [0, 2, 6, 7, 8]  # of CASES


def lengths_of(case: DecodeCase) -> Tensor:
    """(B,) int32: S each, or log-normal with a mean near S / 2 and none above S."""
    if not case.uneven:
        return torch.full((case.B,), case.S, dtype=torch.int32)
    weights = torch.randn(case.B, generator=torch.Generator().manual_seed(0)).exp()
    return (weights / weights.mean() * case.S / 2).clamp(1, case.S).int()


def make_inputs(case: DecodeCase) -> tuple[Tensor, DecodeCache]:
    """Fresh normal numbers; pages in random order."""
    q = torch.randn(case.B, case.T, case.H, case.D, device="cuda", dtype=torch.bfloat16)
    shape, table = (case.B, case.S, case.K, case.D), None
    if case.page_size:
        per_row = case.S // case.page_size
        shape = (case.B * per_row, case.page_size, case.K, case.D)
        table = torch.randperm(case.B * per_row, device="cuda").int().view(case.B, per_row)
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return q, DecodeCache(k, v, lengths_of(case).cuda(), table)


def ours(case: DecodeCase, q: Tensor, cache: DecodeCache) -> Callable[[], Tensor]:
    options = DecodeOptions(max_length=case.S)
    return lambda: flash_attention_decode(q, cache.k, cache.v, cache.lens, cache.table, options)[0]


def peers(case: DecodeCase, q: Tensor, cache: DecodeCache) -> dict[str, Callable[[], Callable[[], Tensor]]]:
    """PyTorch's kernels, where they take the case: contiguous, one new token, equal lengths."""
    if case.page_size or case.T > 1 or case.uneven:
        return {}
    q, k, v = (x.transpose(1, 2) for x in (q, cache.k, cache.v))

    def sdpa(backend: SDPBackend) -> Callable[[], Tensor]:
        def call() -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

        return call

    def flex() -> Callable[[], Tensor]:
        from torch.nn.attention.flex_attention import flex_attention

        torch._dynamo.reset()
        compiled = torch.compile(flex_attention, dynamic=False)
        return lambda: compiled(q, k, v, enable_gqa=True).transpose(1, 2)

    return {
        "flash": lambda: sdpa(SDPBackend.FLASH_ATTENTION),
        "cudnn": lambda: sdpa(SDPBackend.CUDNN_ATTENTION),
        "flex": flex,
    }


def measure(make: Callable[[], Callable[[], Tensor]], expected: Tensor | None, copy_s: float) -> dict[str, Any]:
    """ms, graph ms and share of the copy bandwidth, given the seconds of a copy; or why there is none."""
    try:
        call = make()
        found: dict[str, Any] = {"ms": time_ms(call)}
        if expected is not None:
            found["difference"] = relative_error(call(), expected)
        found["graph_ms"] = triton.testing.do_bench_cudagraph(call, rep=50, return_mode="median")
    except (RuntimeError, ValueError, AssertionError) as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"}
    return found | {"of_copy": 1e3 * copy_s / found["graph_ms"]}


def measure_case(case: DecodeCase, peaks: Peaks) -> dict[str, Any]:
    """All contestants of one case; differences are against ours, which the tests hold to float64."""
    q, cache = make_inputs(case)
    work = attention_decode(case.shape, float(cache.lens.sum()))
    prediction, copy_s = predict(work, peaks), work.bytes / peaks.memory_bytes
    call = ours(case, q, cache)
    found = {"mew": measure(lambda: call, None, copy_s)}
    expected = call()
    for name, make in peers(case, q, cache).items():
        found[name] = measure(make, expected, copy_s)
    return {
        "case": asdict(case),
        "predicted": {"ms": 1e3 * prediction.seconds, "bound": prediction.bound},
        "results": found,
    }


def print_case(row: dict[str, Any]) -> None:
    mine, predicted = row["results"]["mew"], row["predicted"]
    name = f"{row['case']['name']:22}"
    if "error" in mine:
        print(name, mine["error"])
        return
    rest = {name: f"{r['of_copy']:.0%}" if "of_copy" in r else "failed" for name, r in row["results"].items()}
    print(
        f"{name} {predicted['ms']:8.4f} {mine['graph_ms']:8.4f} {mine['graph_ms'] / predicted['ms']:6.2f} "
        f"{predicted['bound']:7} {mine['ms']:8.4f}", rest,
    )  # fmt: skip


def compile_variant(index: int, values: tuple[int, ...]) -> str:
    """Run one configuration on a small case of the same kind, so that Triton's cache on disk has it; "" or a fault."""
    case = replace(CASES[index], S=512)
    q, cache = make_inputs(case)
    try:
        run_decode(q, cache, DecodeCall(case.D**-0.5, 0.0, 0, case.S), DecodeConfig(*values))
        torch.cuda.synchronize()
    except Exception as error:  # whatever it is, the sweep shows it and goes on
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return ""


def sweep(peaks: Peaks, workers: int) -> list[dict[str, Any]]:
    """Every configuration of SWEPT on SWEPT_CASES, by graph time, best first; compiled side by side before."""
    variants = [(index, values) for index in SWEPT_CASES for values in SWEPT]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        faults = list(pool.map(compile_variant, *zip(*variants, strict=True)))
    rows = []
    for (index, values), fault in zip(variants, faults, strict=True):
        case, row = CASES[index], {"case": CASES[index].name, "config": values}
        if fault:
            rows.append(row | {"error": fault})
            continue
        q, cache = make_inputs(case)
        call, config = DecodeCall(case.D**-0.5, 0.0, 0, case.S), DecodeConfig(*values)
        run = lambda q=q, cache=cache, call=call, config=config: run_decode(q, cache, call, config)  # noqa: E731
        ms = triton.testing.do_bench_cudagraph(run, rep=30, return_mode="median")
        share = attention_decode(case.shape).bytes / peaks.memory_bytes / ms * 1e3
        rows.append(row | {"ms": ms, "of_copy": share})
    return sorted(rows, key=lambda row: (row["case"], -row.get("of_copy", 0.0)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where the JSON goes, besides the last line")
    parser.add_argument("--sweep", action="store_true", help="time the configurations first")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile for the sweep")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA GPU and none was found; run it on one")
    torch.manual_seed(int(time.time()))  # fresh inputs in every run
    document: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dtype": "bfloat16",
        "commit": git_commit(),
        "date": time.strftime("%Y-%m-%d"),
    }
    print(" · ".join(document.values()))
    peaks = measured_peaks()
    document["peaks"] = vars(peaks)
    print(f"matmul {peaks.matmul_flops * 1e-12:.0f} TFLOP/s, copy {peaks.memory_bytes * 1e-12:.2f} TB/s", flush=True)
    if arguments.sweep:
        document["sweep"] = sweep(peaks, arguments.workers)
        for row in document["sweep"]:
            print(f"{row['case']:22} {row['config']!s:22}", row.get("error") or f"{row['of_copy']:.1%}", flush=True)
    print(f"{'case':22} {'pred ms':>8} {'graph ms':>8} {'ratio':>6} bound   {'call ms':>8} of the copy bandwidth")
    document["cases"] = []
    for case in CASES:
        document["cases"].append(measure_case(case, peaks))
        print_case(document["cases"][-1])
        if arguments.out:  # after each case, so that a run cut short leaves what it has measured
            arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
