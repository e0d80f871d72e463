"""What the cost models say of each contestant of bench_mark_fsdp: peak memory, bytes sent, step time.

FSDP2 sends otherwise than a layout of ours, so nothing is said of it. Copy engines are taken to be as quick as the
backend (25 MiB: 119 and 111 us on two H200), and take less from the computation beside them. In a group of one rank
nothing has to be sent, so nothing is predicted beyond the bare step.
"""

from dataclasses import replace

from bench_mark.bench_mark_fsdp_contestants import Contestant, Setup
from llm.cost_model import Workload, predict_workload
from llm.hardware import Hardware, known_hardware, match_gpu
from llm.plan_memory import rank_memory
from llm.plan_shapes import data_layout, meta_params, rank_messages
from llm.plan_time import cluster_of, message_losses, message_seconds, rank_time
from parallel.cost_model_traffic import DataLayout, Param, step_messages

PREDICTED = ("bare", "zero1", "zero1-peer", "zero2", "zero3", "zero2-all", "zero3-all")
NOTHING = {"step_s": None, "peak_bytes": None, "sent_bytes": None}


def predictions(contestant: Contestant, setup: Setup, hardware: Hardware) -> dict[str, float | None]:
    """step_s, peak_bytes and sent_bytes of one optimizer step on this rank; None for what no model knows."""
    if contestant.name not in PREDICTED:
        return NOTHING
    work, params, layout = share_of(contestant, setup)
    config, alone = contestant.config, layout.ranks == 1
    world_size, rank = (1, 0) if alone else (setup.mesh.world_size, setup.mesh.rank)
    if layout.casts_all:
        messages = step_messages(params, layout)
    else:
        messages = rank_messages(params, config, world_size, 1, rank)
    found: dict[str, float | None] = dict(NOTHING)
    if setup.checkpointing != "selective":
        found["peak_bytes"] = rank_memory(work, params, layout, setup.checkpointing).peak_bytes
    if contestant.name == "bare" or not alone:
        found["sent_bytes"] = sum(message.nbytes for message in messages)
    if alone:
        found["step_s"] = predict_workload(work, hardware)["step_s"]
        return found
    links = match_gpu(hardware.description, known_hardware())
    if links is not None and links.link_bytes_per_s is not None:
        nodes = -(-world_size // links.gpus_per_node)
        cluster = cluster_of(links, nodes, min(world_size, links.gpus_per_node))
        degrees = config.parallel.degrees().resolve(world_size)
        both = message_seconds(degrees, cluster), message_losses(cluster, layout)
        time = rank_time(work, hardware.rates, layout, messages, *both, setup.checkpointing)
        found["step_s"] = time.step_s
    return found


def share_of(contestant: Contestant, setup: Setup) -> tuple[Workload, list[Param], DataLayout]:
    """What one rank computes, the model's parameters, and how they lie over the ranks."""
    config, work = contestant.config, setup.work
    ranks = 1 if contestant.name == "bare" else setup.mesh.world_size
    casts_all = contestant.name.endswith("-all") and work.dtype == "bfloat16"
    layout = data_layout(config.parallel, config.parallel.degrees().resolve(ranks), 1, config.dtype)
    params = meta_params(work.model, config.optimizer.name)
    return replace(work, part=replace(work.part, casts_norms=casts_all)), params, replace(layout, casts_all=casts_all)
