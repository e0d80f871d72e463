"""ZeRO-1, 2 and 3 beside torch's FSDP2: step time, memory and communication, predicted and measured, in one run.

Every contestant trains the same model on the same batch; their steps alternate, because a shared machine drifts. "over
bare" is a step's time over the one that communicates nothing, "exposed" what the log says was waited for. On one rank
the wrappers are forced on: hooks, gathers and reductions all run, in a group of one. The last line is JSON.

    python -m bench_mark.bench_mark_fsdp                                                  # one rank, wrappers forced
    torchrun --nproc-per-node=2 -m bench_mark.bench_mark_fsdp --model mew-1m              # gloo on CPUs, nccl on GPUs
    torchrun --nproc-per-node=2 -m bench_mark.bench_mark_fsdp --model 1b --kernels fused --attention triton
"""

import argparse
import statistics
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from bench_mark.bench_mark_ddp import default_block
from bench_mark.bench_mark_ddp_measure import loss_difference, prepare, take_turns
from bench_mark.bench_mark_ddp_profile import profile_step
from bench_mark.bench_mark_fsdp_contestants import VARIANTS, Contestant, Setup, build
from bench_mark.bench_mark_fsdp_predictions import predictions
from bench_mark.bench_mark_model import SHAPES, load_model_config
from bench_mark.bench_mark_model_report import facts, write_document
from configs.errors import UserError
from configs.report_numbers import format_quantity
from llm.args import HardwareConfig, KernelsConfig
from llm.cost_model import Workload
from llm.hardware import Hardware, detect_hardware
from parallel.mesh import close_mesh, init_mesh
from parallel.mesh_degrees import Degrees

COLUMNS = (
    f"{'variant':12} {'step':>9} {'predicted':>9} {'ratio':>5} {'over bare':>9} {'exposed':>9} {'host':>9} "
    f"{'peak':>9} {'predicted':>9} {'ratio':>5} {'sent':>9} {'predicted':>9}  scaling"
)
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


def get_ready(setup: Setup, names: list[str], warmup: int) -> tuple[list[Contestant], dict[str, str]]:
    """Build each contestant, warm it up and look at its memory.

    Also which ones failed: on one rank a failure does not take the others' figures with it.
    """
    contestants, failed = [], {}
    for name in names:
        try:
            contestants.append(prepare(partial(build, name, setup), setup.mesh, warmup))
        except (RuntimeError, ValueError, AssertionError) as error:
            if setup.mesh.world_size > 1:
                raise
            failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
    return contestants, failed


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
    parser.add_argument("--block", type=int, default=None, help="steps between two waits for the device; GPU: 5")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--profile", action="store_true", help="three more steps of each under torch.profiler")
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
    # The update is one launch for ours as for FSDP2, whatever the model's kernels are.
    kernels = KernelsConfig(fused=args.kernels == "fused", optimizer=on_gpu)
    work = Workload(
        model, args.micro_batch or micro_batch, args.seq_len or seq_len, device=mesh.device.type, kernels=kernels,
        dtype="bfloat16" if on_gpu else "float32", compile=args.compile or ("block" if on_gpu else "none"),
    )  # fmt: skip
    return Setup(work, mesh, kernels, args.checkpointing)


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
    contestants, known["failed"] = get_ready(setup, args.variants.split(","), args.warmup)
    take_turns(contestants, mesh, args.steps, args.block or default_block(mesh.device))
    if args.profile:
        for contestant in contestants:
            contestant.profile = profile_step(contestant, mesh.device)
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
    for name, reason in known["failed"].items():
        print(f"{name} failed: {reason}")
    write_document({"facts": known, "rows": rows}, path)
    difference, allowed = known["loss_difference"], LOSS_TOLERANCE[known["dtype"]]
    assert difference < allowed, f"the contestants' first losses differ by {difference:.1e}, more than {allowed}"


if __name__ == "__main__":
    main()
