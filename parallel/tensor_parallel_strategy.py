"""A data strategy (DDP, ZeRO-1, FSDP) over the parts of a model that is cut by tensor_parallel.

It has the strategy's methods. What the inner one calls a full tensor is this rank's part of one: gradients, parameters
and checkpoint pieces get their single-device shapes here, gradients that are shares are summed, the norm counts each
parameter once.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from parallel.collectives import all_gather
from parallel.ddp import DataParallel
from parallel.pipeline_parallel_strategy import PipelineParallel
from parallel.sharded_checkpoint_pieces import Piece, whole
from parallel.sharded_optimizer_shards import Shard
from parallel.tensor_parallel import TensorLayout, VocabOutput, replace_parameters
from parallel.tensor_parallel_gradients import Held, norm_over, sum_shares
from parallel.tensor_parallel_placement import Placement

TRANSFER = torch.bfloat16  # of matrices on their way to Muon's iteration, which rounds its input to it


class TensorParallel:
    """`inner` over a model's parts; the methods are those of llm/parallelize_strategy."""

    def __init__(self, inner: Any, model: nn.Module, layout: TensorLayout):
        self.inner, self.model, self.layout = inner, model, layout
        self.mesh, self.axis, self.placements = layout.mesh, layout.axis, layout.placements
        in_stages = isinstance(inner, PipelineParallel)
        self.data = inner.inner if in_stages else inner  # DDP, ZeRO-1 or FSDP
        self.spread = [] if isinstance(self.data, DataParallel) else [self.data.axis]  # axes that gradients lie over
        self.spread += [inner.axis] if in_stages else []

    @property
    def parameters(self) -> Iterable[Tensor]:
        return self.inner.parameters

    def begin_micro_batch(self, last: bool) -> None:
        self.inner.begin_micro_batch(last)

    def begin_step(self) -> None:
        """Before a pipeline's first forward pass, see PipelineParallel."""
        self.inner.begin_step()

    def held(self) -> Held:
        """What the data strategy leaves gradients in on this rank: parameters or shards, with their places."""
        if isinstance(self.data, DataParallel):
            return [(self.placements[name], param) for name, param in self.data.named.items()]
        return [(self.placements[shard.name], shard.local) for shard in self.data.shards]

    def finish_gradients(self) -> None:
        """The data ranks' sums, then those of shares over the tp axis."""
        self.inner.finish_gradients()
        sum_shares(self.held(), self.mesh, self.axis)

    def gradient_norm(self) -> Tensor:
        """The L2 norm of the whole gradient, each parameter counted once, equal bits on every rank."""
        return norm_over(self.held(), self.mesh, [*self.spread, self.axis])

    def shard_optimizer(self, optimizer: Any) -> Any:
        """The inner strategy's optimizer; where it works on whole matrices, these are collected over the tp axis."""
        names = {
            id(param): name
            for group in optimizer.param_groups
            for name, param in zip(group["param_names"], group["params"], strict=True)
        }
        wrapped = self.inner.shard_optimizer(optimizer)
        for group in optimizer.param_groups:
            if "ns_steps" not in group:
                continue
            if "matrices" in group:
                group["matrices"].across = self.across_shards
                full = {shard.local: torch.Size(self.placements[shard.name].shape) for shard in self.data.shards}
                group["matrices"].shapes = full
            else:
                group["matrices"] = TensorMatrices(self, names)
        return wrapped

    def across_shards(self, shards: list[Shard], matrices: list[Tensor], function: Callable) -> list[Tensor]:
        """function of full matrices, of which these are whole along the data axis."""
        return self.transform([self.placements[shard.name] for shard in shards], matrices, function)

    def transform(self, places: list[Placement], tensors: list[Tensor], function: Callable) -> list[Tensor]:
        """function of the full matrices of which `tensors` are this rank's parts, and its parts of the results."""
        full = self.gather(places, [tensor.to(TRANSFER) for tensor in tensors])
        results = function([matrix.view(*extra_dims(tensor, matrix), *matrix.shape)
                            for matrix, tensor in zip(full, tensors, strict=True)])  # fmt: skip
        rank = self.layout.rank
        return [
            place.slice(result.reshape(place.shape), rank).view(tensor.shape)
            for place, result, tensor in zip(places, results, tensors, strict=True)
        ]

    @torch.no_grad()
    def gather(self, places: list[Placement], values: list[Tensor]) -> list[Tensor]:
        """Full tensors from every rank's parts, all in one message a dtype; whole ones are not sent."""
        full = [value.detach().reshape(place.local_shape) for place, value in zip(places, values, strict=True)]
        for dtype in sorted({value.dtype for value in values}, key=str):
            cut = [i for i, place in enumerate(places) if place.dim is not None and values[i].dtype == dtype]
            if not cut:
                continue
            sizes = [full[i].numel() for i in cut]
            rows = all_gather(torch.cat([full[i].reshape(-1) for i in cut]), self.mesh, self.axis)  # (tp, n)
            for i, parts in zip(cut, rows.split(sizes, dim=1), strict=True):
                full[i] = places[i].assemble(parts.view(-1, *places[i].local_shape))
        return full

    def full(self, tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Named parts -> named full tensors; None stays."""
        names = [name for name, value in tensors.items() if value is not None]
        gathered = self.gather([self.placements[name] for name in names], [tensors[name] for name in names])
        return tensors | dict(zip(names, gathered, strict=True))

    def full_gradients(self) -> dict[str, Tensor | None]:
        """Every gradient in full, on every rank, after finish_gradients; called by all ranks."""
        return self.full(self.inner.full_gradients())

    def full_parameters(self) -> dict[str, Tensor]:
        """Every trainable parameter in full, on every rank; called by all ranks."""
        return self.full(self.inner.full_parameters())

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """The model as one device has it, full parameters and plain seams; then each rank can run it alone.

        Entered by all ranks. What is written to the parameters is lost.
        """
        with self.inner.gathered():
            local = dict(self.model.named_parameters())
            full = self.full({name: param.detach() for name, param in local.items()})
            new = {name: nn.Parameter(full[name], requires_grad=False) for name in local}
            replace_parameters(self.model, {id(local[name]): new[name] for name in local})
            copies = self.copies_of_tables()
            tables = self.gather([place for _, _, place in copies], [table for _, table, _ in copies])
            for (module, _, _), table in zip(copies, tables, strict=True):
                module.weight = table
            for module, name, before, _ in reversed(self.layout.seams):
                setattr(module, name, before)
            try:
                yield
            finally:
                for module, table, _ in copies:
                    module.weight = table
                for module, name, _, after in self.layout.seams:
                    setattr(module, name, after)
                replace_parameters(self.model, {id(new[name]): local[name] for name in local})

    def copies_of_tables(self) -> list[tuple[nn.Module, Tensor, Placement]]:
        """A last stage's copy of a tied table, which is no parameter."""
        outputs = [(module, seam) for module, _, _, seam in self.layout.seams if isinstance(seam, VocabOutput)]
        return [
            (module, module.weight, seam.shard.placement)
            for module, seam in outputs
            if not isinstance(module.weight, nn.Parameter)
        ]

    def pieces(self) -> list[Piece]:
        """This rank's part of every parameter, and the persistent buffers, which are whole on every rank."""
        if not isinstance(self.inner, DataParallel):
            return [self.translate(piece) for piece in self.inner.pieces()]
        persistent = self.model.state_dict(keep_vars=True).keys()
        named = [*self.model.named_parameters(), *(x for x in self.model.named_buffers() if x[0] in persistent)]
        return [self.translate(whole(name, tensor.detach(), *self.data_replicas())) for name, tensor in named]

    def optimizer_pieces(self) -> list[Piece]:
        """What the optimizer updates here; each `local` is the key of its state."""
        if not isinstance(self.inner, DataParallel):
            return [self.translate(piece) for piece in self.inner.optimizer_pieces()]
        return [self.translate(whole(name, param, *self.data_replicas())) for name, param in self.inner.named.items()]

    def data_replicas(self) -> tuple[int, int]:
        return self.mesh.size("dp_cp"), self.mesh.rank_in("dp_cp")

    def translate(self, piece: Piece) -> Piece:
        """A piece of this rank's part as one of the full tensor."""
        place = self.placements.get(piece.name, Placement(piece.shape, self.mesh.size(self.axis)))
        replicas, replica = piece.replicas * place.copies, piece.replica * place.copies + place.copy(self.layout.rank)
        piece = replace(piece, replicas=replicas, replica=replica, group=f"{piece.replicas} x {place.copies}")
        if place.dim is None:
            return piece
        return replace(piece, shape=place.shape, box=place.box(self.layout.rank))


def extra_dims(tensor: Tensor, matrix: Tensor) -> tuple[int, ...]:
    """Leading ones of a matrix that came as a stack of one."""
    return (1,) * (tensor.ndim - matrix.ndim)


class TensorMatrices:
    """The seam of a Muon group whose parameters are parts along the tp axis alone."""

    def __init__(self, strategy: TensorParallel, names: dict[int, str]):
        self.strategy, self.names = strategy, names

    def place(self, param: Tensor) -> Placement:
        return self.strategy.placements[self.names[id(param)]]

    def shape_of(self, param: Tensor) -> torch.Size:
        """The full shape, on which the rate depends."""
        return torch.Size(self.place(param).shape)

    def transform(self, params: list[Tensor], tensors: list[Tensor], function: Callable) -> list[Tensor]:
        return self.strategy.transform([self.place(param) for param in params], tensors, function)
