"""One optimizer step, in the order that makes it equal under any layout and micro-batching.

The loss of a step is the sum over target tokens divided by their number in the *global* batch. That number is agreed
before the first forward pass, so each rank's gradients are already shares of the global one: they are summed over
ranks and micro-batches and never averaged.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from configs.errors import UserError
from llm.args import TrainConfig
from llm.data_loader import Batch
from llm.loss import IGNORE_INDEX, LossSums
from llm.optimizer import clipped_step, set_learning_rate
from llm.parallelize import Parallelized
from llm.schedule import learning_rate_factor
from llm.training_graph import GraphedMicroBatch, check_graph
from llm.training_norm import NormReading
from parallel.collectives import all_gather, all_reduce_max, all_reduce_sum
from parallel.mesh import Mesh

MAX_BAD_STEPS = 10


@dataclass
class StepResult:
    """What one step did; the sums stay on the device until someone logs them."""

    loss_sum: torch.Tensor  # this rank's share, over target tokens, without the z-loss
    z_loss_sum: torch.Tensor
    num_targets: int  # of the global batch
    norm: NormReading  # of the global batch's gradient, before clipping
    learning_rate: float

    @property
    def gradient_norm(self) -> float:
        return self.norm.value

    @property
    def skipped(self) -> bool:
        """Whether the gradient was not finite, so that nothing was updated."""
        return not self.norm.is_finite

    def mean_losses(self, mesh: Mesh) -> tuple[float, float]:
        """Loss and z-loss of the global batch, nats a target token; called by all ranks."""
        sums = all_reduce_sum(torch.stack((self.loss_sum, self.z_loss_sum)), mesh, "dp_cp")
        sums = all_reduce_sum(sums, mesh, "pp")  # the last stage has them, the others zeros
        loss, z_loss = (sums / max(self.num_targets, 1)).tolist()
        return loss, z_loss


class TrainingStep:
    """Holds what a step needs and runs it: `run(step, micro_batches, wants_stop)`."""

    def __init__(self, config: TrainConfig, mesh: Mesh, parallelized: Parallelized, forward_loss: Callable):
        self.config, self.mesh = config, mesh
        self.strategy, self.optimizer = parallelized.strategy, parallelized.optimizer
        self.forward_loss = forward_loss
        self.shards = parallelized.shards  # cut each batch to this rank's tokens, or None
        self.pipeline = parallelized.pipeline  # runs the stages of a model that is cut by layers, or None
        self.autocast_dtype = torch.bfloat16 if config.dtype == "bfloat16" else None
        self.graphed: GraphedMicroBatch | None = None
        if config.kernels.cuda_graph and self.pipeline is None:  # whose operations have graphs of their own
            check_graph(config, mesh)
            self.graphed = GraphedMicroBatch(forward_loss, parallelized.model.parameters(), self.autocast_dtype)
        self.bad_steps = self.skipped_steps = 0
        # The fused update skips on the device what is not finite, so the host learns of it a step late and never waits.
        self.defers = mesh.device.type == "cuda" and getattr(self.optimizer, "skips_nan", False)
        self.unsettled: tuple[int, NormReading] | None = None
        # Entered around each part of a step, by name; llm/training_profile puts its own in while it runs.
        self.phase: Callable[[str], AbstractContextManager] = nullcontext

    def agree(self, micro_batches: list[Batch], wants_stop: bool) -> tuple[int, bool, int]:
        """The global number of target tokens, whether any rank wants to stop, and the most micro-batches of a rank."""
        own = [sum(batch.num_targets for batch in micro_batches), int(wants_stop), len(micro_batches)]
        # On the host: it does not wait for the device. One small message a step.
        num_targets, stops, counts = all_gather(torch.tensor(own), self.mesh, "dp_cp").unbind(1)
        stop = stops.any().long()
        for axis in ("tp", "pp"):  # ranks that see the same data may disagree on nothing but the clock and signals
            stop = all_reduce_max(stop, self.mesh, axis)
        return int(num_targets.sum()), bool(stop), int(counts.max())

    def run(self, step: int, micro_batches: list[Batch], wants_stop: bool = False) -> StepResult | None:
        """Take optimizer step number `step`, counted from 0; None, with nothing changed, when a rank wants to stop.

        A rank may have fewer micro-batches than others, or none.
        """
        micro_batches = self.cut(micro_batches)
        with self.phase("communication"):
            num_targets, stop, most = self.agree(micro_batches, wants_stop)
        if stop:
            return None
        padding = self.cut([without_targets(self.config.data.seq_len)] * (most - len(micro_batches)))
        loss_sum, z_loss_sum = self.accumulate_gradients(micro_batches + padding, num_targets)
        with self.phase("communication"):
            self.strategy.finish_gradients()
        with self.phase("gradient norm"):
            norm = self.strategy.gradient_norm()
            reading = NormReading(norm)
        factor = learning_rate_factor(step, self.config.schedule, self.config.max_steps)
        set_learning_rate(self.optimizer, factor)
        self.settle()  # the step before, whose norm has long been on its way
        with self.phase("optimizer"):
            if self.defers or reading.is_finite:
                clipped_step(self.optimizer, self.strategy.parameters, norm, self.config.optimizer.clip_norm)
            self.optimizer.zero_grad(set_to_none=True)
        self.unsettled = (step, reading)
        if not self.defers:
            self.settle()
        return StepResult(loss_sum, z_loss_sum, num_targets, reading, self.config.optimizer.lr * factor)

    def cut(self, micro_batches: list[Batch]) -> list[Batch]:
        """Under context parallelism this rank's tokens of each; their labels alone are counted here."""
        return micro_batches if self.shards is None else [self.shards.shard(batch) for batch in micro_batches]

    def settle(self) -> None:
        """Count the last step as done or skipped; waits for its norm. To be called before anything of it is kept."""
        if self.unsettled is None:
            return
        (step, reading), self.unsettled = self.unsettled, None
        if self.defers and not reading.is_finite:
            self.optimizer.uncount()
        self.count_bad_step(reading.is_finite, step)

    def accumulate_gradients(self, micro_batches: list[Batch], num_targets: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward and backward of each micro-batch; gradients add up to this rank's share of the global mean."""
        if self.pipeline is not None:
            with self.phase("pipeline"):
                return self.pipeline.accumulate_gradients(micro_batches, num_targets, self.forward_loss)
        device = self.mesh.device
        loss_sum, z_loss_sum = torch.zeros(2, device=device).unbind()
        for index, batch in enumerate(micro_batches):
            self.strategy.begin_micro_batch(last=index == len(micro_batches) - 1)
            with self.phase("data"):
                batch = batch.to(device)
            sums = self.forward_backward(batch, num_targets)
            loss_sum = loss_sum + sums.loss_sum.detach()
            z_loss_sum = z_loss_sum + sums.z_loss_sum.detach()
        return loss_sum, z_loss_sum

    def forward_backward(self, batch: Batch, num_targets: int) -> LossSums:
        """One micro-batch on the device."""
        if self.graphed is not None:
            with self.phase("graph"):
                return self.graphed(batch, num_targets)
        enabled = self.autocast_dtype is not None
        with self.phase("forward"), torch.autocast(self.mesh.device.type, self.autocast_dtype, enabled=enabled):
            sums = self.forward_loss(batch)
        with self.phase("backward"):
            ((sums.loss_sum + sums.z_loss_sum) / max(num_targets, 1)).backward()
        return sums

    def count_bad_step(self, finite: bool, step: int) -> None:
        self.bad_steps = 0 if finite else self.bad_steps + 1
        self.skipped_steps += not finite
        if self.bad_steps >= MAX_BAD_STEPS:
            raise UserError(
                f"the gradient was not finite for {self.bad_steps} steps up to step {step + 1}; "
                f"lower optimizer.lr={self.config.optimizer.lr} or raise schedule.warmup_steps and resume"
            )


def rows_of_rank(num_sequences: int, mesh: Mesh) -> range:
    """This rank's rows of a global batch: contiguous shares over the ranks that see different data."""
    share = num_sequences // mesh.size("dp")
    first = mesh.rank_in("dp") * share
    return range(first, first + share)


def without_targets(seq_len: int) -> Batch:
    """A micro-batch that adds nothing, for a rank that has run out: strategies want as many passes on every rank."""
    token_ids = torch.zeros(1, seq_len, dtype=torch.int64)
    return Batch(token_ids, torch.full_like(token_ids, IGNORE_INDEX), num_targets=0)
