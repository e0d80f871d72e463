"""Context parallelism: what cutting a sequence costs on one device, and on several, beside torch's context_parallel.

One rank: the blocks of a ring of 4 and of 8 ranks, played one after the other, over one kernel for the whole sequence
(bound: 1.10 from 64K tokens on). Several ranks: attention forward and backward of one layer by one device alone, by
ring, gathered keys and Ulysses, and by torch's context_parallel where it runs: time, memory and bytes of a rank, and
the throughput over that of one device (bound: 1.85 at 64K tokens on two). bench_mark_cp_predictions says what is
predicted from. The last line is one JSON document.

    python -m bench_mark.bench_mark_cp                                     # one GPU; --device cpu plays small ones
    torchrun --nproc-per-node=2 -m bench_mark.bench_mark_cp
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench_mark.bench_mark_cp_predictions import CALIBRATED_TOKENS, HOST_TOKENS, Rates, calibrated, simulated_s
from bench_mark.bench_mark_cp_ranks import WAYS, measure_ranks
from bench_mark.bench_mark_cp_simulation import SimulatedRing, simulated_ring
from bench_mark.bench_mark_model_report import facts, write_document
from kernel.cost_model import AttentionShape, Peaks, exp_rate
from llm.args import HardwareConfig
from llm.hardware import Hardware, detect_hardware
from llm.transformer import ScaledDotProductAttention
from llm.transformer_context import make_context
from parallel.context_parallel_blocks import Rows
from parallel.mesh import close_mesh, init_mesh, read_ranks
from parallel.mesh_degrees import Degrees

LENGTHS = {"cuda": "16384,32768,65536,131072", "cpu": "128,256"}
RINGS = (4, 8)
BOUND, BOUND_FROM = 1.10, 65536
AGREEMENT = {"float32": 1e-4, "bfloat16": 2e-2}  # a ring rounds as often as one kernel does


def median_s(call: Callable[[], Any], device: torch.device, repeats: int, warmup: int) -> float:
    """Median seconds of a call, the device's queue empty before and after it."""
    seconds = []
    for index in range(warmup + repeats):
        synchronise(device)
        began = time.perf_counter()
        call()
        synchronise(device)
        if index >= warmup:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_inputs(shape: AttentionShape, device: torch.device) -> list[Tensor]:
    """q, k, v, dout of one layer, bfloat16 on a GPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads = (shape.H, shape.K, shape.K, shape.H)
    return [torch.randn(shape.B, shape.T, count, shape.D, device=device).to(dtype) for count in heads]


def measure_ring(ring: SimulatedRing, inputs: list[Tensor], timing: dict[str, Any]) -> tuple[float, float]:
    """Seconds of forward and of backward of all ranks of a ring, one after the other; of one rank: one kernel."""
    *shares, dout = (ring.cut(x) for x in inputs)
    results = ring.forward(*shares)
    rows = [Rows(out, lse, share) for (out, lse), share in zip(results, dout, strict=True)]
    forward = median_s(lambda: ring.forward(*shares), **timing)
    return forward, median_s(lambda: ring.backward(*shares, rows), **timing)


def measure_one_kernel(backend: str, inputs: list[Tensor], timing: dict[str, Any]) -> tuple[float, float]:
    """The same by one call of the attention for the whole sequence, with results of its own."""
    device = inputs[0].device
    q, k, v, dout = (x.detach().requires_grad_(index < 3) for index, x in enumerate(inputs))
    ctx = make_context(torch.zeros(q.shape[:2], dtype=torch.int64, device=device))
    attend = ScaledDotProductAttention(backend)
    out, _ = attend(q, k, v, ctx)
    with torch.no_grad():
        forward = median_s(lambda: attend(q, k, v, ctx), **timing)
    return forward, median_s(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), **timing)


def ring_results(ranks: int, backend: str, inputs: list[Tensor]) -> list[Tensor]:
    """out, dq, dk and dv of a ring."""
    ring = simulated_ring(inputs[0].shape[1], ranks, backend, inputs[0].device)
    *shares, dout = (ring.cut(x) for x in inputs)
    results = ring.forward(*shares)
    rows = [Rows(out, lse, share) for (out, lse), share in zip(results, dout, strict=True)]
    return [ring.join(share) for share in ([out for out, _ in results], *ring.backward(*shares, rows))]


def whole_results(backend: str, inputs: list[Tensor]) -> list[Tensor]:
    """The same by one call."""
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    ctx = make_context(torch.zeros(q.shape[:2], dtype=torch.int64, device=q.device))
    out, _ = ScaledDotProductAttention(backend)(q, k, v, ctx)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])]


def calibrate(args: argparse.Namespace, backend: str, device: torch.device, peaks: Peaks | None) -> Rates | None:
    """The kernel's own rates at a length that no row has; None without known peaks."""
    if peaks is None:
        return None
    shape = AttentionShape(1, CALIBRATED_TOKENS, CALIBRATED_TOKENS, args.heads, args.kv_heads, args.head_dim)
    return calibrated(peaks, shape, measure_one_kernel(backend, make_inputs(shape, device), timing_of(args, device)))


def timing_of(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    return {"device": device, "repeats": args.repeats, "warmup": args.warmup}


def measure_local(
    args: argparse.Namespace, device: torch.device, rates: Rates | None, backend: str
) -> list[dict[str, Any]]:
    """One row a length, ring and pass."""
    rows, timing = [], timing_of(args, device)
    short = AttentionShape(1, HOST_TOKENS, HOST_TOKENS, args.heads, args.kv_heads, args.head_dim)
    host = {ranks: measured_s(short, ranks, backend, timing) for ranks in (1, *RINGS)} if rates else {}
    print(f"{'tokens':>8} {'ranks':>5} {'pass':9} {'predicted':>10} {'measured':>10} {'ratio':>6} {'of one':>7}  bound")
    for length in map(int, (args.lengths or LENGTHS[device.type]).split(",")):
        shape = AttentionShape(1, length, length, args.heads, args.kv_heads, args.head_dim)
        whole = measured_s(shape, 1, backend, timing)
        for ranks in (1, *RINGS):
            measured = whole if ranks == 1 else measured_s(shape, ranks, backend, timing)
            predicted = (None, None)
            if rates is not None:
                predicted = tuple(map(max, simulated_s(shape, ranks, rates), host[ranks]))
            both = ("both", sum(predicted) if rates else None, sum(measured), sum(whole))
            for row in (*zip(("forward", "backward"), predicted, measured, whole, strict=True), both):
                rows.append({"tokens": length, "ranks": ranks} | local_row(*row))
                print(show(rows[-1]), flush=True)
    return rows


def compare(args: argparse.Namespace, device: torch.device, backend: str) -> dict[str, float]:
    """Errors of one kernel ("1") and of rings by their ranks against float64: the largest, relative to the norm."""
    tokens = 2048 if device.type == "cuda" else 128
    inputs = make_inputs(AttentionShape(1, tokens, tokens, args.heads, args.kv_heads, args.head_dim), device)
    exact = whole_results("eager", [x.double() for x in inputs])
    found = {}
    for ranks in (1, *RINGS):
        ours = whole_results(backend, inputs) if ranks == 1 else ring_results(ranks, backend, inputs)
        pairs = zip(ours, exact, strict=True)
        found[str(ranks)] = max(float((x.double() - y).norm() / y.norm()) for x, y in pairs)
    words = ", ".join(f"{found[str(ranks)]:.1e} on {ranks} ranks" for ranks in RINGS)
    print(f"{tokens} tokens against float64: one kernel {found['1']:.1e}, rings {words}", flush=True)
    return found


def measured_s(shape: AttentionShape, ranks: int, backend: str, timing: dict[str, Any]) -> tuple[float, float]:
    """Seconds of forward and of backward of a ring on one device; one rank: of one kernel."""
    inputs = make_inputs(shape, timing["device"])
    if ranks == 1:
        return measure_one_kernel(backend, inputs, timing)
    return measure_ring(simulated_ring(shape.T, ranks, backend, timing["device"]), inputs, timing)


def local_row(name: str, predicted: float | None, measured: float, whole: float) -> dict[str, Any]:
    ratio = measured / predicted if predicted else None
    return {"pass": name, "predicted_s": predicted, "measured_s": measured, "ratio": ratio, "of_one": measured / whole}


def show(row: dict[str, Any]) -> str:
    predicted = "–" if row["predicted_s"] is None else f"{row['predicted_s'] * 1e3:.3f}"
    ratio = "–" if row["ratio"] is None else f"{row['ratio']:.2f}"
    bound = ""
    if row["pass"] == "both" and row["ranks"] > 1 and row["tokens"] >= BOUND_FROM:
        bound = f"{BOUND} {'met' if row['of_one'] <= BOUND else 'missed'}"
    return (
        f"{row['tokens']:>8} {row['ranks']:>5} {row['pass']:9} {predicted:>10} {row['measured_s'] * 1e3:>10.3f} "
        f"{ratio:>6} {row['of_one']:>7.3f}  {bound}"
    )


def peaks_of(hardware: Hardware, device: torch.device) -> Peaks | None:
    """The datasheet's rates of this GPU; None on a CPU or an unknown one."""
    if device.type == "cpu" or hardware.bf16_flops is None or hardware.memory_bytes_per_s is None:
        return None
    properties = torch.cuda.get_device_properties(device)
    clock_hz = getattr(properties, "clock_rate", 1_755_000) * 1e3
    exps = exp_rate(properties.multi_processor_count, clock_hz)
    return Peaks(hardware.bf16_flops, exps, hardware.memory_bytes_per_s)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", default=None, help="tokens of a sequence, separated by commas")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--backend", default=None, choices=("triton", "mock", "eager"))
    parser.add_argument("--ways", default=",".join(WAYS), help="of several ranks; 'of one' needs alone among them")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", default=None)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    ranks = read_ranks()[1]
    mesh = init_mesh(args.device, degrees=Degrees(dp=1, cp=ranks))
    device = mesh.device
    hardware = detect_hardware(HardwareConfig(), device, dtype="bfloat16" if device.type == "cuda" else "float32")
    known = facts(hardware, "bfloat16" if device.type == "cuda" else "float32") | {"ranks": ranks, "args": vars(args)}
    if mesh.is_main:
        head = (known["hardware"], f"{ranks} ranks", known["dtype"], f"torch {known['torch']}", known["commit"])
        print(" · ".join(head))
        if device.type == "cpu":
            print("no GPU: blocks of short sequences by eager attention, so no bound is judged; torch's peer needs one")
    backend = args.backend or ("triton" if device.type == "cuda" else "eager")
    if ranks == 1:
        known["errors"] = compare(args, device, backend)
    rates = calibrate(args, backend, device, peaks_of(hardware, device))
    rows = measure_local(args, device, rates, backend) if ranks == 1 else measure_ranks(args, mesh, rates, backend)
    if mesh.is_main:
        path = args.out or f"bench_mark/results/cp_{device.type}_{ranks}.json"
        write_document({"facts": known, "rows": rows}, path)
        worst, allowed = max(known.get("errors", {"": 0.0}).values()), AGREEMENT[known["dtype"]]
        assert worst < allowed, f"results are off float64 by {worst:.1e} > {allowed}"
    close_mesh(mesh)


if __name__ == "__main__":
    main()
