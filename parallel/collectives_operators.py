"""Collectives as operators of torch.library, for use inside compiled blocks: torch.compile takes each as one node.

They return new tensors, work along dim 0 and are differentiable: the backward of a gather is a reduce-scatter and the
reverse, that of an exchange is the exchange back. all_reduce has no gradient of its own: what it should be depends on
whether the ranks then compute one loss or shares of it, which a strategy knows.

An operator takes strings, not objects, so a mesh is found by its name while it lives, as torch finds process groups.
"""

from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from parallel import collectives
from parallel.mesh import Mesh

# The one table of the process: torch.library passes no Python objects. Nothing is kept alive by it.
NAMED: WeakValueDictionary[str, Mesh] = WeakValueDictionary()


@dataclass(frozen=True)
class Along:
    """The collectives along one axis of a mesh, for compiled code; make it with `along`, outside of that code."""

    mesh: str
    axis: str

    def size(self) -> int:
        """How many ranks lie along the axis."""
        return NAMED[self.mesh].size(self.axis)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks of the axis, as a new tensor; not differentiable."""
        return torch.ops.mew.all_reduce(x, self.mesh, self.axis)

    def all_gather(self, x: Tensor) -> Tensor:
        """x (n, ...) of every rank of the axis, in axis order -> (P * n, ...)."""
        return torch.ops.mew.all_gather(x, self.mesh, self.axis)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """x (P * n, ...) summed over the axis, of which each rank gets its n rows -> (n, ...)."""
        return torch.ops.mew.reduce_scatter(x, self.mesh, self.axis)

    def all_to_all(self, x: Tensor) -> Tensor:
        """x (P * n, ...) as a block for each rank -> the blocks that they have for this one, in axis order."""
        return torch.ops.mew.all_to_all(x, self.mesh, self.axis)


def along(mesh: Mesh, axis: str) -> Along:
    """The operators along an axis; they work as long as somebody holds the mesh."""
    name = f"mesh-{id(mesh):x}"
    NAMED[name] = mesh
    return Along(name, axis)


@torch.library.custom_op("mew::all_reduce", mutates_args=())
def all_reduce_operator(x: Tensor, mesh: str, axis: str) -> Tensor:
    return collectives.all_reduce_sum(x.clone(memory_format=torch.contiguous_format), NAMED[mesh], axis)


@all_reduce_operator.register_fake
def all_reduce_shape(x: Tensor, mesh: str, axis: str) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("mew::all_gather", mutates_args=())
def all_gather_operator(x: Tensor, mesh: str, axis: str) -> Tensor:
    found = NAMED[mesh]
    if not found.is_active(axis):
        return x.clone(memory_format=torch.contiguous_format)  # an operator may not return its input
    return collectives.all_gather_flat(x.contiguous(), found, axis).view(-1, *x.shape[1:])


@all_gather_operator.register_fake
def all_gather_shape(x: Tensor, mesh: str, axis: str) -> Tensor:
    return x.new_empty(x.shape[0] * NAMED[mesh].size(axis), *x.shape[1:])


@torch.library.custom_op("mew::reduce_scatter", mutates_args=())
def reduce_scatter_operator(x: Tensor, mesh: str, axis: str) -> Tensor:
    found = NAMED[mesh]
    if not found.is_active(axis):
        return x.clone(memory_format=torch.contiguous_format)
    return collectives.reduce_scatter(x.contiguous().view(-1), found, axis).view(-1, *x.shape[1:])


@reduce_scatter_operator.register_fake
def reduce_scatter_shape(x: Tensor, mesh: str, axis: str) -> Tensor:
    return x.new_empty(x.shape[0] // NAMED[mesh].size(axis), *x.shape[1:])


@torch.library.custom_op("mew::all_to_all", mutates_args=())
def all_to_all_operator(x: Tensor, mesh: str, axis: str) -> Tensor:
    found = NAMED[mesh]
    if not found.is_active(axis):
        return x.clone(memory_format=torch.contiguous_format)
    return collectives.all_to_all(x, found, axis)


@all_to_all_operator.register_fake
def all_to_all_shape(x: Tensor, mesh: str, axis: str) -> Tensor:
    return x.new_empty(x.shape)


def remember_axis(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.mesh, ctx.axis = inputs


def gather_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.mew.reduce_scatter(gradient, ctx.mesh, ctx.axis), None, None


def scatter_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.mew.all_gather(gradient, ctx.mesh, ctx.axis), None, None


def exchange_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.mew.all_to_all(gradient, ctx.mesh, ctx.axis), None, None


all_gather_operator.register_autograd(gather_backward, setup_context=remember_axis)
reduce_scatter_operator.register_autograd(scatter_backward, setup_context=remember_axis)
all_to_all_operator.register_autograd(exchange_backward, setup_context=remember_axis)
