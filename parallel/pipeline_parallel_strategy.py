"""A data strategy (DDP, ZeRO-1, FSDP) over the part of a model that a pipeline rank holds.

It has the strategy's methods. Gradients and parameters of other ranks' stages are fetched where all are asked for, the
norm is summed over the axis, checkpoint pieces are this rank's alone.

Tied embeddings: the table is a parameter of the first stage only. The last stage has a copy of it that no optimizer
knows. Each step its gradient is added to the table's before the data ranks sum theirs, and the copy is made anew before
the next forward pass. So both have the same bits whatever the optimizer does, and the norm counts the table once.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parallel.collectives import all_gather, all_reduce_sum, broadcast, exchange
from parallel.ddp import DataParallel
from parallel.mesh import Mesh
from parallel.sharded_checkpoint_pieces import Piece, whole


@dataclass(frozen=True)
class HeldBy:
    """A parameter of the whole model and the rank along the axis whose stage has it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    rank: int
    trainable: bool


class TiedTable:
    """One table on two ranks: `table` the parameter on the first, `copy` what the last stage computes with."""

    def __init__(self, mesh: Mesh, axis: str, table: nn.Parameter | None, copy: Tensor | None):
        self.mesh, self.axis, self.table, self.copy = mesh, axis, table, copy
        self.last = mesh.size(axis) - 1

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add the copy's gradient to the table's; the copy's is gone."""
        if self.copy is not None and self.copy.requires_grad:
            gradient = self.copy.grad if self.copy.grad is not None else torch.zeros_like(self.copy)
            exchange([(gradient.contiguous(), 0)], [], self.mesh, self.axis).wait()
            self.copy.grad = None
        if self.table is not None and self.table.requires_grad:
            received = torch.empty_like(self.table)
            exchange([], [(received, self.last)], self.mesh, self.axis).wait()
            self.table.grad = received if self.table.grad is None else self.table.grad.add_(received)

    @torch.no_grad()
    def refresh(self) -> None:
        """Give the copy the table's values."""
        if self.table is not None:
            exchange([(self.table.detach().contiguous(), self.last)], [], self.mesh, self.axis).wait()
        if self.copy is not None:
            exchange([], [(self.copy.detach(), 0)], self.mesh, self.axis).wait()


class PipelineParallel:
    """`inner` over this rank's stages; the methods are those of llm/parallelize_strategy."""

    def __init__(
        self,
        inner: Any,
        model: nn.Module,
        mesh: Mesh,
        held: dict[str, HeldBy],
        tied: TiedTable | None,
        whole_model: Callable[[dict[str, Tensor]], Any],
        axis: str = "pp",
    ):
        """`held` has every parameter of the whole model, in its order; `whole_model(parameters)` is a context manager
        in which the model has all its parts."""
        self.inner, self.model, self.mesh, self.held, self.tied, self.axis = inner, model, mesh, held, tied, axis
        self.whole_model = whole_model

    @property
    def parameters(self) -> Iterable[Tensor]:
        return self.inner.parameters

    def begin_step(self) -> None:
        """Before a step's or a validation's first forward pass: nothing is sent until finish_gradients."""
        self.inner.begin_micro_batch(last=False)
        if self.tied is not None:
            self.tied.refresh()

    def begin_micro_batch(self, last: bool) -> None:
        """Gradients are never sent during backward: a rank's last backward pass of one stage is not that of another."""
        self.inner.begin_micro_batch(last=False)

    def finish_gradients(self) -> None:
        """The tied table's two gradients become one, then the data ranks' sums."""
        if self.tied is not None:
            self.tied.add_gradients()
        self.inner.begin_micro_batch(last=True)  # nothing is sent before: what is sent in backward cannot change
        self.inner.finish_gradients()

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """The L2 norm of the whole gradient, each parameter counted once; equal on every rank."""
        dtype = torch.promote_types(next(iter(self.held.values())).dtype, torch.float32)
        own = self.inner.gradient_norm().to(self.mesh.device, dtype)
        return all_reduce_sum(own.square(), self.mesh, self.axis).sqrt()

    def shard_optimizer(self, optimizer: Any) -> Any:
        """The inner strategy's: this rank's stages are all that it updates."""
        return self.inner.shard_optimizer(optimizer)

    @torch.no_grad()
    def fetch(self, own: dict[str, Tensor | None], names: Iterable[str]) -> dict[str, Tensor | None]:
        """Each tensor from the rank whose stage has it; None where that rank has none."""
        names = list(names)
        there = torch.tensor([own.get(name) is not None for name in names], dtype=torch.int32)
        there = all_gather(there, self.mesh, self.axis).sum(0).tolist()  # (len(names),), on the host
        result: dict[str, Tensor | None] = {}
        for name, present in zip(names, there, strict=True):
            place, tensor = self.held[name], own.get(name)
            if present and tensor is None:
                tensor = torch.empty(place.shape, dtype=place.dtype, device=self.mesh.device)
            if present:  # ZeRO-2 and 3 gather some in a lower precision
                tensor = broadcast(tensor.to(place.dtype).contiguous(), self.mesh, self.axis, place.rank)
            result[name] = tensor if present else None
        return result

    def trainable(self) -> list[str]:
        return [name for name, place in self.held.items() if place.trainable]

    def full_gradients(self) -> dict[str, Tensor | None]:
        """Every gradient in full, on every rank, after finish_gradients; called by all ranks."""
        return self.fetch(self.inner.full_gradients(), self.trainable())

    def full_parameters(self) -> dict[str, Tensor]:
        """Every trainable parameter in full, on every rank; called by all ranks."""
        return self.fetch(self.inner.full_parameters(), self.trainable())

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """The model as one device has it, all stages on every rank; then each rank can run it alone.

        Entered by all ranks. What is written to parameters of other ranks' stages is lost.
        """
        with self.inner.gathered():
            if self.tied is not None:
                self.tied.refresh()
            own = {name: param.detach() for name, param in self.model.named_parameters()}
            with self.whole_model(self.fetch(own, self.held)):
                yield

    def pieces(self) -> list[Piece]:
        """This rank's parameters, whole on each of its data ranks."""
        if not isinstance(self.inner, DataParallel):
            return self.inner.pieces()
        return [whole(name, param.detach(), *self.replicas()) for name, param in self.model.named_parameters()]

    def optimizer_pieces(self) -> list[Piece]:
        """What the optimizer updates here; each `local` is the key of its state."""
        if not isinstance(self.inner, DataParallel):
            return self.inner.optimizer_pieces()
        return [whole(name, param, *self.replicas()) for name, param in self.inner.named.items()]

    def replicas(self) -> tuple[int, int]:
        return self.mesh.size("dp_cp"), self.mesh.rank_in("dp_cp")
