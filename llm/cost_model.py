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
from llm.cost_model_lora import count_adapters, flops_per_trained_token, lora_memory, lora_step
from llm.cost_model_memory import MemoryPrediction, predict_memory
from llm.cost_model_time import StepPrediction, predict_step_time
from llm.hardware import Hardware
from llm.lora import LoraConfig
from llm.metrics import mfu
from llm.plan_links import known_links
from llm.plan_memory_layouts import layout_memory
from llm.plan_shapes import meta_params
from llm.plan_time import RankTime
from llm.plan_time_layouts import Machine, layout_time
from parallel.cost_model import Cluster, Link
from parallel.pipeline_schedules_simulation import Simulation

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


UNKNOWN_LINKS = "not predicted: the links between the ranks that share a model's products are not known"
NO_LINKS = Cluster(1, Link(1.0, 0.0), None, 0.0)  # of a single rank


def predict_run(
    config: TrainConfig, hardware: Hardware, world_size: int = 1, cluster: Cluster | None = None, rank: int = 0
) -> dict[str, Any]:
    """What report.json holds as "predicted" before step 1; config resolved, with model.vocab_size filled in.

    Keys: parameters, active_parameters, flops_per_token (training), memory_peak_bytes (of rank `rank`), step_s,
    tokens_per_s (global), mfu (None on an unknown device), memory and step (their parts), bound, notes (remarks by
    key); with links (`cluster`, or those of a known GPU) exposed_s, and under pipeline parallelism bubble and schedule.
    """
    parallel = config.parallel
    degrees = parallel.degrees().resolve(world_size)
    found = predict_workload(workload_of(config, hardware.device, degrees.dp), hardware, config.lora)
    if world_size == 1 and parallel.activation_checkpointing == "none":
        return found
    params = meta_params(config.model, config.optimizer.name, config.lora)
    memory = layout_memory(config, params, hardware.device, world_size, rank)
    notes = found["notes"] | {"memory_peak_bytes": f"largest phase: {memory.phase}; one rank of {world_size}"}
    found |= {"memory_peak_bytes": memory.peak_bytes, "memory": asdict(memory), "notes": notes}
    cluster = cluster or known_links(hardware, world_size)
    if cluster is None and world_size > degrees.dp:
        return found | dict.fromkeys(("step_s", "tokens_per_s", "mfu")) | {"notes": notes | {"step_s": UNKNOWN_LINKS}}
    if cluster is None and world_size > 1:
        notes["step_s"] += "; the links' speed is not known, so communication is not in it"
        return found
    machine = Machine(hardware.device, hardware.rates, cluster or NO_LINKS)
    return found | time_keys(
        config, layout_time(config, params, machine, world_size, rank), found, hardware, world_size
    )


def time_keys(
    config: TrainConfig, time: RankTime, found: dict[str, Any], hardware: Hardware, world_size: int
) -> dict[str, Any]:
    """The step's seconds and what follows from them."""
    notes = dict(found["notes"])
    notes["step_s"] += f"; {time.step.exposed_s * 1e3:.1f} ms of communication exposed"
    tokens_per_s = config.global_batch_tokens / time.step_s
    peak = hardware.peak_flops(config.dtype)
    keys = {
        "step_s": time.step_s,
        "tokens_per_s": tokens_per_s,
        "mfu": mfu(found["flops_per_token"], tokens_per_s, peak and peak * world_size),
        "exposed_s": time.step.exposed_s,
        "exposed_by_axis_s": time.exposed_by_axis,
        "notes": notes,
    }
    if time.simulation is not None:
        keys |= {"bubble": time.idle_s / time.step_s, "schedule": schedule_of(time.simulation)}
    return keys


def schedule_of(simulation: Simulation) -> dict[str, Any]:
    """A pipeline's step on paper, to be drawn."""
    schedule = simulation.schedule
    facts = {"name": schedule.name, "ranks": schedule.ranks, "micro_batches": schedule.micro_batches}
    return facts | {"seconds": simulation.total, "rows": simulation.rows()}


def predict_workload(work: Workload, hardware: Hardware, lora: LoraConfig = LoraConfig()) -> dict[str, Any]:
    """The prediction for one workload; see predict_run."""
    count, adapters = count_parameters(work.model), 0
    if lora.rank:
        memory, step = lora_memory(work, lora), lora_step(work, hardware.rates, lora)
        adapters = count_adapters(work.model, lora)
    else:
        memory, step = predict_memory(work), predict_step_time(work, hardware.rates)
    flops_per_token = flops_per_trained_token(work.model, lora, work.seq_len)
    peak = hardware.peak_flops(work.dtype)
    notes = {"step_s": f"largest part: {step.bound}"}
    if peak is None:
        notes["mfu"] = hardware.note
    elif hardware.device == "cpu":
        notes["mfu"] = "of the fastest matrix product measured at start"
    phase = max(memory.phases_bytes, key=memory.phases_bytes.get)
    notes["memory_peak_bytes"] = f"largest phase: {phase}; one device"
    return {
        "parameters": count.total + adapters,
        "active_parameters": count.active + adapters,
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
