"""The order of layouts as llm.plan predicts it, beside the order in which the real training step ranks them.

One model and one global batch under each layout in turn, in one run: seconds of a step, peak memory, bytes, and for a
pipeline its idle share. Kendall's tau counts the pairs of layouts whose measured times are more than 5% apart; all
layouts must agree on the first losses. GPUs need links that configs/hardware knows; between CPUs they are measured
first. The last line is one JSON document.

    torchrun --nproc-per-node=2 -m bench_mark.bench_mark_plan                     # gloo on CPUs, nccl on GPUs
    torchrun --nproc-per-node=2 -m bench_mark.bench_mark_plan --model 1b --layouts "dp=2 tp=2 pp=2,micro=2"
"""

import argparse
import statistics
from itertools import combinations
from typing import Any

import torch

from bench_mark.bench_mark_model import SHAPES, load_model_config
from bench_mark.bench_mark_model_report import facts, write_document
from bench_mark.bench_mark_plan_layouts import Bench, Measured, default_layouts, measure
from configs.errors import UserError
from configs.report_numbers import format_quantity
from llm.args import HardwareConfig
from llm.cost_model import predict_run
from llm.hardware import Hardware, detect_hardware
from llm.plan_links import links_of
from llm.training_communication import predict_communication
from parallel.collectives import all_gather
from parallel.cost_model import Cluster
from parallel.cost_model_pipeline import PIPELINE_WAITS
from parallel.mesh import close_mesh, init_mesh, read_ranks

COLUMNS = (
    f"{'layout':34} {'batch':>7} {'predicted':>9} {'measured':>9} {'ratio':>6} {'peak':>10} {'measured':>10} "
    f"{'ratio':>6} {'sent':>10} {'as said':>7} {'idle':>6} {'measured':>8}  bound"
)
APART = 1.05
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


def kendall_tau(rows: list[dict[str, Any]]) -> tuple[float | None, int]:
    """Tau of predicted against measured seconds over the pairs that lie apart, and how many there are."""
    signs = []
    for a, b in combinations(rows, 2):
        fast, slow = sorted((a, b), key=lambda row: row["step_s"])
        if slow["step_s"] > APART * fast["step_s"]:
            signs.append(1 if fast["predicted_step_s"] < slow["predicted_step_s"] else -1)
    return (sum(signs) / len(signs) if signs else None), len(signs)


def row_of(found: Measured, hardware: Hardware, cluster: Cluster) -> dict[str, Any]:
    """Predicted and measured of one layout, on this rank."""
    config, mesh = found.config, found.mesh
    said = predict_run(config, hardware, mesh.world_size, cluster, mesh.rank)
    expected = {axis: value["bytes"] for axis, value in predict_communication(config, mesh).items()}
    sent: dict[str, int] = {}
    for line in found.comm:
        sent[line["axis"]] = sent.get(line["axis"], 0) + line["bytes"]
    step_s = statistics.median(found.seconds)
    # The ranks' agreement on the number of targets is on the host, which is ahead of the device: no idle time. The
    # norm's sum is: there who is done first waits for the last.
    waits = [line["exposed_seconds"] for line in found.comm if line["axis"] == "pp" and line["op"] in PIPELINE_WAITS]
    own = torch.tensor([sum(waits), statistics.median(found.host_seconds)], dtype=torch.float64)
    waited, host = all_gather(own, mesh, "world").unbind(1)
    return {
        "layout": found.layout, "micro_batch_size": config.micro_batch_size, "micro_batches": found.micro_batches,
        "predicted_step_s": said["step_s"], "step_s": step_s, "exposed_s": said.get("exposed_s", 0.0),
        "measured_exposed_s": sum(line["exposed_seconds"] for line in found.comm),
        "predicted_peak_bytes": said["memory_peak_bytes"], "peak_bytes": found.peak_bytes,
        "graph_bytes": found.graph_bytes,
        "predicted_sent_bytes": expected, "sent_bytes": sent, "bound": said["notes"]["step_s"],
        "predicted_idle": said.get("bubble"), "idle": float(waited.mean()) / step_s if config.parallel.pp > 1 else None,
        "waited_by_rank_s": waited.tolist(), "host_by_rank_s": host.tolist(),
        "losses": found.losses, "seconds": found.seconds, "comm": found.comm,
    }  # fmt: skip


def show(row: dict[str, Any]) -> str:
    def number(value: float | None, unit: str = "", width: int = 9) -> str:
        return f"{'–' if value is None else format_quantity(value, unit):>{width}}"

    def share(value: float | None, width: int) -> str:
        return f"{'–' if value is None else f'{value:.3f}':>{width}}"

    same = "yes" if row["sent_bytes"] == row["predicted_sent_bytes"] else "NO"
    step, peak = row["step_s"] / row["predicted_step_s"], row["peak_bytes"] / row["predicted_peak_bytes"]
    return (
        f"{row['layout']:34} {row['micro_batch_size']:>3}x{row['micro_batches']:<3} "
        f"{number(row['predicted_step_s'], 's')} {number(row['step_s'], 's')} {step:>6.2f} "
        f"{number(row['predicted_peak_bytes'], 'bytes', 10)} {number(row['peak_bytes'], 'bytes', 10)} {peak:>6.2f} "
        f"{number(sum(row['sent_bytes'].values()), 'bytes', 10)} {same:>7} {share(row['predicted_idle'], 6)} "
        f"{share(row['idle'], 8)}  {row['bound'].split(';')[0].removeprefix('largest part: ')}"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=None, choices=sorted(SHAPES))
    parser.add_argument("--layouts", default=None, help="fields of ParallelConfig and micro=, a layout a word")
    parser.add_argument("--batch", type=int, default=None, help="sequences of a data rank under plain dp")
    parser.add_argument("--seq-len", type=int, default=None)
    parser.add_argument("--attention", default=None)
    parser.add_argument("--compile", default="none", choices=("none", "block"))
    parser.add_argument("--graph", action="store_true", help="pipelines' operations as CUDA graphs")
    parser.add_argument("--kernels", default=None, choices=("plain", "fused"))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", default=None)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if read_ranks()[1] == 1:
        print("layouts need two ranks or more: torchrun --nproc-per-node=2 -m bench_mark.bench_mark_plan")
        return
    mesh = init_mesh(args.device)
    on_gpu = mesh.device.type == "cuda"
    name = args.model or ("1b" if on_gpu else "mew-1m")
    batch, seq_len = args.batch or SHAPES[name][0], args.seq_len or SHAPES[name][1]
    kernels = args.kernels or ("fused" if on_gpu else "plain")
    bench = Bench(
        load_model_config(name), mesh, batch, seq_len, kernels, args.attention or ("triton" if on_gpu else "eager"),
        args.compile, args.graph,
    )  # fmt: skip
    torch.set_float32_matmul_precision("high" if on_gpu else "highest")
    hardware = detect_hardware(HardwareConfig(), mesh.device, dtype=bench.dtype)
    cluster = links_of(hardware, mesh)
    if cluster is None:
        raise UserError(f"the links of {hardware.description!r} are not known; add them to a file of configs/hardware")
    known = facts(hardware, bench.dtype) | {
        "ranks": mesh.world_size, "backend": mesh.backend, "model": name, "kernels": kernels, "seq_len": seq_len,
        "sequences": batch * mesh.world_size, "attention": bench.attention, "compile": args.compile,
        "graph": args.graph,
    }  # fmt: skip
    texts = args.layouts.split() if args.layouts else default_layouts(mesh.world_size, batch)
    if mesh.is_main:
        print(" · ".join(str(known[key]) for key in ("hardware", "ranks", "dtype", "torch", "commit", "model")))
        print(COLUMNS)
    rows = []
    for text in texts:
        rows.append(row_of(measure(bench, text, args.steps, args.warmup), hardware, cluster))
        if mesh.is_main:
            print(show(rows[-1]), flush=True)
    if mesh.is_main:
        report(known, rows, args.out or f"bench_mark/results/plan_{mesh.device.type}_{mesh.world_size}.json")
    close_mesh(mesh)


def report(known: dict[str, Any], rows: list[dict[str, Any]], path: str) -> None:
    known["tau"], known["pairs"] = kendall_tau(rows)
    first = [row["losses"][0] for row in rows]
    known["loss_difference"] = max(abs(a - b) for a in first for b in first)
    tau = "none" if known["tau"] is None else f"{known['tau']:.2f}"
    print(f"Kendall tau {tau} over {known['pairs']} pairs more than 5% apart (bound 0.80)")
    for key, word in (("predicted_step_s", "predicted"), ("step_s", "measured")):
        print(f"{word:9} " + " < ".join(row["layout"] for row in sorted(rows, key=lambda row: row[key])))
    print(f"first losses within {known['loss_difference']:.1e}")
    write_document({"facts": known, "rows": rows}, path)
    allowed = LOSS_TOLERANCE[known["dtype"]]
    assert known["loss_difference"] < allowed, f"first losses differ by {known['loss_difference']:.1e} > {allowed}"


if __name__ == "__main__":
    main()
