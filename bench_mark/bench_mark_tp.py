"""Tensor parallelism beside torch's DTensor: forward and backward of a stack of blocks, time, memory, bytes.

Contestants take turns step by step. "alone" has the whole stack on one device, "bare" one rank's part of the products
and sends nothing. Exposed seconds and bytes are the log's; DTensor sends past our log. "of one" is the throughput over
that of one device. What is predicted and from what: bench_mark_tp_predictions. The last line is one JSON document.

    torchrun --nproc-per-node=2 -m bench_mark.bench_mark_tp                       # gloo on CPUs, nccl on GPUs
    torchrun --nproc-per-node=8 -m bench_mark.bench_mark_tp --model 1b --batch 4 --seq-len 4096
"""

import argparse
import statistics
import time
from dataclasses import asdict
from typing import Any

import torch

from bench_mark.bench_mark_model import load_model_config
from bench_mark.bench_mark_model_report import facts, write_document
from bench_mark.bench_mark_tp_contestants import VARIANTS, Contestant, Setup, build
from bench_mark.bench_mark_tp_predictions import predicted
from configs.errors import UserError
from configs.report_numbers import format_quantity
from llm.args import HardwareConfig
from llm.hardware import Hardware, detect_hardware
from llm.metrics_memory import PeakMemory
from parallel.collectives import barrier
from parallel.mesh import Mesh, close_mesh, init_mesh, read_ranks
from parallel.mesh_degrees import Degrees

COLUMNS = (
    f"{'variant':14} {'predicted':>9} {'step':>9} {'ratio':>5} {'waits':>9} {'exposed':>9} {'peak':>9} {'measured':>9} "
    f"{'ratio':>5} {'sent':>9} {'measured':>9} {'of one':>6}  bound"
)
AGREEMENT = {"float32": 1e-4, "bfloat16": 2e-2}  # of sums of squares: their relative difference


def measure(setup: Setup, names: list[str], steps: int, warmup: int) -> list[Contestant]:
    """Build all, then alternate between them; a step ends when the device has done it."""
    mesh, contestants = setup.mesh, []
    for name in names:
        contestants.append(build(name, setup))
        if mesh.is_main:  # the first steps of some take long
            print(f"built {name}", flush=True)
    for number in range(warmup + steps):
        for contestant in contestants:
            barrier(mesh, "world")
            mesh.log.drain(0)
            began = time.perf_counter()
            contestant.step()
            if mesh.device.type == "cuda":
                torch.cuda.synchronize(mesh.device)
            if number >= warmup:
                contestant.seconds.append(time.perf_counter() - began)
                contestant.comm.append(mesh.log.drain(0))
    for contestant in contestants:
        look_at_memory(contestant, mesh)
    return contestants


def look_at_memory(contestant: Contestant, mesh: Mesh) -> None:
    """The peak of one more step, without what lies there of the other contestants."""
    weights = list(contestant.weights)
    own = sum(weight.nbytes for weight in weights)
    others = torch.cuda.memory_allocated(mesh.device) - own if mesh.device.type == "cuda" else 0
    with PeakMemory(mesh.device, weights) as memory:
        contestant.step()
    mesh.log.drain(0)
    contestant.peak_bytes = memory.peak_bytes - others


def row_of(contestant: Contestant, setup: Setup, hardware: Hardware, steps_s: dict[str, float]) -> dict[str, Any]:
    """Predicted and measured of one contestant; `steps_s` has all medians."""
    lines = [line for step in contestant.comm for line in step]
    step_s, count = steps_s[contestant.name], len(contestant.seconds)
    said = predicted(contestant.name, setup, hardware)
    ours = not contestant.name.startswith("dtensor")
    bare_s, alone_s = steps_s.get("bare"), steps_s.get("alone")
    return {
        "variant": contestant.name,
        "step_s": step_s,
        "over_bare_s": None if bare_s is None else step_s - bare_s,
        "of_one": alone_s / step_s if alone_s else None,
        "exposed_s": sum(line["exposed_seconds"] for line in lines) / count if ours else None,
        "sent_bytes": sum(line["bytes"] for line in lines) / count if ours else None,
        "peak_bytes": contestant.peak_bytes,
        "ratio": step_s / said.step_s if said.step_s else None,
        "peak_ratio": contestant.peak_bytes / said.peak_bytes if said.peak_bytes else None,
        "bound": "products" if bare_s is None or step_s < 2 * bare_s else "network",
        "result": contestant.results[0],
        "seconds": contestant.seconds,
        "comm": contestant.comm[-1],
    } | {f"predicted_{key}": value for key, value in asdict(said).items()}


def show(row: dict[str, Any]) -> str:
    def text(key: str, unit: str) -> str:
        return f"{'–' if row[key] is None else format_quantity(row[key], unit):>9}"

    def share(key: str, width: int) -> str:
        return f"{'–' if row[key] is None else format(row[key], '.2f'):>{width}}"

    return (
        f"{row['variant']:14} {text('predicted_step_s', 's')} {text('step_s', 's')} {share('ratio', 5)} "
        f"{text('predicted_waited_s', 's')} {text('exposed_s', 's')} {text('predicted_peak_bytes', 'bytes')} "
        f"{text('peak_bytes', 'bytes')} {share('peak_ratio', 5)} {text('predicted_sent_bytes', 'bytes')} "
        f"{text('sent_bytes', 'bytes')} {share('of_one', 6)}  {row['bound']}"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=None, help="a file of configs/model; its vocabulary plays no part")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--batch", type=int, default=None)
    parser.add_argument("--seq-len", type=int, default=None)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    unknown = sorted(set(args.variants.split(",")) - set(VARIANTS))
    if unknown:
        raise UserError(f"--variants={','.join(unknown)} is unknown; use some of {', '.join(VARIANTS)}")
    return args


def main() -> None:
    args = arguments()
    mesh = init_mesh(args.device, degrees=Degrees(dp=1, tp=read_ranks()[1]))
    if mesh.world_size == 1:
        print("bench_mark_tp needs ranks to cut layers over; start it with torchrun --nproc-per-node=2")
        return
    on_gpu = mesh.device.type == "cuda"
    model = load_model_config(args.model or ("1b" if on_gpu else "mew-1m"))
    setup = Setup(
        model, args.batch or (4 if on_gpu else 8), args.seq_len or (4096 if on_gpu else 128), mesh,
        "bfloat16" if on_gpu else "float32", args.compile,
    )  # fmt: skip
    hardware = detect_hardware(HardwareConfig(), mesh.device, dtype=setup.dtype)
    contestants = measure(setup, args.variants.split(","), args.steps, args.warmup)
    steps_s = {contestant.name: statistics.median(contestant.seconds) for contestant in contestants}
    rows = [row_of(contestant, setup, hardware, steps_s) for contestant in contestants]
    known = facts(hardware, setup.dtype) | {
        "ranks": mesh.world_size, "backend": mesh.backend, "model": args.model or "default",
        "batch": [setup.batch, setup.seq_len], "compile": setup.compile,
    }  # fmt: skip
    if mesh.is_main:
        report(known, rows, args.out or f"bench_mark/results/tp_{mesh.device.type}_{mesh.world_size}.json")
    close_mesh(mesh)


def report(known: dict[str, Any], rows: list[dict[str, Any]], path: str) -> None:
    results = [row["result"] for row in rows if row["variant"] != "bare"]
    known["difference"] = max((abs(a - results[0]) / results[0] for a in results), default=0.0)
    print(
        f"{known['hardware']} · {known['ranks']} ranks · {known['dtype']} · torch {known['torch']} · {known['commit']}"
    )
    print(f"results within {known['difference']:.1e}")
    print(COLUMNS)
    for row in rows:
        print(show(row))
    write_document({"facts": known, "rows": rows}, path)
    allowed = AGREEMENT[known["dtype"]]
    assert known["difference"] < allowed, f"the contestants' results differ by {known['difference']:.1e} > {allowed}"


if __name__ == "__main__":
    main()
