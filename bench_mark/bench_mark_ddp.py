"""Our DDP, naive and in buckets of several sizes, beside torch's: one model, one optimizer, steps that alternate.

"over bare" is a step's time over the one that communicates nothing, "exposed" what the log says was waited for (torch
keeps no such log). On one rank the wrappers are forced on: hooks, buckets and reductions run in a group of one, so that
what is left is their cost. Predicted step times come from parallel/cost_model_timeline: on GPUs with the link's figures
in configs/hardware, on CPUs with two generic all-reduces timed at start. The last line is one JSON document.

    python -m bench_mark.bench_mark_ddp                                             # one rank, wrappers forced
    torchrun --nproc-per-node=2 -m bench_mark.bench_mark_ddp --model mew-1m         # gloo on CPUs, nccl on GPUs
    torchrun --nproc-per-node=2 -m bench_mark.bench_mark_ddp --model 1b --kernels fused --attention triton
"""

import argparse
import statistics
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from bench_mark.bench_mark_ddp_contestants import build, parse_variant
from bench_mark.bench_mark_ddp_measure import loss_difference, prepare, take_turns
from bench_mark.bench_mark_ddp_prediction import Predictor
from bench_mark.bench_mark_ddp_profile import print_difference, profile_step
from bench_mark.bench_mark_fsdp_contestants import Contestant, Setup
from bench_mark.bench_mark_model import SHAPES, load_model_config
from bench_mark.bench_mark_model_report import facts, write_document
from configs.report_numbers import format_quantity
from llm.args import HardwareConfig, KernelsConfig
from llm.cost_model import Workload
from llm.hardware import detect_hardware
from parallel.mesh import close_mesh, init_mesh

LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
VARIANTS = "bare,naive,bucketed-1,bucketed-5,bucketed-25,bucketed-100,torch-25,bucketed-25-bf16"
COLUMNS = (
    f"{'variant':18} {'predicted':>10} {'measured':>10} {'ratio':>6} {'over bare':>10} {'exposed':>10} {'hidden':>10} "
    f"{'peak':>10} {'predicted':>10} {'ratio':>6} {'sent a step':>12} {'predicted':>12} {'calls':>6} {'scaling':>8}"
)


def row_of(contestant: Contestant, predictor: Predictor, bare_s: float | None) -> dict[str, Any]:
    """Medians of a contestant's steps, and what was predicted of them."""
    lines = [line for step in contestant.comm for line in step]
    count, step_s = len(contestant.seconds), statistics.median(contestant.seconds)

    def per_step(field: str) -> float | None:
        return sum(line[field] for line in lines) / count if lines else None

    exposed_s, communication_s = per_step("exposed_seconds"), per_step("seconds")
    predicted = predictor.predict(contestant)
    return {
        "variant": contestant.name,
        "predicted_step_s": predicted["step_s"],
        "step_s": step_s,
        "ratio": step_s / predicted["step_s"] if predicted["step_s"] else None,
        "over_bare_s": None if bare_s is None else step_s - bare_s,
        "exposed_s": exposed_s,
        "predicted_exposed_s": predicted["exposed_s"],
        "hidden_s": None if exposed_s is None else communication_s - exposed_s,
        "peak_bytes": contestant.peak_bytes,
        "predicted_peak_bytes": predicted["peak_bytes"],
        "peak_ratio": contestant.peak_bytes / predicted["peak_bytes"] if predicted["peak_bytes"] else None,
        "sent_bytes": per_step("bytes"),
        "predicted_sent_bytes": predicted["sent_bytes"],
        "calls": per_step("calls"),
        "scaling": None if bare_s is None or predictor.setup.mesh.world_size == 1 else bare_s / step_s,
        "tokens_per_s": predictor.setup.work.tokens * predictor.setup.mesh.world_size / step_s,
        "losses": contestant.losses[:4],
        "seconds": contestant.seconds,
    }


def show(row: dict[str, Any]) -> str:
    def text(key: str, unit: str) -> str:
        return "–" if row[key] is None else format_quantity(row[key], unit)

    ratio, peak_ratio = ("–" if row[key] is None else f"{row[key]:.2f}" for key in ("ratio", "peak_ratio"))
    calls = "–" if row["calls"] is None else f"{row['calls']:.0f}"
    scaling = "–" if row["scaling"] is None else f"{row['scaling']:.3f}"
    return (
        f"{row['variant']:18} {text('predicted_step_s', 's'):>10} {text('step_s', 's'):>10} {ratio:>6} "
        f"{text('over_bare_s', 's'):>10} {text('exposed_s', 's'):>10} {text('hidden_s', 's'):>10} "
        f"{text('peak_bytes', 'B'):>10} {text('predicted_peak_bytes', 'B'):>10} {peak_ratio:>6} "
        f"{text('sent_bytes', 'B'):>12} {text('predicted_sent_bytes', 'B'):>12} "
        f"{calls:>6} {scaling:>8}"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=None, choices=sorted(SHAPES))
    parser.add_argument("--variants", default=VARIANTS, help="bare, naive, bucketed-MB[-bf16], torch-MB")
    parser.add_argument("--micro-batch", type=int, default=None)
    parser.add_argument("--seq-len", type=int, default=None)
    parser.add_argument("--compile", default=None, choices=("none", "block"))
    parser.add_argument("--kernels", default="plain", choices=("plain", "fused"))
    parser.add_argument("--attention", default=None)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--block", type=int, default=None, help="steps between two waits for the device; GPU: 5")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--profile", action="store_true", help="three more steps of each under torch.profiler")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    for name in args.variants.split(","):
        parse_variant(name)
    return args


def make_setup(args: argparse.Namespace) -> Setup:
    mesh = init_mesh(args.device, force=True)
    on_gpu = mesh.device.type == "cuda"
    name = args.model or ("350m" if on_gpu else "mew-1m")
    model = load_model_config(name)
    if args.attention:
        model = replace(model, attention=args.attention)
    micro_batch, seq_len = SHAPES[name]
    # One launch updates all: a step must not wait for the host, which would hide what communication costs.
    kernels = KernelsConfig(fused=args.kernels == "fused", optimizer=on_gpu)
    work = Workload(
        model, args.micro_batch or micro_batch, args.seq_len or seq_len, device=mesh.device.type, kernels=kernels,
        dtype="bfloat16" if on_gpu else "float32", compile=args.compile or ("block" if on_gpu else "none"),
    )  # fmt: skip
    return Setup(work, mesh, kernels)


def main() -> None:
    args = arguments()
    setup = make_setup(args)
    mesh, work = setup.mesh, setup.work
    torch.set_float32_matmul_precision("high" if mesh.device.type == "cuda" else "highest")
    hardware = detect_hardware(HardwareConfig(), mesh.device, dtype=work.dtype)
    predictor = Predictor(setup, hardware)
    known = facts(hardware, work.dtype) | {
        "ranks": mesh.world_size, "backend": mesh.backend, "model": args.model or "default", "kernels": args.kernels,
        "attention": work.model.attention, "compile": work.compile, "batch": [work.micro_batch_size, work.seq_len],
        "link": predictor.describe_link(), "command": " ".join(["bench_mark_ddp", *map(str, vars(args).items())]),
    }  # fmt: skip
    names = args.variants.split(",")
    contestants = [prepare(partial(build, name, setup), mesh, args.warmup) for name in names]
    take_turns(contestants, mesh, args.steps, args.block or default_block(mesh.device))
    bare = [statistics.median(c.seconds) for c in contestants if c.name == "bare"]
    rows = [row_of(contestant, predictor, bare[0] if bare else None) for contestant in contestants]
    if args.profile:
        for row, contestant in zip(rows, contestants, strict=True):
            row["profile"] = profile_step(contestant, mesh.device)
    known["loss_difference"] = loss_difference(rows, mesh.world_size)
    if mesh.is_main:
        report(known, rows, args.out or f"bench_mark/results/ddp_{mesh.device.type}_{mesh.world_size}.json")
    close_mesh(mesh)
    worst, bound = known["loss_difference"], LOSS_TOLERANCE[work.dtype]
    if worst > bound:  # at the end: a measurement is never lost to it
        sys.exit(f"error: losses of the contestants differ by {worst:.1e}, more than {bound}")


def default_block(device: torch.device) -> int:
    """Steps in a turn: on a GPU the host may run ahead, on a CPU a shared machine drifts."""
    return 5 if device.type == "cuda" else 1


def report(known: dict[str, Any], rows: list[dict[str, Any]], path: str) -> None:
    print(
        f"{known['hardware']} · {known['ranks']} ranks over {known['backend']} · {known['dtype']} · "
        f"torch {known['torch']} · commit {known['commit']}"
    )
    print(f"link {known['link']}; losses within {known['loss_difference']:.1e}")
    if known["ranks"] == 1:
        print("one rank: a group of one, so no peer and no scaling; start with torchrun --nproc-per-node=2 for those")
    print(COLUMNS)
    for row in rows:
        print(show(row))
    profiles = {row["variant"]: row["profile"] for row in rows if "profile" in row}
    for name, profiled in profiles.items():
        if "bare" in profiles and name != "bare":
            print_difference(name, profiled, profiles["bare"])
    write_document({"facts": known, "rows": rows}, path)


if __name__ == "__main__":
    main()
