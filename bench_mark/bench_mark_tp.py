"""Tensor parallelism beside torch's DTensor: forward and backward of a stack of blocks, bytes and time of crossings.

Contestants take turns step by step. "over bare" is what the crossings add to one rank's part of the products; its
prediction, parallel/cost_model's seconds of every crossing that nothing runs beside, needs links that configs/hardware
knows. "sent" is the log's, its prediction cost_model_tensor's; DTensor sends past our log. The last line is JSON.

    torchrun --nproc-per-node=2 -m bench_mark.bench_mark_tp                       # gloo on CPUs, nccl on GPUs
    torchrun --nproc-per-node=8 -m bench_mark.bench_mark_tp --model 1b --batch 4 --seq-len 4096
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from bench_mark.bench_mark_model import load_model_config
from bench_mark.bench_mark_model_report import facts
from bench_mark.bench_mark_tp_contestants import CHUNKS, VARIANTS, Contestant, Setup, build
from configs.errors import UserError
from configs.report_numbers import format_quantity
from configs.run_dir import write_json_atomic
from llm.args import HardwareConfig
from llm.hardware import Hardware, detect_hardware, known_hardware, match_gpu
from llm.plan_shapes import meta_params
from llm.plan_shapes_tensor import tensor_shape
from llm.plan_time import cluster_of, message_seconds
from parallel.collectives import barrier
from parallel.cost_model_tensor import activation_messages
from parallel.cost_model_traffic import Message
from parallel.mesh import close_mesh, init_mesh, read_ranks
from parallel.mesh_degrees import Degrees

COLUMNS = (
    f"{'variant':16} {'step':>10} {'over bare':>10} {'predicted':>10} {'ratio':>6} {'exposed':>10} "
    f"{'sent':>10} {'predicted':>10}  bound"
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
    return contestants


def crossings(name: str, setup: Setup) -> list[Message]:
    """The messages of one step of a contestant of ours: those of the blocks, from the whole model's."""
    config = setup.config(name)
    shape = tensor_shape(meta_params(setup.model), config)
    inside = activation_messages(shape, [setup.batch * setup.seq_len])
    return [message for message in inside if 1 <= message.stage <= setup.model.num_layers]


def predicted(name: str, setup: Setup, hardware: Hardware) -> dict[str, float | None]:
    """Bytes of all crossings, and seconds of those that no product hides: of a crossing in k chunks one."""
    if name == "bare":
        return {"sent_bytes": 0.0, "over_bare_s": 0.0}
    if name.startswith("dtensor"):
        return {"sent_bytes": None, "over_bare_s": None}
    messages = crossings(name, setup)
    links = match_gpu(hardware.description, known_hardware())
    if links is None or links.link_bytes_per_s is None:
        return {"sent_bytes": sum(message.nbytes for message in messages), "over_bare_s": None}
    degrees, size = setup.parallel(name).degrees().resolve(setup.mesh.world_size), setup.mesh.world_size
    nodes = -(-size // links.gpus_per_node)
    seconds_of = message_seconds(degrees, cluster_of(links, nodes, min(size, links.gpus_per_node)))
    seconds = sum(map(seconds_of, messages)) / CHUNKS.get(name, 1)
    return {"sent_bytes": sum(message.nbytes for message in messages), "over_bare_s": seconds}


def row_of(contestant: Contestant, setup: Setup, hardware: Hardware, bare_s: float | None) -> dict[str, Any]:
    lines = [line for step in contestant.comm for line in step]
    step_s, count = statistics.median(contestant.seconds), len(contestant.seconds)
    said = predicted(contestant.name, setup, hardware)
    ours = not contestant.name.startswith("dtensor")
    return {
        "variant": contestant.name,
        "step_s": step_s,
        "over_bare_s": None if bare_s is None else step_s - bare_s,
        "predicted_over_bare_s": said["over_bare_s"],
        "exposed_s": sum(line["exposed_seconds"] for line in lines) / count if ours else None,
        "sent_bytes": sum(line["bytes"] for line in lines) / count if ours else None,
        "predicted_sent_bytes": said["sent_bytes"],
        "bound": "products" if bare_s is None or step_s < 2 * bare_s else "network",
        "result": contestant.results[0],
        "seconds": contestant.seconds,
        "comm": contestant.comm[-1],
    }


def show(row: dict[str, Any]) -> str:
    def text(key: str, unit: str) -> str:
        return f"{'–' if row[key] is None else format_quantity(row[key], unit):>10}"

    both = row["predicted_over_bare_s"] and row["over_bare_s"] is not None
    ratio = f"{row['over_bare_s'] / row['predicted_over_bare_s']:.2f}" if both else "–"
    return (
        f"{row['variant']:16} {text('step_s', 's')} {text('over_bare_s', 's')} {text('predicted_over_bare_s', 's')} "
        f"{ratio:>6} {text('exposed_s', 's')} {text('sent_bytes', 'bytes')} {text('predicted_sent_bytes', 'bytes')}  "
        f"{row['bound']}"
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
    bare = [statistics.median(c.seconds) for c in contestants if c.name == "bare"]
    rows = [row_of(contestant, setup, hardware, bare[0] if bare else None) for contestant in contestants]
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
    document = {"facts": known, "rows": rows}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(Path(path), document)
    print(json.dumps(document))
    allowed = AGREEMENT[known["dtype"]]
    assert known["difference"] < allowed, f"the contestants' results differ by {known['difference']:.1e} > {allowed}"


if __name__ == "__main__":
    main()
