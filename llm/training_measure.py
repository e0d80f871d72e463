"""A run's numbers: the prediction before step 1, the memory of the first steps, and the line of each logged step."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from llm.cost_model import predict_run
from llm.cost_model_lora import flops_per_trained_token
from llm.metrics import mfu
from llm.metrics_memory import PeakMemory, graph_bytes, held_tensors
from llm.plan_links import links_of
from llm.training_communication import OTHER, STEP, predict_communication
from llm.training_setup import Trainer
from llm.training_step import StepResult
from parallel.collectives import all_reduce_sum
from parallel.pipeline_parallel_strategy import PipelineParallel
from parallel.tensor_parallel_strategy import TensorParallel

# The first step makes the optimizer's state, so the peak of a usual step is seen in the second.
MEASURED_STEPS = 2


def predict(trainer: Trainer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Facts of the run and its prediction, from the shape, the batch and the hardware's figures alone."""
    facts = {
        "device": trainer.hardware.description,
        "world_size": trainer.mesh.world_size,
        "dtype": trainer.config.dtype,
        "compile": trainer.config.compile,
        "parameters": count_whole(trainer),
        "tokenizer_sha256": trainer.tokenizer.sha256,
    }
    mesh = trainer.mesh
    predicted = predict_run(
        trainer.config, trainer.hardware, mesh.world_size, links_of(trainer.hardware, mesh), mesh.rank
    )
    return facts, predicted | {"communication": predict_communication(trainer.config, trainer.mesh)}


def count_whole(trainer: Trainer) -> int:
    """Parameters of the whole model, whatever part of it this rank has."""
    strategy = trainer.training_step.strategy
    if isinstance(strategy, TensorParallel):
        return sum(math.prod(place.shape) for place in strategy.placements.values())
    if isinstance(strategy, PipelineParallel):
        return sum(math.prod(held.shape) for held in strategy.held.values())
    return sum(parameter.numel() for parameter in trainer.model.parameters())


class FirstSteps:
    """Measures peak memory in the first steps of this process, and keeps those steps out of tokens/s.

    On a CPU the measurement counts every tensor that is made and freed, which slows the step: hence only these steps.
    """

    def __init__(self, trainer: Trainer):
        self.trainer, self.done = trainer, 0

    @contextmanager
    def measured(self) -> Iterator[None]:
        if self.done >= MEASURED_STEPS:
            yield
            return
        trainer = self.trainer
        mesh, held = trainer.mesh, held_tensors(trainer.model, trainer.optimizer)
        with PeakMemory(mesh.device, held, mesh.peer_bytes) as memory:
            yield
        trainer.peak_bytes = max(trainer.peak_bytes, memory.peak_bytes + pool_bytes(trainer))
        trainer.record.measure(memory_peak_bytes=trainer.peak_bytes)

    def count(self) -> None:
        """Called after each step: the time of a measured one is dropped."""
        if self.done < MEASURED_STEPS:
            self.done += 1
            self.trainer.throughput.forget()


def pool_bytes(trainer: Trainer) -> int:
    """What the graphs of a pipeline's operations write to again in every step, unseen by the allocator's count."""
    graphed = trainer.config.kernels.cuda_graph and trainer.mesh.size("pp") > 1
    return graph_bytes(trainer.mesh.device) if graphed else 0


def log_step(trainer: Trainer, result: StepResult) -> str:
    """Write the line of metrics.jsonl for the step just done; returns a short status."""
    config, window = trainer.config, trainer.throughput.read()
    trainer.communication.take(STEP, trainer.step)
    loss, z_loss = result.mean_losses(trainer.mesh)
    idle_s = torch.tensor(trainer.communication.idle_s(), dtype=torch.float64)
    idle_s = float(all_reduce_sum(idle_s, trainer.mesh, "pp")) / trainer.mesh.size("pp")
    flops = flops_per_trained_token(config.model, config.lora, config.data.seq_len)
    peak = trainer.hardware.peak_flops(config.dtype)
    tokens_per_s = window.tokens_per_s or None
    utilisation = mfu(flops, tokens_per_s, peak and peak * trainer.mesh.world_size) if tokens_per_s else None
    if trainer.mesh.device.type == "cuda":
        outside = trainer.mesh.peer_bytes + pool_bytes(trainer)
        trainer.peak_bytes = max(trainer.peak_bytes, torch.cuda.max_memory_allocated() + outside)
    trainer.record.line(
        trainer.step,
        loss=loss,
        z_loss=z_loss,
        lr=result.learning_rate,
        grad_norm=result.gradient_norm,
        target_tokens=result.num_targets,
        tokens=trainer.tokens_seen,
        step_time_s=window.step_s or None,
        tokens_per_s=tokens_per_s,
        mfu=utilisation,
        memory_bytes=trainer.peak_bytes,
        skipped_steps=trainer.skipped_steps,
    )
    trainer.communication.take(OTHER, trainer.step)
    trainer.record.communication(trainer.communication.written())
    trainer.record.measure(communication=trainer.communication.per_step())
    measure_totals(trainer, flops, peak)
    if trainer.mesh.size("pp") > 1 and trainer.throughput.total.steps:
        trainer.record.measure(bubble=idle_s / trainer.throughput.total.step_s)
    return f"loss {loss:.4f}, {tokens_per_s:,.0f} tokens/s" if tokens_per_s else f"loss {loss:.4f}"


def measure_totals(trainer: Trainer, flops_per_token: int, peak_flops: float | None) -> None:
    """The run's averages so far, for report.json."""
    total = trainer.throughput.total
    trainer.record.measure(parameters=count_whole(trainer))
    if total.steps:
        peak = peak_flops and peak_flops * trainer.mesh.world_size
        trainer.record.measure(
            step_s=total.step_s,
            tokens_per_s=total.tokens_per_s,
            mfu=mfu(flops_per_token, total.tokens_per_s, peak),
        )
