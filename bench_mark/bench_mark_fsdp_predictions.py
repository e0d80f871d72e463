"""What the cost models say of each contestant of bench_mark_fsdp: peak memory, bytes sent, step time.

FSDP2 and the variants that gather everything in bfloat16 send otherwise than a layout of ours, so nothing is said of
them. Copy engines are taken to be as quick as the backend (25 MiB: 119 and 111 us on two H200), and take less from the
computation beside them. In a group of one rank nothing has to be sent, so nothing is predicted beyond the bare step.
"""

from bench_mark.bench_mark_fsdp_contestants import Contestant, Setup
from llm.cost_model import predict_workload
from llm.hardware import Hardware, known_hardware, match_gpu
from llm.plan_memory import rank_memory
from llm.plan_shapes import data_layout, meta_params, rank_messages
from llm.plan_time import cluster_of, message_losses, message_seconds, rank_time

PREDICTED = ("bare", "zero1", "zero1-peer", "zero2", "zero3")
NOTHING = {"step_s": None, "peak_bytes": None, "sent_bytes": None}


def predictions(contestant: Contestant, setup: Setup, hardware: Hardware) -> dict[str, float | None]:
    """step_s, peak_bytes and sent_bytes of one optimizer step on this rank; None for what no model knows."""
    if contestant.name not in PREDICTED:
        return NOTHING
    alone = contestant.name == "bare" or setup.mesh.world_size == 1
    world_size, rank = (1, 0) if alone else (setup.mesh.world_size, setup.mesh.rank)
    config = contestant.config
    params, degrees = (
        meta_params(setup.work.model, config.optimizer.name),
        config.parallel.degrees().resolve(world_size),
    )
    layout = data_layout(config.parallel, degrees, 1, config.dtype)
    messages = rank_messages(params, config, world_size, 1, rank)
    found: dict[str, float | None] = dict(NOTHING)
    if setup.checkpointing != "selective":
        found["peak_bytes"] = rank_memory(setup.work, params, layout, setup.checkpointing).peak_bytes
    if contestant.name == "bare" or not alone:
        found["sent_bytes"] = sum(message.nbytes for message in messages)
    if alone:
        found["step_s"] = predict_workload(setup.work, hardware)["step_s"]
        return found
    links = match_gpu(hardware.description, known_hardware())
    if links is not None and links.link_bytes_per_s is not None:
        nodes = -(-world_size // links.gpus_per_node)
        cluster = cluster_of(links, nodes, min(world_size, links.gpus_per_node))
        both = message_seconds(degrees, cluster), message_losses(cluster, layout)
        time = rank_time(setup.work, hardware.rates, layout, messages, *both, setup.checkpointing)
        found["step_s"] = time.step_s
    return found
