"""Attention of one layer over the ranks of torchrun: our three ways and torch's context_parallel, forward and backward.

All begin with q, k, v and dout of a rank's tokens, its share being what each way cuts. Times are the slowest rank's.
Exposed is what our log says was waited for; torch keeps no such log.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernel.cost_model import AttentionShape, Peaks, attention_backward, attention_forward, predict
from llm.hardware import known_hardware, match_gpu
from llm.parallelize_context import ContextShards
from llm.plan_time import cluster_of
from llm.transformer import ScaledDotProductAttention
from parallel.collectives import all_reduce_max
from parallel.context_parallel_layout import MODES
from parallel.cost_model import Ring, collective_seconds
from parallel.cost_model_context import RingTime, joining_bytes, ring_backward_time, ring_forward_time
from parallel.mesh import Mesh

HEADS = ("tokens", "way", "predicted ms", "measured ms", "ratio", "exposed: said", "measured", "tokens/s")
COLUMNS = "{:>8} {:16} {:>12} {:>12} {:>6} {:>13} {:>11} {:>10}".format(*HEADS)


def measure_ranks(args: argparse.Namespace, mesh: Mesh, peaks: Peaks | None) -> list[dict[str, Any]]:
    """A row a length and way; one that fails says why and leaves the others their figures."""
    rows = []
    if mesh.is_main:
        print(COLUMNS)
    for length in map(int, (args.lengths or ("32768,131072" if mesh.device.type == "cuda" else "128")).split(",")):
        shape = AttentionShape(1, length // mesh.size("cp"), length, args.heads, args.kv_heads, args.head_dim)
        for way in (*MODES, "torch"):
            predicted = predicted_ring(shape, mesh, peaks) if way == "ring" else None
            rows.append({"tokens": length, "way": way} | measured_row(way, shape, args, mesh, predicted))
            if mesh.is_main:
                print(show(rows[-1]), flush=True)
    return rows


def measured_row(
    way: str, shape: AttentionShape, args: argparse.Namespace, mesh: Mesh, predicted: RingTime | None
) -> dict[str, Any]:
    """Seconds of one layer's forward and backward, or "error"."""
    if way == "torch" and mesh.device.type == "cpu":
        return {"error": "torch's context_parallel does not run on a CPU"}
    try:
        with torch_step(shape, mesh) if way == "torch" else nullcontext(our_step(way, shape, args, mesh)) as step:
            seconds, exposed_s = timed(step, args, mesh)
    except (RuntimeError, ValueError, AssertionError, ImportError) as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}
    return {
        "predicted_s": predicted and predicted.seconds, "measured_s": seconds,
        "ratio": seconds / predicted.seconds if predicted else None,
        "predicted_exposed_s": predicted and predicted.exposed_s,
        "exposed_s": None if way == "torch" else exposed_s, "tokens_per_s": shape.S / seconds,
    }  # fmt: skip


def timed(step: Callable[[], None], args: argparse.Namespace, mesh: Mesh) -> tuple[float, float]:
    """The median over repeats of the slowest rank's seconds, and exposed seconds a step from the log."""
    seconds = []
    for index in range(args.warmup + args.repeats):
        if index == args.warmup:
            mesh.log.drain(index)
        if mesh.device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        if mesh.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    exposed_s = sum(line["exposed_seconds"] for line in mesh.log.drain(0)) / args.repeats
    slowest = all_reduce_max(torch.tensor(seconds[args.warmup :], dtype=torch.float64), mesh, "cp")
    return statistics.median(slowest.tolist()), exposed_s


def our_step(way: str, shape: AttentionShape, args: argparse.Namespace, mesh: Mesh) -> Callable[[], None]:
    """One layer's attention through the seam that the model uses."""
    backend = args.backend or ("triton" if mesh.device.type == "cuda" else "eager")
    shards = ContextShards(mesh, way, backend)
    token_ids = torch.zeros(shape.B, shape.T, dtype=torch.int64, device=mesh.device)
    share = shards.make_context(token_ids, shards.columns(shape.S, mesh.device)[None]).share
    inner, (q, k, v, dout) = ScaledDotProductAttention(backend), make_share(shape, mesh.device)

    def step() -> None:
        torch.autograd.grad(share.attend(q, k, v, inner)[0], (q, k, v), dout)

    return step


def make_share(shape: AttentionShape, device: torch.device) -> list[Tensor]:
    """q, k, v and dout (B, T/P, heads, D) of this rank; q, k, v require gradients."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads = (shape.H, shape.K, shape.K, shape.H)
    q, k, v, dout = (torch.randn(shape.B, shape.T, count, shape.D, device=device).to(dtype) for count in heads)
    return [*(x.requires_grad_() for x in (q, k, v)), dout]


@contextmanager
def torch_step(shape: AttentionShape, mesh: Mesh) -> Iterator[Callable[[], None]]:
    """torch's context_parallel over its flash kernel, with kv heads repeated, as its ring takes them."""
    from torch.distributed.tensor.experimental import context_parallel

    device_mesh = init_device_mesh("cuda", (mesh.size("cp"),), mesh_dim_names=("cp",))
    q, k, v = (torch.randn(shape.B, shape.H, shape.S, shape.D, device=mesh.device).bfloat16() for _ in range(3))
    dout = torch.randn(shape.B, shape.H, shape.T, shape.D, device=mesh.device).bfloat16()
    with context_parallel(device_mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):  # inside, they are cut
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]

        def step() -> None:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                out = F.scaled_dot_product_attention(*inputs, is_causal=True)
            torch.autograd.grad(out, inputs, dout)

        yield step


def predicted_ring(shape: AttentionShape, mesh: Mesh, peaks: Peaks | None) -> RingTime | None:
    """Forward and backward of a ring: blocks at their roofline, messages on the datasheet's link, sums in memory."""
    found = match_gpu(torch.cuda.get_device_name(), known_hardware()) if mesh.device.type == "cuda" else None
    if peaks is None or found is None or found.link_bytes_per_s is None:
        return None
    ranks, cluster = mesh.size("cp"), cluster_of(found, 1, found.gpus_per_node)
    pairs = shape.T * shape.T / 2  # of a causal block, and of half a block
    keys = 2 * shape.B * shape.T * shape.K * shape.D
    keys_s, sums_s = (collective_seconds("exchange", size * keys, Ring(ranks), cluster) for size in (2, 4))
    block = AttentionShape(shape.B, shape.T, shape.T, shape.H, shape.K, shape.D)
    forward_s, backward_s = (
        predict(work(block, pairs), peaks).seconds for work in (attention_forward, attention_backward)
    )
    forward = ring_forward_time(ranks, forward_s, keys_s)
    backward = ring_backward_time(ranks, backward_s, keys_s, sums_s)
    joined = sum(joining_bytes(ranks, shape.B * shape.T, shape.H * shape.D, shape.K * shape.D)) / peaks.memory_bytes
    return RingTime(forward.seconds + backward.seconds + joined, forward.exposed_s + backward.exposed_s)


def show(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['tokens']:>8} {row['way']:16} {row['error']}"

    def ms(key: str) -> str:
        return "–" if row[key] is None else f"{row[key] * 1e3:.3f}"

    ratio = "–" if row["ratio"] is None else f"{row['ratio']:.2f}"
    return (
        f"{row['tokens']:>8} {row['way']:16} {ms('predicted_s'):>12} {ms('measured_s'):>12} {ratio:>6} "
        f"{ms('predicted_exposed_s'):>13} {ms('exposed_s'):>11} {row['tokens_per_s']:>10,.0f}"
    )
