"""One optimizer step, in the order that makes it equal under any layout and micro-batching.

The loss of a step is the sum over target tokens divided by their number in the *global* batch. That number is agreed
before the first forward pass, so each rank's gradients are already shares of the global one: they are summed over
ranks and micro-batches and never averaged.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from configs.errors import UserError
from llm.args import TrainConfig
from llm.data_loader import Batch
from llm.optimizer import gradient_norm, scale_gradients, set_learning_rate
from llm.schedule import learning_rate_factor
from parallel.collectives import all_reduce_sum
from parallel.ddp import synchronise_gradients
from parallel.mesh import Mesh

MAX_BAD_STEPS = 10


@dataclass
class StepResult:
    """What one step did; the sums stay on the device until someone logs them."""

    loss_sum: torch.Tensor  # this rank's share, over target tokens, without the z-loss
    z_loss_sum: torch.Tensor
    num_targets: int  # of the global batch
    gradient_norm: float  # of the global batch, before clipping
    learning_rate: float
    skipped: bool  # the gradient was not finite, nothing was updated


class TrainingStep:
    """Holds what a step needs and runs it: `run(step, micro_batches, wants_stop)`."""

    def __init__(self, config: TrainConfig, mesh: Mesh, model: nn.Module, optimizer: Any, forward_loss: Callable):
        self.config, self.mesh = config, mesh
        self.parameters = list(model.parameters())
        self.optimizer, self.forward_loss = optimizer, forward_loss
        self.autocast_dtype = torch.bfloat16 if config.dtype == "bfloat16" else None
        self.bad_steps = 0

    def agree(self, micro_batches: list[Batch], wants_stop: bool) -> tuple[int, bool]:
        """The global number of target tokens, and whether any rank wants to stop: one small all-reduce."""
        num_targets = sum(batch.num_targets for batch in micro_batches)
        if self.mesh.world_size == 1:
            return num_targets, wants_stop
        agreed = torch.tensor([num_targets, int(wants_stop)])  # on the host: it does not wait for the device
        total, stops = all_reduce_sum(agreed, self.mesh).tolist()
        return total, stops > 0

    def run(self, step: int, micro_batches: list[Batch], wants_stop: bool = False) -> StepResult | None:
        """Take optimizer step number `step`, counted from 0; None, with nothing changed, when a rank wants to stop."""
        num_targets, stop = self.agree(micro_batches, wants_stop)
        if stop:
            return None
        loss_sum, z_loss_sum = self.accumulate_gradients(micro_batches, num_targets)
        synchronise_gradients(self.parameters, self.mesh)
        norm = gradient_norm(self.parameters)
        finite = math.isfinite(norm.item())
        factor = learning_rate_factor(step, self.config.schedule, self.config.max_steps)
        set_learning_rate(self.optimizer, factor)
        if finite:
            if self.config.optimizer.clip_norm is not None:
                scale_gradients(self.parameters, norm, self.config.optimizer.clip_norm)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.count_bad_step(finite, step)
        lr = self.config.optimizer.lr * factor
        return StepResult(loss_sum, z_loss_sum, num_targets, norm.item(), lr, skipped=not finite)

    def accumulate_gradients(self, micro_batches: list[Batch], num_targets: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward and backward of each micro-batch; gradients add up to this rank's share of the global mean."""
        device = self.mesh.device
        loss_sum, z_loss_sum = torch.zeros(2, device=device)
        for batch in micro_batches:
            batch = batch.to(device)
            with torch.autocast(device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
                sums = self.forward_loss(batch)
            ((sums.loss_sum + sums.z_loss_sum) / max(num_targets, 1)).backward()
            loss_sum += sums.loss_sum.detach()
            z_loss_sum += sums.z_loss_sum.detach()
        return loss_sum, z_loss_sum

    def count_bad_step(self, finite: bool, step: int) -> None:
        self.bad_steps = 0 if finite else self.bad_steps + 1
        if self.bad_steps >= MAX_BAD_STEPS:
            raise UserError(
                f"the gradient was not finite for {self.bad_steps} steps up to step {step + 1}; "
                f"lower optimizer.lr={self.config.optimizer.lr} or raise schedule.warmup_steps and resume"
            )
