"""ZeRO-2 and ZeRO-3 as per-parameter dim-0 shards (after PyTorch's FSDP2; Rajbhandari et al. 2020, Zhao et al. 2023).

Each block is a unit, and what lies in no block is the root unit. A unit is gathered before its forward, freed after it
(ZeRO-3; not the last block, with which backward begins) or kept until its backward is over (ZeRO-2), gathered again for
backward, and its gradients are reduce-scattered when backward has made the last of them. While one unit computes, the
next one is gathered and the last one's gradients are reduced. Sums, not means: each rank's loss is divided by the
targets of the global batch.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from parallel.ddp import check_unchanged, describe
from parallel.fsdp_units import GATHERED, FsdpUnit
from parallel.sharded_checkpoint_pieces import Piece, whole
from parallel.sharded_optimizer_matrices import share_matrices
from parallel.sharded_optimizer_shards import agree_on_gradients, gather_full, sharded_norm, use_shards


def is_vector(name: str, param: Tensor) -> bool:
    return param.ndim < 2


@dataclass(frozen=True)
class FsdpSettings:
    """What is kept when, and in which precision."""

    reshard_after_forward: bool = True  # True: ZeRO-3, False: ZeRO-2
    param_dtype: torch.dtype | None = None  # of the gathered parameters; None: that of the shards
    keep_dtype: Callable[[str, Tensor], bool] = is_vector  # parameters that are gathered as they are nevertheless
    reduce_dtype: torch.dtype | None = None  # of the gradients' sums; None: that of the shards
    reduce_each_micro_batch: bool = True  # False: one reduce-scatter a step, and full gradients until then
    shard_axis: str = "dp_shard_cp"
    replicate_axis: str = "dp_replicate"


class Fsdp:
    """The units of one model and the order in which they are gathered, freed and reduced.

    For each micro-batch `begin_micro_batch`, forward, backward; then `finish_gradients`, after which the shards in
    `parameters` hold the summed gradient. Every rank must run the same units in the same order.
    """

    def __init__(self, model: nn.Module, units: list[FsdpUnit], modules: list[nn.Module], settings: FsdpSettings):
        """`units`: the root's, where there is anything outside the blocks, and those of `modules`, in their order."""
        self.model, self.settings = model, settings
        self.all_units, self.units = units, units[len(units) - len(modules) :]  # the blocks in the order of forward
        self.root = units[0] if len(units) > len(modules) else None
        self.mesh, self.axis = units[0].mesh, settings.shard_axis
        shards = {shard.name: shard for unit in units for shard in unit.shards}
        self.all_shards = [shards[name] for name, _ in model.named_parameters()]
        trainable = {shard.name for unit in units for shard in unit.trainable_shards()}
        self.shards = [shard for shard in self.all_shards if shard.name in trainable]
        self.parameters = [shard.local for shard in self.shards if shard.local.numel()]
        self.is_last = True
        self.is_open = False  # a micro-batch is under way
        self.keeps = not settings.reshard_after_forward
        self.is_pinned = False  # inside `gathered`
        self.reducing: tuple[FsdpUnit, bool] | None = None  # and whether this was the last micro-batch
        self.replicating: list[Any] = []
        self.description = describe(model)
        self.install_hooks(modules)

    def install_hooks(self, modules: list[nn.Module]) -> None:
        """Hooks are opaque to torch.compile: a block compiles with a break at each."""
        opaque = torch.compiler.disable
        self.model.register_forward_pre_hook(opaque(lambda module, args: self.open_root()))
        self.model.register_forward_hook(opaque(lambda module, args, output: self.close_root()))
        for index, module in enumerate(modules):
            before, after = partial(self.before_forward, index), partial(self.after_forward, index)
            module.register_forward_pre_hook(opaque(lambda module, args, run=before: run()))
            module.register_forward_hook(opaque(lambda module, args, output, run=after: run(output)))
        for unit in self.all_units:
            for param in unit.trainable:
                param.register_post_accumulate_grad_hook(self.make_gradient_hook(unit))

    def make_gradient_hook(self, unit: FsdpUnit) -> Callable[[nn.Parameter], None]:
        """For a parameter of the unit. It keeps nothing alive: autograd holds it out of gc's sight."""
        alive, alive_unit = weakref.ref(self), weakref.ref(unit)

        def hook(param: nn.Parameter) -> None:
            strategy = alive()
            if strategy is not None:
                strategy.gradient_is_there(alive_unit(), param)

        return hook

    def begin_micro_batch(self, last: bool) -> None:
        """To be called before each forward pass of a step; `last` says whether it is the step's last one."""
        self.close_micro_batch()
        self.is_last, self.is_open = last, True
        for unit in self.all_units:
            unit.ready, unit.is_reduced = 0, False
        self.open_root()

    def open_root(self) -> None:
        if self.root is not None:
            self.root.finish_gather()
        if self.units:
            self.units[0].start_gather()

    def close_root(self) -> None:
        if self.root is not None and not (torch.is_grad_enabled() or self.is_open or self.is_pinned):
            self.root.reshard()

    def before_forward(self, index: int) -> None:
        unit = self.units[index]
        unit.finish_gather()
        if not unit.in_backward:  # else: forward again for backward's sake
            self.gather_ahead(index + 1)

    def gather_ahead(self, index: int) -> None:
        """While a unit computes, begin to gather its neighbour `index`, if there is one."""
        if 0 <= index < len(self.units):
            self.units[index].start_gather()

    def is_needed_next(self, unit: FsdpUnit) -> bool:
        """After its forward pass: backward begins with the last one."""
        return unit is self.units[-1]

    def after_forward(self, index: int, output: Any) -> None:
        unit = self.units[index]
        if unit.in_backward:
            return
        if not self.is_pinned and not (torch.is_grad_enabled() and (self.keeps or self.is_needed_next(unit))):
            unit.reshard()
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self.before_backward, index))

    def before_backward(self, index: int, gradient: Tensor) -> None:
        """The gradient of a unit's output is there: have its parameters in place, and the ones before it on the way."""
        unit = self.units[index]
        if unit.in_backward:
            return
        for other in self.units[index + 1 :]:
            if other.in_backward:  # some of its parameters get no gradient, so nothing else said that it was over
                self.end_backward(other)
        unit.in_backward = True
        unit.finish_gather()
        self.gather_ahead(index - 1)

    def gradient_is_there(self, unit: FsdpUnit, param: nn.Parameter) -> None:
        assert not unit.is_reduced, (
            f"a gradient of {unit.shards[0].name}'s unit came after it was sent: call begin_micro_batch before each "
            f"forward pass, and take one backward pass for it"
        )
        unit.ready += 1
        if unit.counts_gradients and unit.ready == len(unit.trainable):
            self.end_backward(unit)

    def end_backward(self, unit: FsdpUnit) -> None:
        """A unit's backward is over: its gradients go on their way, its parameters are freed."""
        unit.in_backward, unit.is_reduced = False, True
        self.take_gradients(unit)
        if self.is_last or not self.keeps:
            unit.reshard()

    def take_gradients(self, unit: FsdpUnit) -> None:
        """Reduce a unit's gradients, or keep them for the last micro-batch."""
        if not unit.trainable:
            return
        self.finish_reduce()  # one message at a time; it had a unit's backward to get through
        if self.is_last or self.settings.reduce_each_micro_batch:
            dtype = self.settings.reduce_dtype or unit.master.dtype
            into, unit.partial = unit.partial, None
            message = unit.take_gradients(into, dtype if into is None else into.dtype)
            unit.start_reduce(message.to(dtype))
            self.reducing = (unit, self.is_last)
        else:
            unit.partial = unit.take_gradients(unit.partial, unit.master.dtype)

    def finish_reduce(self) -> None:
        if self.reducing is None:
            return
        (unit, was_last), self.reducing = self.reducing, None
        unit.finish_reduce()
        if was_last and self.mesh.size(self.settings.replicate_axis) > 1:
            self.replicating.append(unit.start_replicate(self.settings.replicate_axis))

    def close_micro_batch(self) -> None:
        """End the backward of every unit that has not ended, the root's at the latest."""
        if not self.is_open:
            return
        for unit in reversed(self.all_units):
            if not unit.is_reduced:
                self.end_backward(unit)
        self.is_open = False

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """Wait for the sums; every shard's `.grad` is then its part, or None where no rank had a gradient."""
        check_unchanged(self.model, self.description)
        self.close_micro_batch()
        present = {}
        for unit in self.all_units:
            present |= {s.name: flag for s, flag in zip(unit.trainable_shards(), unit.present, strict=True)}
        flags = [present[shard.name] for shard in self.shards]
        agree_on_gradients(self.shards, flags, self.mesh, (self.axis, self.settings.replicate_axis))
        self.finish_reduce()
        for pending in self.replicating:
            pending.wait()
        self.replicating = []
        for unit in self.all_units:
            unit.hand_over_gradients()
            unit.reshard()  # whatever is still there would be stale after the step

    def gradient_norm(self) -> Tensor:
        """The L2 norm of the whole gradient, equal bits on every rank."""
        return sharded_norm(self.shards, self.mesh, self.axis)

    def shard_optimizer(self, optimizer: Any) -> Any:
        """The optimizer, over this rank's shards in the place of the full parameters."""
        share_matrices(optimizer, self.shards, self.mesh, self.axis)
        use_shards(optimizer, {shard.name: shard for shard in self.shards})
        return optimizer

    def gathered(self) -> AbstractContextManager[None]:
        """A context in which every parameter is there in full, on every rank; writes to them are lost."""
        return gathered(self)

    def full_parameters(self) -> dict[str, Tensor]:
        """Every parameter in full and in the shards' dtype."""
        return gather_full(self.all_shards, [shard.local.detach() for shard in self.all_shards], self.mesh, self.axis)

    def full_gradients(self) -> dict[str, Tensor | None]:
        """Every gradient in full, gathered from the shards after `finish_gradients`; None where there is none."""
        held = [shard for shard in self.shards if shard.has_gradient]
        full = gather_full(held, [shard.local.grad for shard in held], self.mesh, self.axis)
        return {shard.name: full.get(shard.name) for shard in self.shards}

    def pieces(self) -> list[Piece]:
        """This rank's rows of every parameter, and the persistent buffers, which are whole."""
        replicas, replica = self.replicas()
        persistent = self.model.state_dict(keep_vars=True).keys()
        buffers = [(name, buffer) for name, buffer in self.model.named_buffers() if name in persistent]
        ranks = self.mesh.size(self.axis)
        world = (replicas * ranks, replica * ranks + self.mesh.rank_in(self.axis))
        pieces = [shard.piece(replicas, replica) for shard in self.all_shards]
        return pieces + [whole(name, buffer, *world) for name, buffer in buffers]

    def optimizer_pieces(self) -> list[Piece]:
        """What the optimizer updates here; each `local` is the key of its state."""
        return [shard.optimizer_piece(*self.replicas()) for shard in self.shards if shard.local.numel()]

    def replicas(self) -> tuple[int, int]:
        axis = self.settings.replicate_axis
        return self.mesh.size(axis), self.mesh.rank_in(axis)


@contextmanager
def gathered(fsdp: Fsdp) -> Iterator[None]:
    """Every parameter of the model in full while the context lasts."""
    were_there = [unit.state == GATHERED for unit in fsdp.all_units]
    fsdp.is_pinned = True
    try:
        for unit in fsdp.all_units:
            unit.finish_gather()
        yield
    finally:
        fsdp.is_pinned = False
        for unit, was_there in zip(fsdp.all_units, were_there, strict=True):
            if not was_there:
                unit.reshard()
