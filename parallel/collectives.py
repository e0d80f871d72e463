"""The only caller of communication operations; each call is logged with its bytes and time (collectives_log).

Along an axis without a group (one rank, not forced) each does nothing and logs nothing. Two families: the plain names
return when the result may be used; start_* return a Pending whose wait() gives the result, so that work can go on
meanwhile. Traps of gloo that are met here: a strided slice is reduced wrongly without a word (so a contiguous copy is
sent), flat tensors only, equal shares only, and no average (so sums are the only reduction of gradients).
"""

import json
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from parallel.collectives_pending import Pending, start
from parallel.mesh import Mesh

REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
# torch 2.13 renamed both; 2.11 knows only the older names.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_from = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce_sum(tensor: Tensor, mesh: Mesh, axis: str = "dp") -> Tensor:
    """Replace `tensor` on every rank of the axis by the sum over the ranks; returns it."""
    return all_reduce(tensor, mesh, axis, "sum")


def all_reduce_max(tensor: Tensor, mesh: Mesh, axis: str = "dp") -> Tensor:
    """Replace `tensor` on every rank of the axis by the largest over the ranks, element by element; returns it."""
    return all_reduce(tensor, mesh, axis, "max")


def all_reduce(tensor: Tensor, mesh: Mesh, axis: str, reduction: str) -> Tensor:
    """In place, whatever the strides; `reduction` is "sum" or "max"."""
    if not mesh.is_active(axis):
        return tensor
    sent = tensor.detach().contiguous()
    with mesh.log.record(f"all_reduce_{reduction}", axis, mesh.size(axis), sent):
        dist.all_reduce(sent, REDUCTIONS[reduction], group=mesh.group(axis))
    return give_back(tensor, sent)


def start_all_reduce(
    tensor: Tensor, mesh: Mesh, axis: str = "dp", reduction: str = "sum", stream: str = "collectives"
) -> Pending:
    """all_reduce in place of a contiguous tensor; wait() returns it."""
    if not mesh.is_active(axis):
        return Pending(tensor)
    assert tensor.is_contiguous(), f"a tensor with strides {tensor.stride()} of shape {tuple(tensor.shape)}"

    def run(async_op: bool) -> Any:
        return dist.all_reduce(tensor.detach(), REDUCTIONS[reduction], group=mesh.group(axis), async_op=async_op)

    return start(run, tensor, mesh, (f"all_reduce_{reduction}", axis, [tensor]), stream)


def reduce_scatter(flat: Tensor, mesh: Mesh, axis: str = "dp") -> Tensor:
    """Sum flat tensors (P * n,) over the axis and give each rank its n: the rank's place along the axis says which."""
    return start_reduce_scatter(flat, mesh, axis).wait()


def start_reduce_scatter(
    flat: Tensor, mesh: Mesh, axis: str = "dp", out: Tensor | None = None, stream: str = "collectives"
) -> Pending:
    """reduce_scatter of a contiguous (P * n,) tensor into `out` (n,), made here if not given; wait() returns it."""
    if not mesh.is_active(axis):
        return Pending(flat if out is None else out.copy_(flat))
    size = mesh.size(axis)
    assert flat.is_contiguous() and flat.numel() % size == 0, f"{flat.numel()} elements over {size} ranks"
    out = flat.new_empty(flat.numel() // size) if out is None else out  # (n,)

    def run(async_op: bool) -> Any:
        return scatter_from(out, flat, group=mesh.group(axis), async_op=async_op)

    pending = start(run, out, mesh, ("reduce_scatter_sum", axis, [flat]), stream)
    pending.held = flat
    return pending


def all_gather_flat(shard: Tensor, mesh: Mesh, axis: str = "dp") -> Tensor:
    """Shards (n,) of all ranks of the axis, in axis order, as one tensor (P * n,)."""
    return start_all_gather(shard, mesh, axis).wait()


def start_all_gather(
    shard: Tensor, mesh: Mesh, axis: str = "dp", out: Tensor | None = None, stream: str = "collectives"
) -> Pending:
    """all_gather_flat into `out` (P * n,), made here if not given, of which `shard` may be a part; wait() gives it."""
    if not mesh.is_active(axis):
        if out is not None and out.data_ptr() != shard.data_ptr():
            out.copy_(shard)
        return Pending(shard if out is None else out)
    assert shard.is_contiguous(), f"a shard with strides {shard.stride()} of shape {tuple(shard.shape)}"
    shard = shard.detach().view(-1)
    out = shard.new_empty(shard.numel() * mesh.size(axis)) if out is None else out  # (P * n,)

    def run(async_op: bool) -> Any:
        return gather_into(out, shard, group=mesh.group(axis), async_op=async_op)

    pending = start(run, out, mesh, ("all_gather", axis, [out]), stream)
    pending.held = shard
    return pending


def all_gather(tensor: Tensor, mesh: Mesh, axis: str = "dp") -> Tensor:
    """Tensors of one shape from all ranks of the axis in rank order, (...) -> (P, ...)."""
    if not mesh.is_active(axis):
        return tensor.detach()[None]
    return all_gather_flat(tensor.detach().contiguous(), mesh, axis).view(-1, *tensor.shape)


def all_gather_json(value: Any, mesh: Mesh, axis: str = "world") -> list[Any]:
    """A small JSON value of each rank of the axis, in axis order; it travels on the host."""
    if not mesh.is_active(axis):
        return [json.loads(json.dumps(value))]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = all_gather(torch.tensor([len(text)]), mesh, axis).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(text)] = text
    rows = all_gather(padded, mesh, axis)  # (P, longest)
    return [json.loads(bytes(row[:length].tolist())) for row, length in zip(rows, lengths, strict=True)]


def broadcast(tensor: Tensor, mesh: Mesh, axis: str = "dp", source: int = 0) -> Tensor:
    """Replace `tensor` by that of the rank `source` along the axis; returns it."""
    if not mesh.is_active(axis):
        return tensor
    sent = tensor.detach().contiguous()
    with mesh.log.record("broadcast", axis, mesh.size(axis), sent):
        dist.broadcast(sent, group=mesh.group(axis), group_src=source)
    return give_back(tensor, sent)


def start_broadcast(
    tensor: Tensor, mesh: Mesh, axis: str = "dp", source: int = 0, stream: str = "collectives"
) -> Pending:
    """broadcast of a contiguous tensor in place; wait() returns it."""
    if not mesh.is_active(axis):
        return Pending(tensor)
    assert tensor.is_contiguous(), f"a tensor with strides {tensor.stride()} of shape {tuple(tensor.shape)}"

    def run(async_op: bool) -> Any:
        return dist.broadcast(tensor.detach(), group=mesh.group(axis), group_src=source, async_op=async_op)

    return start(run, tensor, mesh, ("broadcast", axis, [tensor]), stream)


def all_to_all(
    tensor: Tensor, mesh: Mesh, axis: str, send_rows: list[int] | None = None, receive_rows: list[int] | None = None
) -> Tensor:
    """Rows (n, ...) cut into a block for each rank of the axis -> the blocks that they sent here, in axis order.

    Without `send_rows` and `receive_rows` all blocks are equal.
    """
    return start_all_to_all(tensor, mesh, axis, send_rows, receive_rows).wait()


def start_all_to_all(
    tensor: Tensor, mesh: Mesh, axis: str, send_rows: list[int] | None = None, receive_rows: list[int] | None = None
) -> Pending:
    """all_to_all; wait() returns the received rows. Logged: the bytes of the sent tensor."""
    if not mesh.is_active(axis):
        return Pending(tensor)
    sent = tensor.detach().contiguous()
    received = sent.new_empty(sum(receive_rows) if receive_rows is not None else sent.shape[0], *sent.shape[1:])

    def run(async_op: bool) -> Any:
        group = mesh.group(axis)
        return dist.all_to_all_single(received, sent, receive_rows, send_rows, group=group, async_op=async_op)

    pending = start(run, received, mesh, ("all_to_all", axis, [sent]))
    pending.held = sent
    return pending


def exchange(
    sends: list[tuple[Tensor, int]],
    receives: list[tuple[Tensor, int]],
    mesh: Mesh,
    axis: str,
    stream: str = "collectives",
) -> Pending:
    """Send tensors to, and receive into tensors from, ranks along the axis, all at once: (contiguous tensor, place).

    wait() returns the received tensors. Logged: the bytes sent, or those received where nothing is sent.
    """
    if not mesh.is_active(axis) or not (sends or receives):
        return Pending([tensor for tensor, _ in receives])
    group, ranks = mesh.group(axis), mesh.axes[axis].ranks

    def run(async_op: bool) -> Any:
        operations = [dist.P2POp(dist.isend, tensor.detach(), ranks[place], group) for tensor, place in sends]
        operations += [dist.P2POp(dist.irecv, tensor, ranks[place], group) for tensor, place in receives]
        works = dist.batch_isend_irecv(operations)
        if not async_op:
            for work in works:
                work.wait()
        return works

    payload = [tensor for tensor, _ in (sends or receives)]
    pending = start(run, [tensor for tensor, _ in receives], mesh, ("exchange", axis, payload), stream)
    pending.held = sends
    return pending


def barrier(mesh: Mesh, axis: str = "dp") -> None:
    """Wait until every rank of the axis is here; a host affair, so it leaves the GPU's queue alone."""
    if not mesh.is_active(axis):
        return
    token = torch.zeros((), dtype=torch.int32)
    with mesh.log.record("barrier", axis, mesh.size(axis), token):
        dist.all_reduce(token, group=mesh.group(axis))


def give_back(tensor: Tensor, sent: Tensor) -> Tensor:
    """Copy a result into the tensor that was passed, unless it was sent without a copy."""
    if sent.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(sent)
    return tensor
