"""Gradients in buckets: which parameters travel together, and one bucket's way from gradients to their sum.

A bucket is a flat buffer that is made when its gradients are ready and lives as long as they do: after the reduction
each gradient is a view into it, so nothing is copied out, and dropping the gradients frees it. Where ranks read each
other's memory (collectives_peer) it lies there from the start and stays. Behind the gradients stands one number a
parameter, 1 where this rank had a gradient: after the sum, 0 says that no rank had one, and no message of its own is
needed for that.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

from parallel.collectives import start_all_reduce
from parallel.collectives_peer import PeerBuffer, start_peer_all_reduce
from parallel.collectives_pending import Pending
from parallel.mesh import Mesh


def plan_buckets(sizes: list[tuple[int, str]], first_bytes: int, bucket_bytes: int) -> list[list[int]]:
    """Indices of parameters for each bucket, the first to be sent first.

    `sizes` are (bytes, kind) in registration order; they are taken in reverse, since backward meets the last layers
    first, and only equal kinds (dtype and device) share a bucket. A bucket is full when it has reached its bytes; the
    first one has its own, smaller, bound.
    """
    full: list[list[int]] = []
    opened: dict[str, tuple[list[int], int]] = {}
    for index in reversed(range(len(sizes))):
        nbytes, kind = sizes[index]
        members, filled = opened.pop(kind, ([], 0))
        members.append(index)
        if filled + nbytes >= (bucket_bytes if full else first_bytes):
            full.append(members)
        else:
            opened[kind] = (members, filled + nbytes)
    # What is still open lies where its last gradient does.
    return full + sorted((members for members, _ in opened.values()), key=lambda members: -members[-1])


@dataclass
class Bucket:
    """Parameters whose gradients are summed in one reduction, in the dtype `sent_dtype`."""

    params: list[Parameter]
    names: list[str]
    sent_dtype: torch.dtype
    waiting: int = 0  # gradients that this backward pass has still to bring
    buffer: Tensor | None = None  # (elements + parameters,) from launch to finish
    sent: Tensor | None = None  # the buffer, or its copy in sent_dtype
    absent: list[int] = field(default_factory=list)  # parameters without a gradient on this rank
    pending: Pending | None = None
    peer: PeerBuffer | None = None  # (elements + parameters,) of sent_dtype: where others read what is sent

    def __post_init__(self) -> None:
        self.waiting = len(self.params)
        self.elements = sum(param.numel() for param in self.params)
        self.ones = torch.ones(len(self.params), dtype=self.params[0].dtype, device=self.params[0].device)

    @property
    def sent_elements(self) -> int:
        return self.elements + len(self.params)

    @property
    def sent_bytes(self) -> int:
        return self.sent_elements * self.sent_dtype.itemsize

    def launch(self, mesh: Mesh, axis: str) -> None:
        """Gather the gradients into the buffer, make them views of it, and start the sum over the axis.

        Gradients need no graph, so neither does anything here; the host's time counts, since backward waits for it.
        """
        self.buffer = self.make_buffer()
        views = torch._utils._unflatten_dense_tensors(self.buffer, self.params)  # a third of the time of split and view
        flags = self.buffer[self.elements :]  # (parameters,)
        self.absent = [index for index, param in enumerate(self.params) if param.grad is None]
        there = [(view, param.grad) for view, param in zip(views, self.params, strict=True) if param.grad is not None]
        targets, sources = (list(tensors) for tensors in zip((flags, self.ones), *there, strict=True))
        torch._foreach_copy_(targets, sources)
        for index in self.absent:
            views[index].zero_()
            flags[index] = 0.0
        for param, view in zip(self.params, views, strict=True):
            param.grad = view
        if self.peer is None:
            self.sent = self.buffer.to(self.sent_dtype)
            self.pending = start_all_reduce(self.sent, mesh, axis)
            return
        self.sent = self.peer.tensor
        if self.sent.dtype != self.buffer.dtype:
            self.sent.copy_(self.buffer)
        self.pending = start_peer_all_reduce(self.peer)

    def make_buffer(self) -> Tensor:
        """(elements + parameters,) in the gradients' dtype; what others read, if that is of this dtype."""
        first = self.params[0]
        if self.peer is not None and self.sent_dtype == first.dtype:
            return self.peer.tensor
        return torch.empty(self.sent_elements, dtype=first.dtype, device=first.device)

    @torch.no_grad()
    def finish(self) -> None:
        """After the sum: a gradient that no rank had is None again. Reading that waits for the device."""
        if self.sent.dtype != self.buffer.dtype:
            self.buffer.copy_(self.sent)
        if self.absent:
            counts = self.buffer[self.elements :].tolist()
            for index in self.absent:
                if counts[index] == 0:
                    self.params[index].grad = None
        self.buffer = self.sent = self.pending = None
        self.absent, self.waiting = [], len(self.params)
