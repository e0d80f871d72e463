"""Attention on a GPU: predicted, measured, ratio and bound beside cuDNN, PyTorch's flash kernel and FlexAttention.

All in one run, bf16, causal: forward and backward of the shapes in bench_mark_flash_attention_cases, packed documents
against one document, and the errors against float64 as multiples of those of PyTorch's kernel. The last line is JSON.

    python3 -m bench_mark.bench_mark_flash_attention --out flash_attention.json
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend

from bench_mark.bench_mark_flash_attention_cases import (
    CASES,
    Case,
    document_ids,
    document_lengths,
    exact_attention,
    flex,
    heads_first,
    make_inputs,
    measured_peaks,
    peers,
    relative_error,
    sdpa,
    time_passes,
)
from kernel.cost_model import Peaks, attention_backward, attention_forward, document_pairs, predict
from kernel.flash_attention_ranges import document_ranges
from kernel.flash_attention_triton import AttentionMask, flash_attention

*CAUSAL_CASES, PACKED = CASES
PASSES = ("forward", "backward")


def ours(mask: AttentionMask = AttentionMask(), deterministic: bool = False) -> Callable[..., Tensor]:
    return lambda q, k, v: flash_attention(q, k, v, mask, deterministic=deterministic)[0]


def contestant(make: Callable[[], Any], tensors: list[Tensor], captured: bool = True) -> dict[str, Any]:
    """Its times, or why it has none: one that fails must not take the others' figures with it."""
    try:
        return time_passes(make(), tensors, captured)
    except (RuntimeError, ValueError, AssertionError) as error:
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}


def rates(case: Case, pairs: float, times: dict[str, Any]) -> dict[str, Any]:
    """Times in ms to TFLOP/s of each pass, of both together, and of both without the host (device)."""
    if "error" in times:
        return times
    works = {"forward": attention_forward(case.shape, pairs), "backward": attention_backward(case.shape, pairs)}
    rows = {name: {"ms": times[name], "tflops": works[name].flops / times[name] * 1e-9} for name in PASSES}
    flops = sum(work.flops for work in works.values())
    both = {"both": times["forward"] + times["backward"]} | {key: times[key] for key in ("device",) if key in times}
    for name, ms in both.items():
        rows[name] = {"ms": ms, "tflops": flops / ms * 1e-9}
    return rows


def measure_case(case: Case, peaks: Peaks) -> dict[str, Any]:
    """All contestants of one shape, and the prediction."""
    tensors = make_inputs(case)
    found = {"mew": contestant(ours, tensors)}
    transposed = heads_first(tensors)
    for name, make in peers(case).items():
        found[name] = contestant(make, transposed, captured=name != "flex")
    predictions = {
        "forward": predict(attention_forward(case.shape, case.pairs), peaks),
        "backward": predict(attention_backward(case.shape, case.pairs), peaks),
    }
    return {
        "case": case.name,
        "rates": {name: rates(case, case.pairs, times) for name, times in found.items()},
        "predicted": {name: {"ms": 1e3 * p.seconds, "bound": p.bound} for name, p in predictions.items()},
    }


def measure_packed() -> dict[str, Any]:
    """TFLOP/s inside 32 documents of mixed length, over that of one document of as many tokens."""
    lengths, doc_ids = document_lengths(PACKED.T), document_ids(PACKED.T)
    tensors = make_inputs(PACKED)
    mask = AttentionMask(ranges=document_ranges(doc_ids[None]))
    found = {
        "one document": rates(PACKED, PACKED.pairs, contestant(ours, tensors)),
        "mew": rates(PACKED, document_pairs(lengths), contestant(lambda: ours(mask), tensors)),
        "flex": rates(
            PACKED, document_pairs(lengths), contestant(lambda: flex(PACKED.T, doc_ids), heads_first(tensors), False)
        ),
    }
    return {"lengths": lengths, "rates": found}


def errors_of(attend: Callable[..., Tensor], tensors: list[Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Relative errors of out, dq, dk, dv of a kernel; tensors and results in the layout of `exact`."""
    q, k, v, dout = tensors
    out = attend(q, k, v)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    results = dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))
    return {name: relative_error(result, exact[name]) for name, result in results.items()}


def measure_errors(case: Case, dtype: torch.dtype, factor: float) -> dict[str, float]:
    """Our errors against float64, as multiples of those of PyTorch's flash kernel, queries scaled by `factor`."""
    q, k, v, dout = make_inputs(case, dtype)
    q = (q.detach() * factor).requires_grad_()
    precise = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, exact_lse = exact_attention(*precise)
    gradients = torch.autograd.grad(out, precise, dout.double())
    exact = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))
    mine = errors_of(ours(), [q, k, v, dout], exact)
    turned = {name: x.transpose(1, 2) for name, x in exact.items()}
    theirs = errors_of(sdpa(SDPBackend.FLASH_ATTENTION), heads_first([q, k, v, dout]), turned)
    with torch.no_grad():
        mine["lse"] = relative_error(flash_attention(q, k, v)[1], exact_lse)
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        theirs["lse"] = relative_error(flash(*heads_first([q, k, v]), is_causal=True)[1][..., : case.T], exact_lse)
    return {name: mine[name] / theirs[name] if theirs[name] else math.nan for name in mine}


def host_us(call: Callable[[], Any]) -> float:
    """Microseconds a call, queued one after another: what the host needs where the device has little to do."""
    for repeats in (10, 200):  # the first ten warm up
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            call()
    return (time.perf_counter() - started) / 200 * 1e6


def measure_host() -> dict[str, float]:
    """The host's time for a forward, and for a forward with its backward, of a tiny shape: ours and cuDNN's."""
    case = Case("host", 1, 128, 2, 2, 64)
    found = {}
    for name, attend in {"mew": ours(), "cudnn": peers(case)["cudnn"]()}.items():
        tensors = make_inputs(case)
        q, k, v, dout = tensors if name == "mew" else heads_first(tensors)
        found[f"{name} forward"] = host_us(partial(attend, q, k, v))
        found[f"{name} both"] = host_us(partial(forward_and_backward, attend, q, k, v, dout))
    return found


def forward_and_backward(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
    torch.autograd.grad(attend(q, k, v), (q, k, v), dout)


def print_case(row: dict[str, Any]) -> None:
    for name in PASSES:
        predicted = row["predicted"][name]
        mine = row["rates"]["mew"]
        head = f"{row['case']:20} {name:9}"
        if "error" in mine:
            print(f"{head} {mine['error']}")
            continue
        rest = {k: f"{r[name]['tflops']:.0f}" if "error" not in r else "failed" for k, r in row["rates"].items()}
        ratio = mine[name]["ms"] / predicted["ms"]
        print(f"{head} {predicted['ms']:8.3f} {mine[name]['ms']:8.3f} {ratio:6.2f} {predicted['bound']:7}", rest)
    device = {k: f"{r['device']['tflops']:.0f}" for k, r in row["rates"].items() if "device" in r}
    print(f"{row['case']:20} both, from a CUDA graph", device)


def describe_machine() -> dict[str, str]:
    """Device, versions and day of a run."""
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def timed(title: str, call: Callable[[], Any]) -> Any:
    started = time.monotonic()
    result = call()
    print(f"-- {title}: {time.monotonic() - started:.0f} s", flush=True)
    torch.cuda.empty_cache()
    return result


def measure_all_errors() -> dict[str, dict[str, float]]:
    found = {}
    for D in (64, 128):
        for factor in (1.0, 30.0):
            case = Case("errors", 2, 1000, 4, 4, D)
            found[f"D{D} bf16 x{factor:.0f}"] = measure_errors(case, torch.bfloat16, factor)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where the JSON goes, besides the last line")
    parser.add_argument("--cases", type=int, default=len(CAUSAL_CASES), help="how many of the shapes")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA GPU and none was found; run it on one")
    torch.manual_seed(int(time.time()))  # fresh inputs in every run
    print(f"{torch.cuda.get_device_name()} · bf16 · torch {torch.__version__} · triton {triton.__version__}")
    peaks = timed("peaks", measured_peaks)
    print(f"matmul {peaks.matmul_flops * 1e-12:.0f} TFLOP/s, copy {peaks.memory_bytes * 1e-12:.2f} TB/s")
    document: dict[str, Any] = describe_machine() | {"peaks": vars(peaks)}

    def keep(name: str, rows: Any) -> Any:
        """Written after each part, so that a run cut short leaves what it has measured."""
        document[name] = rows
        if arguments.out:
            arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return rows

    host = keep("host_us", timed("host, microseconds a call", measure_host))
    print({key: f"{value:.0f}" for key, value in host.items()})
    for name, row in keep("packed", timed("packed documents", measure_packed))["rates"].items():
        print(f"{name:16}", row.get("error") or {key: f"{value['tflops']:.0f}" for key, value in row.items()})
    print(f"{'case':20} {'pass':9} {'pred ms':>8} {'meas ms':>8} {'ratio':>6} bound   TFLOP/s")
    rows: list[dict[str, Any]] = []
    for case in CAUSAL_CASES[: arguments.cases]:
        rows.append(timed(case.name, lambda case=case: measure_case(case, peaks)))
        keep("cases", rows)
        print_case(rows[-1])
    for name, row in keep("errors", timed("errors over those of PyTorch's flash kernel", measure_all_errors)).items():
        print(f"{name:16}", {key: f"{value:.2f}" for key, value in row.items()}, "(at most 1.5)")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
