"""ZeRO-1, 2 and 3 beside torch's FSDP2: step time, memory and communication, predicted and measured, in one run.

Every contestant trains the same model on the same batch; their steps alternate, because a shared machine drifts. "over
bare" is a step's time over the one that communicates nothing, "exposed" what the log says was waited for. On one rank
the wrappers are forced on: hooks, gathers and reductions all run, in a group of one. The last line is JSON.

    python -m bench_mark.bench_mark_fsdp                                                  # one rank, wrappers forced
    torchrun --nproc-per-node=2 -m bench_mark.bench_mark_fsdp --model mew-1m              # gloo on CPUs, nccl on GPUs
    torchrun --nproc-per-node=2 -m bench_mark.bench_mark_fsdp --model 1b --kernels fused --attention triton
"""

import argparse
import gc
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench_mark.bench_mark_fsdp_contestants import VARIANTS, Contestant, Setup, build
from bench_mark.bench_mark_fsdp_predictions import predictions
from bench_mark.bench_mark_model import SHAPES, load_model_config
from bench_mark.bench_mark_model_report import facts
from configs.errors import UserError
from configs.report_numbers import format_quantity
from configs.run_dir import write_json_atomic
from llm.args import HardwareConfig, KernelsConfig
from llm.cost_model import Workload
from llm.hardware import Hardware, detect_hardware
from llm.metrics_memory import PeakMemory
from parallel.collectives import barrier
from parallel.mesh import close_mesh, init_mesh
from parallel.mesh_degrees import Degrees

COLUMNS = (
    f"{'variant':12} {'step':>9} {'predicted':>9} {'ratio':>5} {'over bare':>9} {'exposed':>9} {'host':>9} "
    f"{'peak':>9} {'predicted':>9} {'ratio':>5} {'sent':>9} {'predicted':>9}  scaling"
)
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


def measure(setup: Setup, names: list[str], steps: int, warmup: int) -> tuple[list[Contestant], dict[str, str]]:
    """Build each contestant, warm it up and look at its memory, then time steps that alternate between them.

    Also which ones failed: on one rank a failure does not take the others' figures with it.
    """
    contestants, failed, mesh = [], {}, setup.mesh
    for name in names:
        try:
            contestants.append(prepare(name, setup, warmup))
        except (RuntimeError, ValueError, AssertionError) as error:
            if mesh.world_size > 1:
                raise
            failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
    mesh.log.drain(0)
    for _ in range(steps):
        for contestant in contestants:
            barrier(mesh, "world")
            mesh.log.drain(0)
            began = time.perf_counter()
            loss = contestant.step()
            contestant.host_seconds.append(time.perf_counter() - began)  # on a GPU: until the step was issued
            loss = loss.item()  # waits for the device
            if mesh.device.type == "cuda":
                torch.cuda.synchronize(mesh.device)
            contestant.seconds.append(time.perf_counter() - began)
            contestant.losses.append(loss)
            contestant.comm.append(mesh.log.drain(0))
    for contestant in contestants:
        contestant.profile = profile(contestant, mesh.device)
    return contestants, failed


def prepare(name: str, setup: Setup, warmup: int) -> Contestant:
    """A contestant that has warmed up, with the peak memory of one step; what others hold is not counted."""
    device = setup.mesh.device
    others = allocated(device)
    contestant = build(name, setup)
    for _ in range(warmup):
        contestant.losses.append(contestant.step().item())
    gc.collect()
    with PeakMemory(device, contestant.tensors()) as memory:
        contestant.losses.append(contestant.step().item())
    contestant.peak_bytes = memory.peak_bytes - others
    return contestant


def profile(contestant: Contestant, device: torch.device, steps: int = 2, longest: int = 25) -> dict[str, Any]:
    """Where a step's time goes on the device: seconds in kernels, and the kernels that take most of them."""
    activity = torch.profiler.ProfilerActivity
    activities = [activity.CPU, activity.CUDA] if device.type == "cuda" else [activity.CPU]
    began = time.perf_counter()
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            contestant.step().item()
    step_s = (time.perf_counter() - began) / steps
    entries = profiler.key_averages()
    field = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    if device.type == "cuda":  # kernels and copies alone: operators count the same time again
        entries = [entry for entry in entries if entry.device_type == torch.autograd.DeviceType.CUDA]
    seconds = {entry.key: getattr(entry, field) * 1e-6 / steps for entry in entries}
    calls = {entry.key: entry.count / steps for entry in entries}
    top = sorted(seconds, key=seconds.__getitem__, reverse=True)[:longest]
    kernels = [{"name": name[:120], "s": seconds[name], "calls": calls[name]} for name in top]
    return {"step_s": step_s, "busy_s": sum(seconds.values()), "calls": sum(calls.values()), "longest": kernels}


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def row_of(contestant: Contestant, setup: Setup, hardware: Hardware, bare_s: float | None) -> dict[str, Any]:
    lines = [line for step in contestant.comm for line in step]
    count, step_s = len(contestant.seconds), statistics.median(contestant.seconds)
    predicted = predictions(contestant, setup, hardware)
    return {
        "variant": contestant.name,
        "step_s": step_s,
        "predicted_step_s": predicted["step_s"],
        "over_bare_s": None if bare_s is None else step_s - bare_s,
        "over_bare": None if bare_s is None else step_s / bare_s,
        "exposed_s": sum(line["exposed_seconds"] for line in lines) / count if lines else None,
        "communication_s": sum(line["seconds"] for line in lines) / count if lines else None,
        "peak_bytes": contestant.peak_bytes,
        "predicted_peak_bytes": predicted["peak_bytes"],
        "sent_bytes": sum(line["bytes"] for line in lines) / count if lines else None,
        "predicted_sent_bytes": predicted["sent_bytes"],
        "scaling": None if bare_s is None or setup.mesh.world_size == 1 else bare_s / step_s,
        "tokens_per_s": setup.work.tokens * setup.mesh.world_size / step_s,
        "host_s": statistics.median(contestant.host_seconds),
        "profile": contestant.profile,
        "losses": contestant.losses[:4],
        "seconds": contestant.seconds,
        "comm": [{k: v for k, v in line.items() if k != "step"} for line in contestant.comm[-1]],
    }


def show(row: dict[str, Any]) -> str:
    def text(key: str, unit: str) -> str:
        return f"{'–' if row[key] is None else format_quantity(row[key], unit):>9}"

    def ratio(key: str) -> str:
        predicted = row[f"predicted_{key}"]
        return f"{'–' if not predicted else format(row[key] / predicted, '.2f'):>5}"

    return (
        f"{row['variant']:12} {text('step_s', 's')} {text('predicted_step_s', 's')} {ratio('step_s')} "
        f"{text('over_bare_s', 's')} {text('exposed_s', 's')} {text('host_s', 's')} "
        f"{text('peak_bytes', 'bytes')} {text('predicted_peak_bytes', 'bytes')} {ratio('peak_bytes')} "
        f"{text('sent_bytes', 'bytes')} {text('predicted_sent_bytes', 'bytes')}  "
        + ("–" if row["scaling"] is None else f"{row['scaling']:.3f}")
    )


def loss_difference(rows: list[dict[str, Any]], ranks: int) -> float:
    """The largest relative difference between the contestants' first losses.

    Beside other ranks "bare" sees less data, so it is left out: all start from the same weights, and go apart.
    """
    compared = [row["losses"][:2] for row in rows if ranks == 1 or row["variant"] != "bare"]
    return max((abs(a - b) / b for losses in compared for a, b in zip(losses, compared[0], strict=True)), default=0.0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=None, choices=sorted(SHAPES))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--micro-batch", type=int, default=None)
    parser.add_argument("--seq-len", type=int, default=None)
    parser.add_argument("--compile", default=None, choices=("none", "block"))
    parser.add_argument("--kernels", default="plain", choices=("plain", "fused"))
    parser.add_argument("--attention", default=None)
    parser.add_argument("--checkpointing", default="none", choices=("none", "selective", "full"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    unknown = sorted(set(args.variants.split(",")) - set(VARIANTS))
    if unknown:
        raise UserError(f"--variants={','.join(unknown)} is unknown; use some of {', '.join(VARIANTS)}")
    return args


def make_setup(args: argparse.Namespace) -> Setup:
    mesh = init_mesh(args.device, degrees=Degrees(dp_shard=None), force=True)
    on_gpu = mesh.device.type == "cuda"
    name = args.model or ("350m" if on_gpu else "mew-1m")
    model = load_model_config(name)
    if args.attention:
        model = replace(model, attention=args.attention)
    micro_batch, seq_len = SHAPES[name]
    work = Workload(
        model, args.micro_batch or micro_batch, args.seq_len or seq_len, device=mesh.device.type,
        dtype="bfloat16" if on_gpu else "float32", compile=args.compile or ("block" if on_gpu else "none"),
    )  # fmt: skip
    # The update is one launch for ours as for FSDP2, whatever the model's kernels are.
    return Setup(work, mesh, KernelsConfig(fused=args.kernels == "fused", optimizer=on_gpu), args.checkpointing)


def main() -> None:
    args = arguments()
    setup = make_setup(args)
    mesh, work = setup.mesh, setup.work
    torch.set_float32_matmul_precision("high" if mesh.device.type == "cuda" else "highest")
    hardware = detect_hardware(HardwareConfig(), mesh.device, dtype=work.dtype)
    known = facts(hardware, work.dtype) | {
        "ranks": mesh.world_size, "backend": mesh.backend, "model": args.model or "default", "kernels": args.kernels,
        "attention": work.model.attention, "compile": work.compile, "batch": [work.micro_batch_size, work.seq_len],
        "checkpointing": setup.checkpointing,
    }  # fmt: skip
    contestants, known["failed"] = measure(setup, args.variants.split(","), args.steps, args.warmup)
    bare = [statistics.median(c.seconds) for c in contestants if c.name == "bare"]
    rows = [row_of(contestant, setup, hardware, bare[0] if bare else None) for contestant in contestants]
    known["loss_difference"] = loss_difference(rows, mesh.world_size)
    if mesh.is_main:
        report(known, rows, args.out or f"bench_mark/results/fsdp_{mesh.device.type}_{mesh.world_size}.json")
    close_mesh(mesh)


def report(known: dict[str, Any], rows: list[dict[str, Any]], path: str) -> None:
    print(
        f"{known['hardware']} · {known['ranks']} ranks · {known['dtype']} · torch {known['torch']} · {known['commit']}"
    )
    print(f"losses within {known['loss_difference']:.1e}")
    print(COLUMNS)
    for row in rows:
        print(show(row))
    document = {"facts": known, "rows": rows}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(Path(path), document)
    for name, reason in known["failed"].items():
        print(f"{name} failed: {reason}")
    print(json.dumps(document))
    difference, allowed = known["loss_difference"], LOSS_TOLERANCE[known["dtype"]]
    assert difference < allowed, f"the contestants' first losses differ by {difference:.1e}, more than {allowed}"


if __name__ == "__main__":
    main()
