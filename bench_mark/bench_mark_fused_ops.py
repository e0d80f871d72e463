"""The fused operations on a GPU: predicted, measured, ratio and bound beside PyTorch, torch.compile and Liger.

Small operations are replayed from a CUDA graph with L2 emptied before each, so that the device's time is compared and
not the host's; the loss and AdamW, of milliseconds, are timed as they are called. Bandwidth and matmul rate are of the
same run. The last line is JSON.

    python3 -m bench_mark.bench_mark_fused_ops --out fused_ops.json
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from bench_mark.bench_mark_flash_attention_cases import measured_peaks, time_ms
from bench_mark.bench_mark_fused_ops_cases import CASES, Case, Operation
from bench_mark.bench_mark_fused_ops_long import measure_adamw, measure_loss
from configs.version import git_commit
from kernel.cost_model import KernelWork, Peaks, predict


def device_ms(call: Callable[[], Any], stream: torch.cuda.Stream, rep_ms: int) -> float:
    """Median milliseconds of what `call` launches, replayed from a graph captured on `stream`."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return time_ms(graph.replay, rep_ms)


def time_operation(operation: Operation, inputs: list[Tensor], rep_ms: int) -> dict[str, float]:
    """Milliseconds of forward and of backward, on the device."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # backward runs on the stream of its forward, which must be the capturing one
        for _ in range(3):
            outputs = operation(*inputs)
            upstream = [torch.randn_like(out) for out in outputs]
            torch.autograd.grad(outputs, inputs, upstream, retain_graph=True)
    forward = device_ms(lambda: operation(*inputs), stream, rep_ms)
    backward = device_ms(lambda: torch.autograd.grad(outputs, inputs, upstream, retain_graph=True), stream, rep_ms)
    return {"forward": forward, "backward": backward}


def contestant(operation: Operation, case: Case, rep_ms: int) -> dict[str, Any]:
    """Times and TB/s by the bytes of the operation, or why there are none: the others' figures stay."""
    try:
        times = time_operation(operation, case.inputs(), rep_ms)
    except (RuntimeError, ValueError, AssertionError, TypeError) as error:
        torch.cuda.synchronize()
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    works: dict[str, KernelWork] = {"forward": case.forward, "backward": case.backward}
    return {name: {"ms": times[name], "tb_per_s": work.bytes / times[name] * 1e-9} for name, work in works.items()}


def measure_case(case: Case, peaks: Peaks, rep_ms: int) -> dict[str, Any]:
    predictions = {"forward": predict(case.forward, peaks), "backward": predict(case.backward, peaks)}
    return {
        "case": case.name,
        "found": {name: contestant(operation, case, rep_ms) for name, operation in case.contestants.items()},
        "predicted": {name: {"ms": 1e3 * p.seconds, "bound": p.bound} for name, p in predictions.items()},
    }


def print_case(row: dict[str, Any]) -> None:
    for name, predicted in row["predicted"].items():
        mine = row["found"]["mew"]
        head = f"{row['case']:24} {name:9}"
        if "error" in mine:
            print(f"{head} {mine['error']}")
            continue
        rates = {
            who: f"{found[name]['tb_per_s']:.2f}" if "error" not in found else "failed"
            for who, found in row["found"].items()
        }
        ms = mine[name]["ms"]
        print(f"{head} {predicted['ms']:9.4f} {ms:9.4f} {ms / predicted['ms']:6.2f} {predicted['bound']:7}", rates)


def print_long(row: dict[str, Any]) -> None:
    """The loss and AdamW: milliseconds, and extra memory where it was taken."""
    predicted = row["predicted"]
    for who, found in row["found"].items():
        head = f"{row['case']:24} {who:26}"
        if "error" in found:
            print(f"{head} {found['error']}")
            continue
        extra = f"  extra {found['extra_bytes'] * 1e-9:.3f} GB" if "extra_bytes" in found else ""
        ratio = found["ms"] / predicted["ms"]
        print(f"{head} {predicted['ms']:8.3f} {found['ms']:8.3f} {ratio:6.2f} {predicted['bound']:7}{extra}")


def describe_machine() -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(),
        "dtype": "bfloat16",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": git_commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the JSON goes, besides the last line")
    parser.add_argument("--only", nargs="*", default=[], help="names of operations to measure, as they begin")
    parser.add_argument("--rep-ms", type=int, default=60, help="milliseconds to repeat each measurement for")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA GPU and none was found; run it on one")
    torch._functorch.config.donated_buffer = False  # a compiled backward is repeated here
    machine, peaks = describe_machine(), measured_peaks()
    print(f"{machine['device']} · bf16 · torch {machine['torch']} · triton {machine['triton']} · {machine['commit']}")
    print(f"matmul {peaks.matmul_flops * 1e-12:.0f} TFLOP/s, copy {peaks.memory_bytes * 1e-12:.2f} TB/s")
    document: dict[str, Any] = machine | {"peaks": vars(peaks), "operations": []}

    def keep(row: dict[str, Any]) -> dict[str, Any]:
        """Written after each row, so that a run cut short leaves what it has measured."""
        document["operations"].append(row)
        if arguments.out:
            arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        torch.cuda.empty_cache()
        return row

    def wanted(name: str) -> bool:
        return not arguments.only or any(name.startswith(prefix) for prefix in arguments.only)

    print(f"{'operation':24} {'pass':9} {'pred ms':>9} {'meas ms':>9} {'ratio':>6} bound   TB/s")
    for make in CASES:
        case = make()
        if wanted(case.name):
            print_case(keep(measure_case(case, peaks, arguments.rep_ms)))
    print(f"{'operation':24} {'contestant':26} {'pred ms':>8} {'meas ms':>8} {'ratio':>6} bound")
    for name, measure in {"cross_entropy": measure_loss, "adamw": measure_adamw}.items():
        if wanted(name):
            print_long(keep(measure(peaks)))
    print(json.dumps(document))


if __name__ == "__main__":
    main()
