"""The cost model of a run: what it will need, from its config and the hardware alone, before its first step.

Three parts, all pure functions of plain numbers: cost_model_counts (parameters and FLOPs, exact), cost_model_memory
(bytes by part and phase) and cost_model_time (step time at the device's calibrated rates). `predict_run` joins them.
"""

from dataclasses import asdict
from typing import Any

from llm.args import TrainConfig
from llm.cost_model_counts import (
    ParameterCount,
    Workload,
    count_parameters,
    forward_flops_per_token,
    train_flops_per_token,
    workload_of,
)
from llm.cost_model_memory import MemoryPrediction, predict_memory
from llm.cost_model_time import StepPrediction, predict_step_time
from llm.hardware import Hardware, known_hardware
from llm.metrics import mfu
from llm.plan_memory import rank_memory
from llm.plan_shapes import data_layout, meta_params, rank_messages
from llm.plan_time import RankTime, cluster_of, message_seconds, rank_time
from parallel.cost_model_traffic import Param

__all__ = [
    "MemoryPrediction",
    "ParameterCount",
    "StepPrediction",
    "Workload",
    "count_parameters",
    "forward_flops_per_token",
    "predict_memory",
    "predict_run",
    "predict_step_time",
    "predict_workload",
    "train_flops_per_token",
    "workload_of",
]


def predict_run(config: TrainConfig, hardware: Hardware, world_size: int = 1) -> dict[str, Any]:
    """What report.json holds as "predicted" before step 1; config resolved, with model.vocab_size filled in.

    Keys: parameters, active_parameters, flops_per_token (training), memory_peak_bytes, step_s, tokens_per_s (global),
    mfu (None on an unknown device), memory and step (their parts), bound, notes (remarks by key).
    """
    parallel = config.parallel
    degrees = parallel.degrees().resolve(world_size)
    work = workload_of(config, hardware.device, degrees.dp)
    found = predict_workload(work, hardware)
    if degrees.dp != world_size:  # tensor, context or pipeline parallel: a rank has a part of these products
        unknown = dict.fromkeys(("memory_peak_bytes", "step_s", "tokens_per_s", "mfu"))
        note = "not predicted where ranks share one model's products"
        return found | unknown | {"notes": found["notes"] | dict.fromkeys(unknown, note)}
    if world_size == 1 and parallel.activation_checkpointing == "none":
        return found
    layout = data_layout(parallel, degrees, work.grad_accum_steps, work.dtype)
    params = meta_params(config.model, config.optimizer.name)
    memory = rank_memory(work, params, layout, parallel.activation_checkpointing)
    notes = found["notes"] | {"memory_peak_bytes": f"largest phase: {memory.phase}; one rank of {world_size}"}
    found |= {"memory_peak_bytes": memory.peak_bytes, "memory": asdict(memory), "notes": notes}
    step = predict_rank_step(config, hardware, work, params)
    if step is None:
        notes["step_s"] += "; the links' speed is not known, so communication is not in it"
        return found
    notes["step_s"] += f"; {step.step.exposed_s * 1e3:.1f} ms of communication exposed"
    tokens_per_s, peak = work.global_tokens / step.step_s, hardware.peak_flops(work.dtype)
    return found | {
        "step_s": step.step_s,
        "tokens_per_s": tokens_per_s,
        "mfu": mfu(found["flops_per_token"], tokens_per_s, peak and peak * world_size),
        "exposed_s": step.step.exposed_s,
    }


def predict_rank_step(config: TrainConfig, hardware: Hardware, work: Workload, params: list[Param]) -> RankTime | None:
    """A step's seconds with its communication, for a GPU of configs/hardware whose links are known; else None."""
    known = {entry.name: entry for entry in known_hardware()} if hardware.device == "cuda" else {}
    links = known.get(hardware.name)
    if links is None or links.link_bytes_per_s is None:
        return None
    nodes = -(-work.world_size // links.gpus_per_node)
    if nodes > 1 and links.network_bytes_per_s is None:
        return None
    degrees = config.parallel.degrees().resolve(work.world_size)
    layout = data_layout(config.parallel, degrees, work.grad_accum_steps, work.dtype)
    messages = rank_messages(params, config, work.world_size, work.grad_accum_steps)
    seconds_of = message_seconds(degrees, cluster_of(links, nodes, links.gpus_per_node))
    checkpointing = config.parallel.activation_checkpointing
    return rank_time(work, hardware.rates, layout, messages, seconds_of, checkpointing)


def predict_workload(work: Workload, hardware: Hardware) -> dict[str, Any]:
    """The prediction for one workload; see predict_run."""
    count, memory, step = count_parameters(work.model), predict_memory(work), predict_step_time(work, hardware.rates)
    flops_per_token = train_flops_per_token(work.model, work.seq_len)
    peak = hardware.peak_flops(work.dtype)
    notes = {"step_s": f"largest part: {step.bound}"}
    if peak is None:
        notes["mfu"] = hardware.note
    elif hardware.device == "cpu":
        notes["mfu"] = "of the fastest matrix product measured at start"
    phase = max(memory.phases_bytes, key=memory.phases_bytes.get)
    notes["memory_peak_bytes"] = f"largest phase: {phase}; one device"
    return {
        "parameters": count.total,
        "active_parameters": count.active,
        "flops_per_token": flops_per_token,
        "memory_peak_bytes": memory.peak_bytes,
        "step_s": step.step_s,
        "tokens_per_s": step.tokens_per_s,
        "mfu": mfu(flops_per_token, step.tokens_per_s, peak and peak * work.world_size),
        "memory": asdict(memory),
        "step": {key: value for key, value in asdict(step).items() if key.endswith("_s")},
        "bound": step.bound,
        "notes": notes,
    }
