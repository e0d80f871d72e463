"""Context parallelism: what cutting a sequence costs on one device, and on several, beside torch's context_parallel.

One rank: the blocks of a ring of 4 and of 8 ranks, played one after the other, over one kernel for the whole sequence
(bound: 1.10 from 64K tokens on). Several ranks: attention forward and backward of one layer by ring, gathered keys and
Ulysses, and by torch's context_parallel where it runs. Predictions are rooflines of the blocks (kernel/cost_model) and,
over ranks, the ring's timeline (parallel/cost_model_context). The last line is one JSON document.

    python -m bench_mark.bench_mark_cp                                     # one GPU; --device cpu plays small ones
    torchrun --nproc-per-node=2 -m bench_mark.bench_mark_cp
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench_mark.bench_mark_cp_ranks import measure_ranks
from bench_mark.bench_mark_cp_simulation import SimulatedRing, simulated_ring
from bench_mark.bench_mark_model_report import facts
from configs.run_dir import write_json_atomic
from kernel.cost_model import AttentionShape, Peaks, attention_backward, attention_forward, exp_rate, predict
from llm.args import HardwareConfig
from llm.hardware import Hardware, detect_hardware
from parallel.context_parallel_blocks import Rows
from parallel.cost_model_context import joining_bytes
from parallel.mesh import close_mesh, init_mesh, read_ranks
from parallel.mesh_degrees import Degrees

LENGTHS = {"cuda": "16384,32768,65536,131072", "cpu": "128,256"}
RINGS = (4, 8)
BOUND, BOUND_FROM = 1.10, 65536


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


def predicted_s(shape: AttentionShape, ranks: int, peaks: Peaks | None) -> tuple[float, float] | None:
    """Rooflines of forward and backward of all blocks and of joining them, one rank after the other.

    Of each rank one block is causal, the others have half of its pairs.
    """
    if peaks is None:
        return None
    chunk = shape.T // ranks // 2
    own = AttentionShape(shape.B, 2 * chunk, 2 * chunk, shape.H, shape.K, shape.D)
    half = AttentionShape(shape.B, 2 * chunk, chunk, shape.H, shape.K, shape.D)
    joined = joining_s(own, ranks, peaks) if ranks > 1 else (0.0, 0.0)
    return tuple(
        ranks
        * (predict(work(own, own.T * own.S / 2), peaks).seconds + (ranks - 1) * predict(work(half), peaks).seconds)
        + ranks * beside
        for work, beside in zip((attention_forward, attention_backward), joined, strict=True)
    )


def joining_s(own: AttentionShape, ranks: int, peaks: Peaks) -> tuple[float, float]:
    """Seconds of one rank's passes over results and sums, forward and backward."""
    forward, backward = joining_bytes(ranks, own.B * own.T, own.H * own.D, own.K * own.D)
    return forward / peaks.memory_bytes, backward / peaks.memory_bytes


def measure_ring(ring: SimulatedRing, inputs: list[Tensor], timing: dict[str, Any]) -> tuple[float, float]:
    """Seconds of forward and of backward of all ranks of a ring, one after the other; of one rank: one kernel."""
    *shares, dout = (ring.cut(x) for x in inputs)
    results = ring.forward(*shares)
    rows = [Rows(out, lse, share) for (out, lse), share in zip(results, dout, strict=True)]
    forward = median_s(lambda: ring.forward(*shares), **timing)
    return forward, median_s(lambda: ring.backward(*shares, rows), **timing)


def measure_one_kernel(backend: str, inputs: list[Tensor], timing: dict[str, Any]) -> tuple[float, float]:
    """The same by one call of the attention for the whole sequence, without merging or sums."""
    ring = simulated_ring(inputs[0].shape[1], 1, backend, inputs[0].device)
    (mask,), attention = ring.masks[0], ring.attention
    q, k, v, dout = inputs
    out, lse = attention.forward(q, k, v, mask)
    forward = median_s(lambda: attention.forward(q, k, v, mask), **timing)
    rows = Rows(out, lse, dout)
    return forward, median_s(lambda: attention.backward(q, k, v, rows, mask), **timing)


def measure_local(args: argparse.Namespace, device: torch.device, peaks: Peaks | None) -> list[dict[str, Any]]:
    """One row a length, ring and pass."""
    backend, rows = args.backend or ("triton" if device.type == "cuda" else "eager"), []
    timing = {"device": device, "repeats": args.repeats, "warmup": args.warmup}
    print(f"{'tokens':>8} {'ranks':>5} {'pass':9} {'predicted':>10} {'measured':>10} {'ratio':>6} {'of one':>7}  bound")
    for length in map(int, (args.lengths or LENGTHS[device.type]).split(",")):
        shape = AttentionShape(1, length, length, args.heads, args.kv_heads, args.head_dim)
        inputs = make_inputs(shape, device)
        whole = measure_one_kernel(backend, inputs, timing)
        for ranks in (1, *RINGS):
            ring = simulated_ring(length, ranks, backend, device)
            measured = whole if ranks == 1 else measure_ring(ring, inputs, timing)
            predicted = predicted_s(shape, ranks, peaks) or (None, None)
            both = ("both", sum(predicted) if peaks else None, sum(measured), sum(whole))
            for row in (*zip(("forward", "backward"), predicted, measured, whole, strict=True), both):
                rows.append({"tokens": length, "ranks": ranks} | local_row(*row))
                print(show(rows[-1]), flush=True)
    return rows


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
    peaks = peaks_of(hardware, device)
    rows = measure_local(args, device, peaks) if ranks == 1 else measure_ranks(args, mesh, peaks)
    if mesh.is_main:
        document = {"facts": known, "rows": rows}
        path = Path(args.out or f"bench_mark/results/cp_{device.type}_{ranks}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomic(path, document)
        print(json.dumps(document))
    close_mesh(mesh)


if __name__ == "__main__":
    main()
