"""The only caller of communication operations; each call is logged with its bytes and time (collectives_log).

At size 1 each does nothing and logs nothing. Traps of gloo that are met here: a strided slice is reduced wrongly
without a word (so a contiguous copy is sent), and there is no average (so sums are the only reduction of gradients).
"""

import torch
from torch import Tensor
from torch import distributed as dist

from parallel.mesh import Mesh


def all_reduce_sum(tensor: Tensor, mesh: Mesh, axis: str = "dp") -> Tensor:
    """Replace `tensor` on every rank of the axis by the sum over the ranks; returns it."""
    return all_reduce(tensor, mesh, axis, "sum")


def all_reduce_max(tensor: Tensor, mesh: Mesh, axis: str = "dp") -> Tensor:
    """Replace `tensor` on every rank of the axis by the largest over the ranks, element by element; returns it."""
    return all_reduce(tensor, mesh, axis, "max")


def all_reduce(tensor: Tensor, mesh: Mesh, axis: str, reduction: str) -> Tensor:
    """In place, whatever the strides; `reduction` is "sum" or "max"."""
    if mesh.size(axis) == 1:
        return tensor
    operation = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[reduction]
    sent = tensor.detach().contiguous()
    with mesh.log.record(f"all_reduce_{reduction}", axis, mesh.size(axis), sent):
        dist.all_reduce(sent, operation, group=mesh.group(axis))
    return give_back(tensor, sent)


def broadcast(tensor: Tensor, mesh: Mesh, axis: str = "dp", source: int = 0) -> Tensor:
    """Replace `tensor` by that of the rank `source` along the axis; returns it."""
    if mesh.size(axis) == 1:
        return tensor
    sent = tensor.detach().contiguous()
    with mesh.log.record("broadcast", axis, mesh.size(axis), sent):
        dist.broadcast(sent, group=mesh.group(axis), group_src=source)
    return give_back(tensor, sent)


def all_gather(tensor: Tensor, mesh: Mesh, axis: str = "dp") -> Tensor:
    """Tensors of one shape from all ranks of the axis in rank order, (...) -> (P, ...); logged: one rank's bytes."""
    if mesh.size(axis) == 1:
        return tensor.detach()[None]
    sent = tensor.detach().contiguous()
    gathered = sent.new_empty(mesh.size(axis), *sent.shape)  # (P, ...)
    with mesh.log.record("all_gather", axis, mesh.size(axis), sent):
        dist.all_gather(list(gathered.unbind()), sent, group=mesh.group(axis))
    return gathered


def barrier(mesh: Mesh, axis: str = "dp") -> None:
    """Wait until every rank of the axis is here; a host affair, so it leaves the GPU's queue alone."""
    if mesh.size(axis) == 1:
        return
    token = torch.zeros((), dtype=torch.int32)
    with mesh.log.record("barrier", axis, mesh.size(axis), token):
        dist.all_reduce(token, group=mesh.group(axis))


def give_back(tensor: Tensor, sent: Tensor) -> Tensor:
    """Copy a result into the tensor that was passed, unless it was sent without a copy."""
    if sent.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(sent)
    return tensor
