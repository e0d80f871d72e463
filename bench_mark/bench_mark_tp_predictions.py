"""Predictions of bench_mark_tp: seconds, peak memory and bytes of a stack of blocks, by the cost models of a run.

A contestant's blocks are a rank's share of a training step without its ends, its optimizer and its data ranks:
products, passes (casts of weights among them) and attention at the calibrated rates, and crossings that nothing hides
on the datasheet's links. "alone" is the whole stack on one device, "bare" one rank's part without crossings; DTensor
has none.
"""

from dataclasses import dataclass, replace

from bench_mark.bench_mark_tp_contestants import Setup
from llm.cost_model_counts import RankPart, Workload
from llm.cost_model_memory import (
    CUDA_WORKSPACE_BYTES,
    FP32,
    block_activation_bytes,
    block_backward_bytes,
    block_parameters,
    stream_bytes,
)
from llm.hardware import Hardware, known_hardware, match_gpu
from llm.plan_rank import rank_share
from llm.plan_shapes import meta_params
from llm.plan_shapes_tensor import tensor_shape
from llm.plan_time import cluster_of
from llm.plan_time_layouts import Machine, rank_work
from parallel.cost_model import Cluster, Link
from parallel.cost_model_tensor import activation_messages
from parallel.cost_model_traffic import Message, Param
from parallel.mesh_degrees import Degrees


@dataclass(frozen=True)
class Predicted:
    """Of one step on one rank; seconds are None where links are not known, all of it for what is not ours."""

    step_s: float | None = None
    waited_s: float | None = None
    peak_bytes: float | None = None
    sent_bytes: float | None = None


def crossings(name: str, setup: Setup) -> list[Message]:
    """The messages of one step of a contestant of ours: those of the blocks, from the whole model's."""
    shape = tensor_shape(meta_params(setup.model), setup.config(name))
    inside = activation_messages(shape, [setup.batch * setup.seq_len])
    return [message for message in inside if 1 <= message.stage <= setup.model.num_layers]


def predicted(name: str, setup: Setup, hardware: Hardware) -> Predicted:
    if name.startswith("dtensor"):
        return Predicted()
    ranks = 1 if name == "alone" else setup.mesh.world_size
    sends = name not in ("alone", "bare")
    config, params = setup.config("tp" if name == "bare" else name), meta_params(setup.model)
    work = work_of(name, setup, params, hardware.device)
    sent = sum(message.nbytes for message in crossings(name, setup)) if sends else 0.0
    found = Predicted(peak_bytes=peak_bytes(work, setup), sent_bytes=float(sent))
    cluster = links(hardware, ranks) if sends else Cluster(ranks, Link(1e30, 0.0), None, 0.0)
    if cluster is None:
        return found
    degrees = Degrees(dp=1, tp=ranks).resolve(ranks)
    compute = rank_work(config, params, Machine(hardware.device, hardware.rates, cluster), degrees, 0).compute
    blocks = [side(place) for side in (compute.forward, compute.backward) for place in range(1, work.layers + 1)]
    waited = sum(block.stall_s for block in blocks) if sends else 0.0
    return replace(found, step_s=sum(block.seconds for block in blocks) + waited, waited_s=waited)


def work_of(name: str, setup: Setup, params: list[Param], device: str) -> Workload:
    """A contestant's blocks as the memory model counts them; `params` are the whole model's."""
    ranks = 1 if name == "alone" else setup.mesh.world_size
    work = rank_share(setup.config("tp" if name == "bare" else name), params, device, ranks).work
    # "bare" has narrow layers that know of no other rank: each casts its own input.
    return replace(work, part=RankPart()) if name == "bare" else work


def links(hardware: Hardware, ranks: int) -> Cluster | None:
    found = match_gpu(hardware.description, known_hardware())
    if found is None or found.link_bytes_per_s is None:
        return None
    return cluster_of(found, -(-ranks // found.gpus_per_node), min(ranks, found.gpus_per_node))


def peak_bytes(work: Workload, setup: Setup) -> float:
    """When backward begins: weights, what all blocks keep, their input and result, and the last block's gradients."""
    layers, tokens = work.layers, work.tokens // work.part.stream_ranks
    ends = 3 * FP32 * tokens * setup.model.d_model  # what goes in, what comes out, and its gradient
    workspace = CUDA_WORKSPACE_BYTES if work.device == "cuda" else 0
    weights = FP32 * layers * block_parameters(work.model)
    norms = FP32 * layers * 2 * setup.model.d_model
    kept = layers * block_activation_bytes(work) - FP32 * tokens * setup.model.d_model  # the input once
    assert stream_bytes(work) == FP32, "the stack's input is float32"
    return weights + norms + kept + ends + block_backward_bytes(work) + workspace
