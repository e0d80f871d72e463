"""Attention of one layer over the ranks of torchrun: one device alone, our three ways and torch's context_parallel.

All begin with q, k, v and dout of a rank's tokens, its share being what each way cuts; "alone" has the whole sequence
on every rank and sends nothing. Times are the slowest rank's, forward and backward together. Exposed is what our log
says was waited for; torch keeps no such log. Memory is rank 0's peak with its inputs.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench_mark.bench_mark_cp_predictions import HOST_TOKENS, Rates, context_shape, rank_shape, way_time
from configs.report_numbers import format_quantity
from kernel.cost_model import AttentionShape
from llm.hardware import known_hardware, match_gpu
from llm.metrics_memory import PeakMemory
from llm.parallelize_context import ContextShards
from llm.plan_time import cluster_of
from llm.transformer import ScaledDotProductAttention
from llm.transformer_context import make_context
from parallel.collectives import all_reduce_max
from parallel.context_parallel_layout import MODES
from parallel.cost_model import Cluster
from parallel.cost_model_context import context_messages
from parallel.cost_model_context_layer import layer_peak_bytes
from parallel.mesh import Mesh

WAYS = ("alone", *MODES, "torch")
BOUND, BOUND_AT = 1.85, 65536  # throughput over one device's, on two
HEADS = ("tokens", "way", "predicted", "measured", "ratio", "exposed", "measured", "peak", "measured", "ratio", "sent",
         "measured", "of one")  # fmt: skip
COLUMNS = "{:>7} {:10} {:>9} {:>9} {:>5} {:>9} {:>9} {:>9} {:>9} {:>5} {:>9} {:>9} {:>6}  bound".format(*HEADS)


@dataclass(frozen=True)
class Setting:
    """What all rows share; rates and cluster are None where the device or its links are not known."""

    mesh: Mesh
    backend: str
    repeats: int
    warmup: int
    rates: Rates | None
    cluster: Cluster | None

    @property
    def ranks(self) -> int:
        return self.mesh.size("cp")

    @property
    def device(self) -> torch.device:
        return self.mesh.device


def measure_ranks(args: argparse.Namespace, mesh: Mesh, rates: Rates | None, backend: str) -> list[dict[str, Any]]:
    """A row a length and way; one that fails says why and leaves the others their figures."""
    setting = Setting(mesh, backend, args.repeats, args.warmup, rates, links_of(mesh))
    whole = AttentionShape(1, 0, 0, args.heads, args.kv_heads, args.head_dim, 2 if mesh.device.type == "cuda" else 4)
    short = replace(whole, T=HOST_TOKENS, S=HOST_TOKENS)
    known = rates is not None and setting.cluster is not None
    host = {way: measured_row(way, short, setting)["measured_s"] for way in WAYS[:-1]} if known else {}
    rows = []
    if mesh.is_main:
        print(COLUMNS)
    for length in map(int, (args.lengths or ("32768,131072" if mesh.device.type == "cuda" else "128")).split(",")):
        shape, alone_s = replace(whole, T=length, S=length), None
        for way in args.ways.split(","):
            row = {"tokens": length, "way": way} | measured_row(way, shape, setting)
            alone_s = row["measured_s"] if way == "alone" and "error" not in row else alone_s
            rows.append(row | judged(row, shape, setting, host.get(way), alone_s))
            if mesh.is_main:
                print(show(rows[-1]), flush=True)
    return rows


def links_of(mesh: Mesh) -> Cluster | None:
    """The links of this host's GPUs from configs/hardware."""
    found = match_gpu(torch.cuda.get_device_name(), known_hardware()) if mesh.device.type == "cuda" else None
    if found is None or found.link_bytes_per_s is None:
        return None
    return cluster_of(found, 1, found.gpus_per_node)


def measured_row(way: str, shape: AttentionShape, setting: Setting) -> dict[str, Any]:
    """Seconds, exposed seconds, peak and bytes of one layer's forward and backward, or "error"."""
    if way == "torch" and setting.device.type == "cpu":
        return {"error": "torch's context_parallel does not run on a CPU"}
    gc.collect()
    others = torch.cuda.memory_allocated(setting.device) if setting.device.type == "cuda" else 0
    try:
        with torch_step(shape, setting.mesh) if way == "torch" else nullcontext(our_step(way, shape, setting)) as run:
            return timed(*run, setting, others)
    except (RuntimeError, ValueError, AssertionError, ImportError) as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}


def timed(step: Callable[[], None], held: list[Tensor], setting: Setting, others: int) -> dict[str, Any]:
    """The median over repeats of the slowest rank's seconds; exposed seconds and bytes a step from the log."""
    mesh, seconds = setting.mesh, []
    for index in range(setting.warmup + setting.repeats):
        if index == setting.warmup:
            mesh.log.drain(index)
        if mesh.device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        if mesh.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    lines = [line for line in mesh.log.drain(0) if line["axis"] == "cp"]
    with PeakMemory(setting.device, held) as memory:
        step()
    mesh.log.drain(0)
    slowest = all_reduce_max(torch.tensor(seconds[setting.warmup :], dtype=torch.float64), mesh, "cp")
    return {
        "measured_s": statistics.median(slowest.tolist()), "peak_bytes": memory.peak_bytes - others,
        "exposed_s": sum(line["exposed_seconds"] for line in lines) / setting.repeats,
        "sent_bytes": sum(line["bytes"] for line in lines) / setting.repeats,
    }  # fmt: skip


def judged(
    row: dict[str, Any], shape: AttentionShape, setting: Setting, host_s: float | None, alone_s: float | None
) -> dict[str, Any]:
    """What was predicted of a row, and its ratios."""
    if "error" in row:
        return {}
    found = {"of_one": alone_s / row["measured_s"] if alone_s else None, "tokens_per_s": shape.S / row["measured_s"]}
    names = ("predicted_s", "predicted_exposed_s", "predicted_peak_bytes", "predicted_sent_bytes")
    found |= dict.fromkeys((*names, "ratio", "peak_ratio"))
    if row["way"] == "torch":
        return found | {"exposed_s": None, "sent_bytes": None}
    ranks = 1 if row["way"] == "alone" else setting.ranks
    tokens, layer = shape.B * shape.T // ranks, context_shape(shape, ranks, row["way"])
    messages = context_messages(layer, [tokens]) if ranks > 1 else ()
    found["predicted_sent_bytes"] = float(sum(message.nbytes for message in messages))
    found["predicted_peak_bytes"] = layer_peak_bytes(layer, tokens)
    found["peak_ratio"] = row["peak_bytes"] / found["predicted_peak_bytes"]
    if setting.rates is not None and setting.cluster is not None:
        said = way_time(row["way"], shape, ranks, setting.rates, setting.cluster)
        found["predicted_s"], found["predicted_exposed_s"] = max(said.seconds, host_s), said.exposed_s
        found["ratio"] = row["measured_s"] / found["predicted_s"]
    return found


Run = tuple[Callable[[], None], list[Tensor]]  # a step, and the tensors that lie there before it


def our_step(way: str, shape: AttentionShape, setting: Setting) -> Run:
    """One layer's attention through the seam that the model uses."""
    device = setting.device
    inner = ScaledDotProductAttention(setting.backend)
    own = shape if way == "alone" else rank_shape(shape, setting.ranks)
    token_ids = torch.zeros(own.B, own.T, dtype=torch.int64, device=device)
    if way == "alone":
        ctx = make_context(token_ids)
        attend = lambda q, k, v: inner(q, k, v, ctx)  # noqa: E731
    else:
        shards = ContextShards(setting.mesh, way, setting.backend)
        share = shards.make_context(token_ids, shards.columns(shape.S, device)[None]).share
        attend = lambda q, k, v: share.attend(q, k, v, inner)  # noqa: E731
    q, k, v, dout = make_share(own, device)

    def step() -> None:
        torch.autograd.grad(attend(q, k, v)[0], (q, k, v), dout)

    return step, [q, k, v, dout]


def make_share(shape: AttentionShape, device: torch.device) -> list[Tensor]:
    """q, k, v and dout (B, T, heads, D) of this rank; q, k, v require gradients."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads = (shape.H, shape.K, shape.K, shape.H)
    q, k, v, dout = (torch.randn(shape.B, shape.T, count, shape.D, device=device).to(dtype) for count in heads)
    return [*(x.requires_grad_() for x in (q, k, v)), dout]


@contextmanager
def torch_step(shape: AttentionShape, mesh: Mesh) -> Iterator[Run]:
    """torch's context_parallel over its flash kernel, with kv heads repeated, as its ring takes them."""
    from torch.distributed.tensor.experimental import context_parallel

    device_mesh = init_device_mesh("cuda", (mesh.size("cp"),), mesh_dim_names=("cp",))
    q, k, v = (torch.randn(shape.B, shape.H, shape.S, shape.D, device=mesh.device).bfloat16() for _ in range(3))
    dout = torch.randn(shape.B, shape.H, shape.T // mesh.size("cp"), shape.D, device=mesh.device).bfloat16()
    cut = {"buffers": [q, k, v], "buffer_seq_dims": [2, 2, 2], "no_restore_buffers": {q, k, v}}
    with context_parallel(device_mesh, **cut):  # inside, they are a rank's part
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        for whole in (q, k, v):  # their memory is still that of the whole sequence
            whole.untyped_storage().resize_(0)

        def step() -> None:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                out = F.scaled_dot_product_attention(*inputs, is_causal=True)
            torch.autograd.grad(out, inputs, dout)

        yield step, [*inputs, dout]


def show(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['tokens']:>7} {row['way']:10} {row['error']}"

    def text(key: str, unit: str = "") -> str:
        return f"{'–' if row[key] is None else format_quantity(row[key], unit):>9}"

    def share(key: str, width: int) -> str:
        return f"{'–' if row[key] is None else format(row[key], '.2f'):>{width}}"

    bound = ""
    if row["tokens"] == BOUND_AT and row["way"] == "ring" and row["of_one"] is not None:
        bound = f"{BOUND} {'met' if row['of_one'] >= BOUND else 'missed'} (on two)"
    return (
        f"{row['tokens']:>7} {row['way']:10} {text('predicted_s', 's')} {text('measured_s', 's')} {share('ratio', 5)} "
        f"{text('predicted_exposed_s', 's')} {text('exposed_s', 's')} {text('predicted_peak_bytes', 'bytes')} "
        f"{text('peak_bytes', 'bytes')} {share('peak_ratio', 5)} {text('predicted_sent_bytes', 'bytes')} "
        f"{text('sent_bytes', 'bytes')} {share('of_one', 6)}  {bound}"
    )
