"""The training step of one long sequence on one device, and on several with context parallelism: time, memory, bytes.

A whole model with its optimizer (state sharded over the same ranks, zero=3), where bench_mark_cp has one layer's
attention. A batch has `--tokens` tokens in all, cut into sequences of each length. Started on one rank it measures that
device alone and writes what several ranks, told by --alone where that lies, are compared with: throughput (bound: 1.85
at 64K tokens on two) and peak memory (bound: 0.55). Predictions are a run's (llm/cost_model.predict_run) with
attention at the rates of our own kernel, measured at a length that no row has. The last line is one JSON document.

    python -m bench_mark.bench_mark_cp_model --out runs/alone.json
    torchrun --nproc-per-node=2 -m bench_mark.bench_mark_cp_model --alone runs/alone.json
"""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench_mark.bench_mark_cp import make_inputs, measure_one_kernel
from bench_mark.bench_mark_cp_predictions import CALIBRATED_TOKENS
from bench_mark.bench_mark_model import load_model_config
from bench_mark.bench_mark_model_report import facts, write_document
from bench_mark.bench_mark_plan import COLUMNS, row_of, show
from bench_mark.bench_mark_plan_layouts import Bench, measure
from configs.errors import UserError
from kernel.cost_model import AttentionShape
from llm.args import HardwareConfig
from llm.hardware import Hardware, detect_hardware
from llm.plan_links import links_of
from parallel.mesh import close_mesh, init_mesh, read_ranks

THROUGHPUT, MEMORY, BOUNDS_AT = 1.85, 0.55, 65536  # bounds on two devices


@dataclass
class Sequences(Bench):
    """A batch of so many tokens in all, whatever the number of ranks."""

    tokens_of_batch: int = 0

    @property
    def sequences(self) -> int:
        return self.tokens_of_batch // self.seq_len


def with_own_attention(hardware: Hardware, bench: Bench, device: torch.device, repeats: int) -> Hardware:
    """The device with the rates of the attention that the model runs, in place of torch's."""
    model = bench.model
    tokens = CALIBRATED_TOKENS if device.type == "cuda" else 2 * bench.seq_len
    shape = AttentionShape(1, tokens, tokens, model.num_heads, model.num_kv_heads, model.head_dim)
    timing = {"device": device, "repeats": repeats, "warmup": 2}
    forward_s, backward_s = measure_one_kernel(bench.attention, make_inputs(shape, device), timing)
    flops = 2.0 * tokens * tokens * model.num_heads * model.head_dim  # half of the pairs; twice as many in backward
    own = (model.head_dim, ((tokens, flops / forward_s),), ((tokens, 2 * flops / backward_s),))
    return replace(hardware, rates=replace(hardware.rates, attention=(own,)))


def of_one(row: dict[str, Any], alone: dict[str, Any] | None) -> dict[str, Any]:
    """Throughput and memory over those of one device, and whether the bounds are met."""
    if alone is None:
        return {"throughput_of_one": None, "memory_of_one": None}
    return {
        "throughput_of_one": alone["step_s"] / row["step_s"],
        "memory_of_one": row["peak_bytes"] / alone["peak_bytes"],
    }


def show_of_one(row: dict[str, Any]) -> str:
    if row["throughput_of_one"] is None:
        return ""
    text = f"{'':34} of one device: throughput {row['throughput_of_one']:.3f}, memory {row['memory_of_one']:.3f}"
    if row["seq_len"] != BOUNDS_AT:
        return text
    fast, small = row["throughput_of_one"] >= THROUGHPUT, row["memory_of_one"] <= MEMORY
    words = ("missed", "met")
    return f"{text}  bounds on two: {THROUGHPUT} {words[fast]}, {MEMORY} {words[small]}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=None, help="a file of configs/model")
    parser.add_argument("--layers", type=int, default=None, help="so many blocks in place of the model's")
    parser.add_argument("--lengths", default=None, help="tokens of a sequence, separated by commas")
    parser.add_argument("--tokens", type=int, default=None, help="of a batch; at least one sequence")
    parser.add_argument("--layouts", default=None, help="of several ranks, a layout a word")
    parser.add_argument("--alone", default=None, help="what one rank wrote")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", default=None)
    return parser.parse_args()


def measure_length(
    args: argparse.Namespace, bench: Sequences, hardware: Hardware, alone: dict[int, dict[str, Any]]
) -> list[dict[str, Any]]:
    """A row a layout; one that does not fit says so."""
    mesh, rows = bench.mesh, []
    sharded = f"dp=1,cp={mesh.world_size},zero=3"
    layouts = (args.layouts or (sharded if mesh.world_size > 1 else "dp=1")).split()
    for layout in layouts:
        cluster = links_of(hardware, mesh)
        if cluster is None and mesh.world_size > 1:
            raise UserError(f"links of {hardware.description!r} are not known; add them to a file of configs/hardware")
        micro = max(1, bench.sequences)
        row = row_of(measure(bench, f"{layout},micro={micro}", args.steps, args.warmup), hardware, cluster)
        row |= {"seq_len": bench.seq_len, "layout": f"{layout} {bench.sequences} x {bench.seq_len}"}
        rows.append(row | of_one(row, alone.get(bench.seq_len)))
        if mesh.is_main:
            print("\n".join(filter(None, (show(rows[-1]), show_of_one(rows[-1])))), flush=True)
    return rows


def main() -> None:
    args = arguments()
    mesh = init_mesh(args.device, force=read_ranks()[1] == 1)  # a process group for meshes made later
    on_gpu = mesh.device.type == "cuda"
    lengths = list(map(int, (args.lengths or ("8192,65536" if on_gpu else "128")).split(",")))
    model = load_model_config(args.model or ("1b" if on_gpu else "mew-1m"))
    model = replace(model, max_seq_len=max(lengths), num_layers=args.layers or model.num_layers)
    kernels, attention = ("fused", "triton") if on_gpu else ("plain", "eager")
    torch.set_float32_matmul_precision("high" if on_gpu else "highest")
    hardware = detect_hardware(HardwareConfig(), mesh.device, dtype="bfloat16" if on_gpu else "float32")
    alone = {}
    if args.alone:
        alone = {row["seq_len"]: row for row in json.loads(Path(args.alone).read_text(encoding="utf-8"))["rows"]}
    known = facts(hardware, "bfloat16" if on_gpu else "float32") | {"ranks": mesh.world_size, "args": vars(args)}
    if mesh.is_main:
        print(" · ".join(str(known[key]) for key in ("hardware", "ranks", "dtype", "torch", "commit")))
        print(COLUMNS)
    rows: list[dict[str, Any]] = []
    bench = Sequences(model, mesh, 1, lengths[0], kernels, attention, "none")
    hardware = with_own_attention(hardware, bench, mesh.device, repeats=5)
    initial = bench.initial
    for length in lengths:
        bench = Sequences(
            model, mesh, 1, length, kernels, attention, "none", tokens_of_batch=max(length, args.tokens or 0)
        )
        bench.__dict__["initial"] = initial  # drawn once for all lengths
        rows += measure_length(args, bench, hardware, alone)
    if mesh.is_main:
        path = args.out or f"bench_mark/results/cp_model_{mesh.device.type}_{mesh.world_size}.json"
        write_document({"facts": known, "rows": rows}, path)
    close_mesh(mesh)


if __name__ == "__main__":
    main()
