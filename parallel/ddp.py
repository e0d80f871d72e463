"""Data parallelism (Li et al. 2020): every rank holds the whole model, and gradients are summed over the ranks.

Sums, not means: each rank's loss is already divided by the number of target tokens of the global batch, so the sum over
ranks is the gradient of that batch however unevenly its targets are spread. "bucketed" starts a bucket's reduction in
backward as soon as its gradients are there (ddp_buckets); "naive" sends each parameter's gradient on its own after
backward, the baseline that shows what buckets and overlap are worth. A gradient missing on one rank counts as zero, one
missing on all ranks stays missing.

What differs from torch's: the model is not wrapped, so names and forward stay; sums; presence travels in the buckets.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from configs.errors import UserError, check_choice
from parallel.clipping import gradient_norm
from parallel.collectives import all_reduce_sum, broadcast
from parallel.collectives_peer import TRANSPORTS, PeerMemory, peer_bytes
from parallel.collectives_pending import wait_all
from parallel.ddp_buckets import Bucket, plan_buckets
from parallel.mesh import Mesh

MODES = ("bucketed", "naive")


@dataclass(frozen=True)
class DdpSettings:
    """How gradients travel; `reduce_dtype` None sends each in its own dtype."""

    mode: str = "bucketed"
    bucket_bytes: int = 25 << 20
    first_bucket_bytes: int = 1 << 20
    reduce_dtype: torch.dtype | None = None
    axis: str = "dp_cp"
    transport: str = "backend"  # or "peer": buckets lie where the other ranks of the host read them

    def __post_init__(self) -> None:
        check_choice("parallel.ddp_mode", self.mode, MODES)
        check_choice("parallel.transport", self.transport, TRANSPORTS)
        if self.transport == "peer" and self.mode != "bucketed":
            raise UserError(
                f"parallel.transport=peer moves buckets, which parallel.ddp_mode={self.mode} does not have; "
                f"use ddp_mode=bucketed"
            )


class DataParallel:
    """Keeps the gradients of `model` equal on all ranks of the axis; the model itself is left as it is.

    Before each forward pass `begin_micro_batch(last)`, after the last backward pass `finish_gradients()`. Parameters
    and buffers are those of the axis' first rank from the start. Raises UserError when the model's parameters have
    changed since. Along an axis without a group nothing happens at all.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, settings: DdpSettings | None = None):
        self.model, self.mesh, self.settings = model, mesh, settings or DdpSettings()
        broadcast_parameters(model, mesh, self.settings.axis)
        self.named = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self.parameters = list(self.named.values())
        self.unchanged = Unchanged(model)
        self.is_active = mesh.is_active(self.settings.axis)
        self.buckets = self.make_buckets() if self.is_active and self.settings.mode == "bucketed" else []
        self.next_bucket = 0  # the first one not sent yet: buckets go out in one order on all ranks
        self.sending = True
        self.hooks = [
            param.register_post_accumulate_grad_hook(self.make_hook(place))
            for place, bucket in enumerate(self.buckets)
            for param in bucket.params
        ]

    def make_buckets(self) -> list[Bucket]:
        settings, names, params = self.settings, list(self.named), self.parameters
        sizes = [(param.numel() * param.element_size(), f"{param.dtype}/{param.device}") for param in params]
        buckets = [
            Bucket(
                [params[index] for index in members],
                [names[index] for index in members],
                settings.reduce_dtype or params[members[0]].dtype,
            )
            for members in plan_buckets(sizes, settings.first_bucket_bytes, settings.bucket_bytes)
        ]
        if settings.transport == "peer":
            sent = [(bucket.sent_elements, bucket.sent_dtype) for bucket in buckets]
            memory = PeerMemory(peer_bytes(sent), self.mesh, settings.axis)
            for bucket, (numel, dtype) in zip(buckets, sent, strict=True):
                bucket.peer = memory.take(numel, dtype)
        return buckets

    def make_hook(self, place: int) -> Callable[[Tensor], None]:
        """For a parameter of the bucket at `place`. It keeps nothing alive: autograd holds it out of gc's sight."""
        alive = weakref.ref(self)

        def gradient_is_there(param: Tensor) -> None:
            strategy = alive()
            if strategy is None or not strategy.sending:
                return
            bucket = strategy.buckets[place]
            assert bucket.buffer is None, (
                f"a gradient of {bucket.names[0]}'s bucket came after it was sent: run all but the last backward pass "
                f"of a step in no_sync(), and call finish_gradients() each step"
            )
            bucket.waiting -= 1
            strategy.send_filled()

        return gradient_is_there

    def send_filled(self) -> None:
        while self.next_bucket < len(self.buckets) and self.buckets[self.next_bucket].waiting <= 0:
            self.send_next()

    def send_next(self) -> None:
        self.buckets[self.next_bucket].launch(self.mesh, self.settings.axis)
        self.next_bucket += 1

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here only add up gradients on this rank."""
        before, self.sending = self.sending, False
        try:
            yield
        finally:
            self.sending = before

    def begin_micro_batch(self, last: bool) -> None:
        """To be called before each forward pass; gradients are sent in the backward pass of the last one."""
        self.sending = last

    def finish_gradients(self) -> None:
        """After a step's last backward pass: every gradient becomes its sum over the axis."""
        if not self.is_active:
            return
        self.unchanged.check()
        if self.settings.mode == "naive":
            synchronise_gradients(self.parameters, self.mesh, self.settings.axis)
            return
        while self.next_bucket < len(self.buckets):  # with parameters that took no part, or no micro-batch here at all
            self.send_next()
        wait_all([bucket.pending for bucket in self.buckets])
        for bucket in self.buckets:
            bucket.finish()
        self.next_bucket, self.sending = 0, True

    def gradient_norm(self) -> Tensor:
        """The L2 norm of the whole gradient, which every rank holds."""
        return gradient_norm(self.parameters)

    def shard_optimizer(self, optimizer: Any) -> Any:
        """The optimizer as it is: every rank takes the whole step."""
        return optimizer

    def full_gradients(self) -> dict[str, Tensor | None]:
        return {name: param.grad for name, param in self.named.items()}

    def full_parameters(self) -> dict[str, Tensor]:
        return {name: param.detach() for name, param in self.named.items()}

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """The full parameters, which are always there."""
        yield

    def remove(self) -> None:
        """Take the hooks off: the model is as it was before."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []


class Unchanged:
    """Tells whether a model's parameters are still those that hooks were put on; cheap enough for every step."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.description = describe(model)
        self.modules = list(model.modules())
        self.seen = self.look()

    def look(self) -> tuple[list[Any], list[Any]]:
        """Everything that a change of a parameter, or a module with one, would change."""
        tables = [module._parameters for module in self.modules]
        params = [param for table in tables for param in table.values() if param is not None]
        states = [(id(param), param.requires_grad, param.dtype, param.device, param.shape) for param in params]
        return states, [len(module._modules) for module in self.modules]

    def check(self) -> None:
        """UserError that names the first parameter added, removed, replaced, frozen, moved or cast."""
        if self.look() != self.seen:
            check_unchanged(self.model, self.description)


def describe(model: nn.Module) -> dict[str, tuple[int, torch.Size, torch.dtype, torch.device, bool]]:
    """What must stay as it is while gradients are synchronised by hooks on the parameters."""
    return {
        name: (id(param), param.shape, param.dtype, param.device, param.requires_grad)
        for name, param in model.named_parameters()
    }


def check_unchanged(model: nn.Module, description: dict[str, tuple]) -> None:
    """UserError that names the first parameter added, removed, replaced, frozen, moved or cast since `description`."""
    now = describe(model)
    if now == description:
        return
    changed = sorted(name for name in now.keys() | description.keys() if now.get(name) != description.get(name))
    raise UserError(
        f"parameter {changed[0]!r} was added, removed, replaced, frozen, moved or cast after data parallelism was "
        f"applied ({len(changed)} changed); change the model first, then apply it"
    )


def broadcast_parameters(model: nn.Module, mesh: Mesh, axis: str = "dp") -> None:
    """Give every rank of the axis the parameters and buffers of its rank 0."""
    for tensor in [*model.parameters(), *model.buffers()]:
        broadcast(tensor, mesh, axis)


@torch.no_grad()
def synchronise_gradients(parameters: Iterable[nn.Parameter], mesh: Mesh, axis: str = "dp") -> None:
    """Replace every gradient by its sum over the ranks of the axis; call it once, after the last backward pass.

    Each is sent on its own, after one small message that says which ranks have which.
    """
    if not mesh.is_active(axis):
        return
    parameters = [param for param in parameters if param.requires_grad]
    present = torch.tensor([param.grad is not None for param in parameters], dtype=torch.int32)  # on the host: no sync
    present = all_reduce_sum(present, mesh, axis).tolist()
    for param, count in zip(parameters, present, strict=True):
        if count:
            param.grad = param.grad if param.grad is not None else torch.zeros_like(param)
            all_reduce_sum(param.grad, mesh, axis)
