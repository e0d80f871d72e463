"""Pipeline schedules beside torch.distributed.pipelining: forward and backward of one step, no optimizer.

Of every schedule, for each shape of its micro-batches (rows x number): the step's seconds beside the cost model's; a
rank's idle share as measured and as the schedule's table says with the operations as they were timed
(bench_mark_pp_idle); and idle seconds beside 1F1B's. Where the host issues the operations for as long as the step
lasts, the row says so: its operations wait for their launches, and no formula knows of it. All contestants must agree
on the loss. The last line is one JSON document.

    torchrun --nproc-per-node=2 -m bench_mark.bench_mark_pp                       # gloo on CPUs, nccl on GPUs
    torchrun --nproc-per-node=4 -m bench_mark.bench_mark_pp --model 350m --layers 28 --shapes 2x16
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from bench_mark.bench_mark_model import SHAPES
from bench_mark.bench_mark_model_report import facts
from bench_mark.bench_mark_pp_contestants import Bench, Contestant
from bench_mark.bench_mark_pp_idle import idle_of, rank_summary
from bench_mark.bench_mark_pp_tracer import StepTimes, message_seconds_measured
from configs.run_dir import write_json_atomic
from llm.args import HardwareConfig, TrainConfig
from llm.hardware import Hardware, detect_hardware
from llm.plan_links import links_of
from llm.plan_shapes import meta_params
from llm.plan_shapes_pipeline import pipeline_shape
from llm.plan_time import message_seconds
from llm.plan_time_layouts import Machine, layout_time
from parallel.collectives import all_gather_json, all_reduce_max, all_reduce_sum, barrier
from parallel.cost_model import Cluster
from parallel.cost_model_traffic import Message
from parallel.mesh import Mesh, close_mesh, init_mesh, read_ranks
from parallel.mesh_degrees import Degrees
from parallel.pipeline_schedules import build_schedule

EAGER = "gpipe 1f1b interleaved zero_bubble zero_bubble_h2"
GRAPHS = "1f1b zero_bubble zero_bubble_h2"
# On a GPU: even stages, one shape in which the host is the bound without graphs and one in which the device is.
GPU_CASE, GPU_SHAPES = ("1b", 17), "1x8,2x8"
COLUMNS = (
    f"{'variant':22} {'batch':>6} {'predicted':>10} {'measured':>10} {'ratio':>6} {'idle said':>9} {'formula':>8} "
    f"{'on paper':>8} {'measured':>8} {'ratio':>6} {'outside':>7} {'message':>7} {'of 1f1b':>8} {'loss':>9}  bound"
)
SAID = ("predicted_step_s", "predicted_idle", "predicted_host_s")
HOST_BOUND = 0.95  # of a step's seconds in which the host still issues it
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


def measure(contestant: Contestant, shape: tuple[int, int], mesh: Mesh, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of steps that all ranks begin together, and on every rank those of their operations and of the host."""
    tracer, seconds, host, steps = contestant.tracer, [], [], []
    for turn in range(args.warmup + args.steps):
        synchronise(mesh)
        barrier(mesh, "pp")
        began = time.perf_counter()
        loss = contestant.step(*shape)
        synchronise(mesh)
        own = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
        taken = float(all_reduce_max(own, mesh, "pp"))
        if turn >= args.warmup:
            seconds.append(taken)
            if tracer is not None:
                host.append(tracer.issued - began)
                steps.append(asdict(tracer.drain()))
    total = float(all_reduce_sum(torch.tensor(loss, dtype=torch.float64), mesh, "pp"))
    found = {"step_s": statistics.median(seconds), "seconds": seconds, "loss": total}
    if tracer is None:
        return found
    ranks = all_gather_json({"host_s": statistics.median(host), "steps": steps}, mesh, "pp")
    return found | {"by_rank": ranks, "message_s": message_seconds_measured(contestant.boundary(shape[0]), mesh)}


def synchronise(mesh: Mesh) -> None:
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()


def row_of(
    contestant: Contestant, shape: tuple[int, int], found: dict[str, Any], machine: Machine, ranks: int
) -> dict[str, Any]:
    """What was measured beside the prediction and the formula; torch's operations are not known, so neither is."""
    row = {"variant": contestant.name, "rows": shape[0], "micro_batches": shape[1], **found}
    if contestant.tracer is None:
        return row | dict.fromkeys((*SAID, "idle", "idle_s", "formula_idle", "paper_idle")) | {"bound": "–"}
    host = max(rank["host_s"] for rank in found["by_rank"])
    row["bound"] = machine.device if host < HOST_BOUND * found["step_s"] or machine.device == "cpu" else "host"
    config = contestant.config(*shape)
    said = layout_time(config, meta_params(config.model), machine, ranks)
    row |= zip(SAID, (max(said.simulation.total, said.host_s), said.simulation.bubble, said.host_s), strict=True)
    row["predicted_message_s"] = send_seconds(config, machine)
    times = [[StepTimes(**step) for step in rank["steps"]] for rank in found["by_rank"]]
    row["by_rank"] = [
        {"host_s": rank["host_s"]} | rank_summary(own) for rank, own in zip(found["by_rank"], times, strict=True)
    ]
    steps = list(zip(*times, strict=True))  # by step, then by rank
    schedule = build_schedule(contestant.schedule, ranks, shape[1], contestant.chunks)
    row |= idle_of(schedule, found["seconds"], steps, row["predicted_message_s"], found["message_s"])
    middle = sorted(range(len(steps)), key=lambda index: found["seconds"][index])[len(steps) // 2]
    return row | {"timeline_ms": [rank.lines() for rank in steps[middle]]}


def send_seconds(config: TrainConfig, machine: Machine) -> float:
    """Of one micro-batch's states to the next rank, as predicted."""
    shape = pipeline_shape(meta_params(config.model), config, [config.micro_batch_size * config.data.seq_len])
    message = Message("exchange", "pp", shape.dtype, shape.ranks, shape.boundary_bytes[0], "")
    return message_seconds(config.parallel.degrees().resolve(shape.ranks), machine.cluster)(message)


def show(row: dict[str, Any], idle_1f1b_s: float | None) -> str:
    def number(value: float | None, spec: str, width: int) -> str:
        return f"{'–' if value is None else format(value, spec):>{width}}"

    said, idle = row["predicted_step_s"], row["idle"]
    step_ratio = None if said is None else row["step_s"] / said
    idle_ratio = None if not row["formula_idle"] else idle / row["formula_idle"]
    of_1f1b = None if idle_1f1b_s is None or row["idle_s"] is None else row["idle_s"] / idle_1f1b_s
    milliseconds = (None if value is None else value * 1e3 for value in (said, row["step_s"]))
    outside_ms = message_ms = None
    if "by_rank" in row:  # milliseconds of the rank that does most outside its operations, and of a message
        outside_ms = 1e3 * max(rank["before_s"] + rank["after_s"] for rank in row["by_rank"])
        message_ms = 1e3 * row["message_s"]
    said_ms, step_ms = (number(value, ".1f", 7) for value in milliseconds)
    return (
        f"{row['variant']:22} {row['rows']:>2}x{row['micro_batches']:<3} {said_ms} ms {step_ms} ms "
        f"{number(step_ratio, '.2f', 6)} {number(row['predicted_idle'], '.3f', 9)} "
        f"{number(row['formula_idle'], '.3f', 8)} {number(row['paper_idle'], '.3f', 8)} {number(idle, '.3f', 8)} "
        f"{number(idle_ratio, '.2f', 6)} {number(outside_ms, '.2f', 7)} {number(message_ms, '.3f', 7)} "
        f"{number(of_1f1b, '.2f', 8)} {row['loss']:>9.5f}  {row['bound']}"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=None, choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, default=None, help="another number of blocks, to even out the stages")
    parser.add_argument("--shapes", default=None, help="rows x micro-batches, such as 1x8,2x8")
    parser.add_argument("--seq-len", type=int, default=None)
    parser.add_argument("--eager", default=EAGER, help="schedules run operation by operation")
    parser.add_argument("--graphs", default=None, help="schedules run as CUDA graphs; on a GPU a few")
    parser.add_argument("--torchs", default="gpipe 1f1b")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", default=None)
    return parser.parse_args()


def makers(bench: Bench, args: argparse.Namespace) -> list[Any]:
    """Functions that build the contestants, one at a time: each holds a model."""
    graphs = args.graphs if args.graphs is not None else GRAPHS if bench.mesh.device.type == "cuda" else ""
    chosen = [(name, False) for name in args.eager.split()] + [(name, True) for name in graphs.split()]
    ours = [
        lambda name=name, graph=graph: bench.ours(name, 2 if name == "interleaved" else 1, graph)
        for name, graph in chosen
    ]
    return ours + [lambda name=name: bench.torchs(name) for name in args.torchs.split()]


def run_all(
    bench: Bench, args: argparse.Namespace, machine: Machine, save: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """Every contestant over every shape; rows are printed, and saved, as they come."""
    on_gpu = bench.mesh.device.type == "cuda"
    texts = args.shapes or (GPU_SHAPES if on_gpu else ",".join(f"{bench.default_rows}x{count}" for count in (2, 8)))
    shapes = [tuple(map(int, text.split("x"))) for text in texts.split(",")]
    rows, idle_1f1b = [], {}
    for make in makers(bench, args):
        contestant = make()
        for shape in shapes:
            row = row_of(
                contestant, shape, measure(contestant, shape, bench.mesh, args), machine, bench.mesh.size("pp")
            )
            if contestant.schedule == "1f1b" and row["idle_s"] is not None:
                idle_1f1b[shape] = row["idle_s"]
            row["of_1f1b"] = row["idle_s"] and row["idle_s"] / idle_1f1b[shape] if shape in idle_1f1b else None
            rows.append(row)
            if bench.mesh.is_main:
                print(show(row, idle_1f1b.get(shape)), flush=True)
                save(rows)
        del contestant
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
    return rows


def main() -> None:
    args = arguments()
    if read_ranks()[1] == 1:
        print("a pipeline needs two ranks or more: torchrun --nproc-per-node=2 -m bench_mark.bench_mark_pp")
        return
    mesh = init_mesh(args.device, degrees=Degrees(pp=read_ranks()[1]))
    model, layers = GPU_CASE if mesh.device.type == "cuda" and args.model is None else (args.model or "mew-1m", None)
    bench = Bench(mesh, model, args.layers or layers, args.seq_len)
    torch.set_float32_matmul_precision("high" if mesh.device.type == "cuda" else "highest")
    hardware: Hardware = detect_hardware(HardwareConfig(), mesh.device, dtype=bench.dtype)
    cluster: Cluster | None = links_of(hardware, mesh)
    assert cluster is not None, f"the links of {hardware.description!r} are not known; add them to configs/hardware"
    known = facts(hardware, bench.dtype) | {
        "ranks": mesh.world_size, "backend": mesh.backend, "model": model, "layers": bench.model.num_layers,
        "seq_len": bench.seq_len, "attention": bench.model.attention,
    }  # fmt: skip
    if mesh.is_main:
        keys = ("hardware", "dtype", "torch", "commit", "model", "layers", "seq_len", "ranks")
        print(" · ".join(str(known[key]) for key in keys))
        print(COLUMNS, flush=True)
    path = args.out or f"bench_mark/results/pp_{mesh.device.type}.json"
    rows = run_all(
        bench, args, Machine(hardware.device, hardware.rates, cluster),
        lambda rows: write_json_atomic(path, known | {"rows": rows}),
    )  # fmt: skip
    if mesh.is_main:
        print(json.dumps(known | {"rows": rows}))
    by_shape: dict[int, list[float]] = {}
    for row in rows:
        by_shape.setdefault(row["rows"] * row["micro_batches"], []).append(row["loss"])
    apart = max(max(losses) - min(losses) for losses in by_shape.values())
    assert apart < LOSS_TOLERANCE[bench.dtype], f"losses differ by {apart:.1e} > {LOSS_TOLERANCE[bench.dtype]}"
    close_mesh(mesh)


if __name__ == "__main__":
    main()
