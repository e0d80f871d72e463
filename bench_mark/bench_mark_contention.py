"""What a computation loses to the all-reduces that travel beside it: seconds for each byte that a rank sends.

A collective's kernels hold processors of a GPU and read and write its memory, so work that hides them gets slower. Here
generic work of two kinds, square matrix products and passes over memory, runs alone and beside all-reduces of 25 MiB
that end before it does; turns alternate, and what the second kind of turn takes longer, over the bytes sent, is the
figure. It is `beside_s_per_byte` of configs/hardware, from which steps are predicted; no model is timed.

    torchrun --nproc-per-node=2 -m bench_mark.bench_mark_contention     # nccl on GPUs; gloo on CPUs, to try it
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench_mark.bench_mark_model_report import facts, write_document
from llm.args import HardwareConfig
from llm.hardware import detect_hardware, known_hardware, match_gpu
from parallel.collectives import barrier, start_all_reduce
from parallel.collectives_peer import PeerMemory, peer_bytes, start_peer_all_reduce
from parallel.collectives_pending import Pending
from parallel.cost_model import moved_bytes
from parallel.mesh import Mesh, close_mesh, init_mesh

BUCKET_BYTES = 25 << 20
SLEEP_CYCLES = 100_000_000  # 50 to 60 ms
COLUMNS = (
    f"{'transport':10} {'work':10} {'alone':>10} {'beside':>10} {'sent':>10} {'predicted':>13} {'measured':>13} "
    f"{'ratio':>6}  bound"
)


def make_works(on_gpu: bool, device: torch.device) -> dict[str, Callable[[], None]]:
    """One unit of each kind of work, a few tenths of a millisecond on a large GPU."""
    width, elements = (4096, 1 << 26) if on_gpu else (256, 1 << 20)
    # Random numbers: products of ones run faster, since fewer bits change.
    first, second = torch.randn(2, width, width, device=device).to(torch.bfloat16 if on_gpu else torch.float32)
    wide = torch.randn(elements, device=device)
    product, result = torch.empty_like(first), torch.empty_like(wide)
    return {
        "products": lambda: torch.mm(first, second, out=product),
        "passes": lambda: torch.mul(wide, wide, out=result),
    }


def make_senders(transport: str, count: int, mesh: Mesh) -> list[Callable[[], Pending]]:
    """So many all-reduces, each of a buffer of its own, that start when called."""
    numel = BUCKET_BYTES // 4
    if transport == "backend":
        buckets = [torch.zeros(numel, device=mesh.device) for _ in range(count)]
        return [partial(start_all_reduce, bucket, mesh, "world") for bucket in buckets]
    memory = PeerMemory(peer_bytes([(numel, torch.float32)] * count), mesh, "world")
    buffers = [memory.take(numel, torch.float32) for _ in range(count)]
    for buffer in buffers:
        buffer.tensor.zero_()
    return [partial(start_peer_all_reduce, buffer) for buffer in buffers]


def turn(work: Callable[[], None], units: int, senders: list[Callable[[], Pending]], mesh: Mesh) -> tuple[float, float]:
    """Seconds of `units` of work with all messages on their way from the start, and until these are over too."""
    synchronise(mesh)
    barrier(mesh, "world")
    if mesh.device.type == "cuda":
        return turn_on_gpu(work, units, senders)
    began = time.perf_counter()
    pending = [send() for send in senders]
    for _ in range(units):
        work()
    seconds = time.perf_counter() - began
    for message in pending:
        message.wait()
    return seconds, time.perf_counter() - began


def turn_on_gpu(work: Callable[[], None], units: int, senders: list[Callable[[], Pending]]) -> tuple[float, float]:
    """By the device's clock: it sleeps until the host has issued all of a turn, so that nothing waits for the host."""
    start, done, whole = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda._sleep(SLEEP_CYCLES)
    start.record()
    pending = [send() for send in senders]
    for _ in range(units):
        work()
    done.record()
    for message in pending:
        message.wait()
    whole.record()
    whole.synchronize()
    return start.elapsed_time(done) / 1e3, start.elapsed_time(whole) / 1e3


def synchronise(mesh: Mesh) -> None:
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)


def measure(work: Callable[[], None], transport: str, mesh: Mesh, args: argparse.Namespace) -> dict[str, Any]:
    """Medians of turns alone and beside messages that end before the work does, and what the difference is a byte."""
    senders = make_senders(transport, max(1, (args.megabytes << 20) // BUCKET_BYTES), mesh)
    for _ in range(args.warmup):
        turn(work, args.units, senders, mesh)
    alone, beside = [], []
    for _ in range(args.turns):
        alone.append(turn(work, args.units, [], mesh)[0])
        beside.append(turn(work, args.units, senders, mesh))
    alone_s, beside_s = statistics.median(alone), statistics.median(seconds for seconds, _ in beside)
    moved = moved_bytes("all_reduce_sum", len(senders) * BUCKET_BYTES, mesh.world_size)
    return {
        "alone_s": alone_s,
        "beside_s": beside_s,
        "sent_bytes": moved,
        "lost_s_per_byte": (beside_s - alone_s) / moved if moved else None,
        "outlasted": statistics.median(whole - seconds for seconds, whole in beside) > 0.05 * beside_s,
        "seconds": {"alone": alone, "beside": [seconds for seconds, _ in beside]},
    }


def show(row: dict[str, Any]) -> str:
    def per_gigabyte(key: str) -> str:
        return "–" if row[key] is None else f"{row[key] * 1e12:.3g} ms/GB"

    ratio = "–" if row["ratio"] is None else f"{row['ratio']:.2f}"
    return (
        f"{row['transport']:10} {row['work']:10} {row['alone_s'] * 1e3:7.2f} ms {row['beside_s'] * 1e3:7.2f} ms "
        f"{row['sent_bytes'] / 1e9:7.2f} GB {per_gigabyte('predicted'):>13} {per_gigabyte('lost_s_per_byte'):>13} "
        f"{ratio:>6}  {'messages outlast the work' if row['outlasted'] else 'processors and memory'}"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--transports", default="backend,peer", help="backend: nccl or gloo; peer: copy engines")
    parser.add_argument("--units", type=int, default=None, help="of work in a turn; GPU: 300")
    parser.add_argument("--megabytes", type=int, default=2000, help="of all-reduces in a turn, at most")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", default=None)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    mesh = init_mesh(args.device, force=True)
    on_gpu = mesh.device.type == "cuda"
    args.units = args.units or (300 if on_gpu else 20)
    dtype = "bfloat16" if on_gpu else "float32"
    hardware = detect_hardware(HardwareConfig(), mesh.device, dtype=dtype)
    known = facts(hardware, dtype) | {"ranks": mesh.world_size, "backend": mesh.backend, "args": vars(args)}
    config = match_gpu(hardware.description, known_hardware()) if on_gpu else None
    known_s = {
        "backend": config.beside_s_per_byte if config else None,
        "peer": config.beside_peer_s_per_byte if config else None,
    }
    rows = []
    for transport in args.transports.split(","):
        for name, work in make_works(on_gpu, mesh.device).items():
            row = measure(work, transport, mesh, args)
            lost, predicted = row["lost_s_per_byte"], known_s[transport]
            ratio = lost / predicted if predicted and lost is not None else None
            rows.append({"transport": transport, "work": name, "predicted": predicted, "ratio": ratio} | row)
    if mesh.is_main:
        print(" · ".join(str(known[key]) for key in ("hardware", "ranks", "backend", "dtype", "torch", "commit")))
        if mesh.world_size == 1:
            print("one rank: nothing is sent; start with torchrun --nproc-per-node=2")
        print(COLUMNS)
        print("\n".join(map(show, rows)))
        path = args.out or f"bench_mark/results/contention_{mesh.device.type}_{mesh.world_size}.json"
        write_document({"facts": known, "rows": rows}, path)
    close_mesh(mesh)


if __name__ == "__main__":
    main()
