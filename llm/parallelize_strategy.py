"""What the training step asks of a data-parallel strategy, whichever it is (parallel/ddp, sharded_optimizer, fsdp).

for each micro-batch:  begin_micro_batch(last), forward, backward
finish_gradients()     each gradient, or this rank's part of it, is now the sum over ranks and micro-batches
gradient_norm()        then scale_gradients(strategy.parameters, ...), optimizer.step(), optimizer.zero_grad()
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor


class Strategy(Protocol):
    """Gradients are summed, never averaged; one missing on all ranks stays missing, so its parameter is skipped."""

    parameters: Iterable[Tensor]  # what the optimizer updates on this rank: parameters or shards of them

    def begin_micro_batch(self, last: bool) -> None:
        """Called before each forward pass; all ranks take as many."""

    def finish_gradients(self) -> None:
        """Called after a step's last backward pass, by all ranks."""

    def gradient_norm(self) -> Tensor:
        """The L2 norm of the whole gradient, each parameter counted once; equal on every rank."""

    def shard_optimizer(self, optimizer: Any) -> Any:
        """The optimizer of what this rank holds, made from one over the model's parameters that has not stepped."""

    def full_gradients(self) -> dict[str, Tensor | None]:
        """Every gradient in full, on every rank, after finish_gradients; called by all ranks."""

    def full_parameters(self) -> dict[str, Tensor]:
        """Every trainable parameter in full, on every rank; called by all ranks."""

    def gathered(self) -> AbstractContextManager[Any]:
        """Inside it the model holds its full parameters, for sampling; entered by all ranks."""
