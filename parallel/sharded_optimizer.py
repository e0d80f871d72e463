"""ZeRO-1 (Rajbhandari et al. 2020): every rank holds the model, each updates its part of it with its part of the state.

Gradients of a flat bucket are reduce-scattered from hooks while backward goes on; a rank then steps its part of every
bucket and gathers the updated parameters, the gather of one bucket beside the step of the next and, where the model has
units, beside the next forward pass. Sums, not means: each
rank's loss is already divided by the number of target tokens of the global batch.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from configs.errors import check_choice, check_positive
from parallel.collectives import start_all_gather, start_all_reduce, start_reduce_scatter
from parallel.collectives_peer import TRANSPORTS
from parallel.collectives_pending import Pending, wait_all
from parallel.ddp import broadcast_parameters, check_unchanged, describe
from parallel.mesh import Mesh
from parallel.sharded_checkpoint_pieces import Piece, whole
from parallel.sharded_optimizer_arrivals import Arrivals
from parallel.sharded_optimizer_buckets import Bucket, plan_buckets
from parallel.sharded_optimizer_matrices import share_matrices
from parallel.sharded_optimizer_peer import PeerBuckets
from parallel.sharded_optimizer_shards import agree_on_gradients, gather_full, sharded_norm, use_shards

MAX_STAGES = 4  # of a step, each an update and the gathers that go beside the next one


class GroupOptimizer(Protocol):
    """What is asked of the optimizer that is sharded: groups with "param_names", updated one at a time."""

    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Tensor]]
    counted: list[Tensor]  # what the last step counted, for `uncount`

    def update(self, group: dict[str, Any], gradient_scale: Tensor | None = None) -> None: ...


@dataclass(frozen=True)
class Zero1Settings:
    """Sizes of buckets, and the dtype in which gradients are summed (None: that of the parameter)."""

    bucket_bytes: int = 25 * 2**20
    first_bucket_bytes: int = 2**20  # small, so that communication starts early in backward
    reduce_dtype: torch.dtype | None = None
    shard_axis: str = "dp_shard_cp"  # the ranks that share one optimizer state
    replicate_axis: str = "dp_replicate"  # the ranks that hold the same part of it
    transport: str = "backend"  # or "peer": what travels lies where the other ranks of the host read it

    def __post_init__(self) -> None:
        check_positive(bucket_bytes=self.bucket_bytes, first_bucket_bytes=self.first_bucket_bytes)
        check_choice("parallel.transport", self.transport, TRANSPORTS)


class Zero1:
    """The gradients of a replicated model on their way to the ranks that own them.

    For each micro-batch `begin_micro_batch`, forward, backward; then `finish_gradients`, after which the shards in
    `parameters` hold the summed gradient. Between the micro-batches of a step nothing is sent.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        settings: Zero1Settings = Zero1Settings(),
        units: Iterable[nn.Module] = (),
    ):
        """`units`: modules in the order in which forward runs them, each of which waits for its own parameters."""
        self.model, self.mesh, self.settings, self.axis = model, mesh, settings, settings.shard_axis
        for axis in (settings.shard_axis, settings.replicate_axis):
            broadcast_parameters(model, mesh, axis)
        named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        ranks, rank = mesh.size(self.axis), mesh.rank_in(self.axis)
        plans = plan_buckets(reversed(named), ranks, settings.bucket_bytes, settings.first_bucket_bytes)
        params = dict(named)
        uses_peer = settings.transport == "peer" and mesh.is_active(self.axis)
        self.peer = PeerBuckets(plans, settings.reduce_dtype, mesh, self.axis) if uses_peer else None
        self.buckets = [
            Bucket(plan, [params[name] for name in plan.names], ranks, rank, self.peer and self.peer.parameters(plan))
            for plan in plans
        ]
        self.arrivals = Arrivals(model, units if mesh.is_active(self.axis) else (), self.buckets)
        by_name = {shard.name: shard for bucket in self.buckets for shard in bucket.shards}
        self.shards = [by_name[name] for name, _ in named]
        self.parameters = [shard.local for shard in self.shards if shard.local.numel()]
        self.sending = False  # in the backward pass of the last micro-batch
        self.next_bucket = 0  # buckets are sent in order on every rank, whatever order they are filled in
        self.pending: list[tuple[Bucket, Pending]] = []
        self.replicating: list[Pending] = []
        self.description = describe(model)
        for place, bucket in enumerate(self.buckets):
            for index, param in enumerate(bucket.params):
                param.register_post_accumulate_grad_hook(self.make_hook(place, index))

    def make_hook(self, place: int, index: int) -> Any:
        """For a parameter of the bucket at `place`. It keeps nothing alive: autograd holds it out of gc's sight."""
        alive = weakref.ref(self)

        def gradient_is_there(_: nn.Parameter) -> None:
            strategy = alive()
            if strategy is None:
                return
            bucket = strategy.buckets[place]
            bucket.present[index] = True
            if strategy.sending:
                assert place >= strategy.next_bucket, (
                    f"a gradient of {bucket.plan.names[0]}'s bucket came after it was sent: call begin_micro_batch "
                    f"before each forward pass, and finish_gradients in each step"
                )
                bucket.ready += 1
                strategy.send_filled_buckets()

        return gradient_is_there

    def begin_micro_batch(self, last: bool) -> None:
        """To be called before each forward pass; gradients are sent in the backward pass of the last one."""
        if not self.sending and last:
            self.next_bucket = 0
            for bucket in self.buckets:
                bucket.ready = 0
        self.sending = last

    def send_filled_buckets(self) -> None:
        while self.next_bucket < len(self.buckets):
            bucket = self.buckets[self.next_bucket]
            if bucket.ready < len(bucket.params):
                return
            self.send(bucket)

    @torch.no_grad()
    def send(self, bucket: Bucket) -> None:
        """Copy a bucket's gradients into one buffer and begin its reduce-scatter."""
        while len(self.pending) > 1:  # two buffers at a time; the older transfer has had a bucket's backward for itself
            self.receive(*self.pending.pop(0))
        dtype = self.settings.reduce_dtype or bucket.plan.dtype
        if self.peer is None:
            flat = torch.empty(bucket.plan.numel, dtype=dtype, device=bucket.flat.device)  # its gaps are nobody's
        else:
            flat = self.peer.gradients(bucket.plan)
        filled = []
        for index, (view, param) in enumerate(zip(bucket.views(flat), bucket.params, strict=True)):
            if param.grad is None:
                view.zero_()
            else:
                bucket.present[index] = True  # of a gradient that no hook has told of, too
                filled.append((view, param.grad))
        if filled:
            views, gradients = (list(tensors) for tensors in zip(*filled, strict=True))
            torch._foreach_copy_(views, gradients)
        for param in bucket.params:
            param.grad = None
        if self.peer is None:
            pending = start_reduce_scatter(flat, self.mesh, self.axis, stream="reduce")
        else:
            pending = self.peer.start_reduce_scatter()
        self.pending.append((bucket, pending))
        self.next_bucket += 1

    def receive(self, bucket: Bucket, pending: Pending) -> None:
        bucket.own_gradient = pending.wait().to(bucket.plan.dtype)  # (share,)
        replicas = self.settings.replicate_axis
        if self.mesh.size(replicas) > 1:
            self.replicating.append(start_all_reduce(bucket.own_gradient, self.mesh, replicas, stream="reduce"))

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """Wait for the sums; every shard's `.grad` is then its part, or None where no rank had a gradient."""
        check_unchanged(self.model, self.description)
        while self.next_bucket < len(self.buckets):  # some parameter of it had no gradient
            self.send(self.buckets[self.next_bucket])
        present = {name: flag for b in self.buckets for name, flag in zip(b.plan.names, b.present, strict=True)}
        axes = (self.axis, self.settings.replicate_axis)
        agree_on_gradients(self.shards, [present[shard.name] for shard in self.shards], self.mesh, axes)
        for bucket, pending in self.pending:
            self.receive(bucket, pending)
        wait_all(self.replicating)
        self.pending, self.replicating, self.sending = [], [], False
        for bucket in self.buckets:
            for shard, place in zip(bucket.shards, bucket.own_places, strict=True):
                shard.local.grad = bucket.own_gradient[place] if shard.has_gradient else None
            bucket.own_gradient = None
            bucket.present = [False] * len(bucket.params)

    def gradient_norm(self) -> Tensor:
        """The L2 norm of the whole gradient, equal bits on every rank."""
        return sharded_norm(self.shards, self.mesh, self.axis)

    def shard_optimizer(self, optimizer: GroupOptimizer) -> "ShardedOptimizer":
        """The optimizer of this rank's shards; `optimizer` has groups over the full parameters and has not stepped."""
        share_matrices(optimizer, self.shards, self.mesh, self.axis)
        use_shards(optimizer, {shard.name: shard for shard in self.shards})
        return ShardedOptimizer(optimizer, self)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """The full parameters, which are always there once they have arrived."""
        self.arrivals.wait()
        yield

    def full_parameters(self) -> dict[str, Tensor]:
        """Every trainable parameter in full."""
        self.arrivals.wait()
        return {name: param.detach() for name, param in self.model.named_parameters() if param.requires_grad}

    def full_gradients(self) -> dict[str, Tensor | None]:
        """Every gradient in full, gathered from the shards after `finish_gradients`; None where there is none."""
        held = [shard for shard in self.shards if shard.has_gradient]
        full = gather_full(held, [shard.local.grad for shard in held], self.mesh, self.axis)
        return {shard.name: full.get(shard.name) for shard in self.shards}

    def pieces(self) -> list[Piece]:
        """Every parameter and persistent buffer, whole on every rank."""
        self.arrivals.wait()
        ranks, (replicas, replica) = self.mesh.size(self.axis), self.replicas()
        everywhere = (replicas * ranks, replica * ranks + self.mesh.rank_in(self.axis))
        persistent = self.model.state_dict(keep_vars=True).keys()
        named = [*self.model.named_parameters(), *(x for x in self.model.named_buffers() if x[0] in persistent)]
        return [whole(name, tensor.detach(), *everywhere) for name, tensor in named]

    def optimizer_pieces(self) -> list[Piece]:
        """What the optimizer updates here; each `local` is the key of its state."""
        return [shard.optimizer_piece(*self.replicas()) for shard in self.shards if shard.local.numel()]

    def replicas(self) -> tuple[int, int]:
        axis = self.settings.replicate_axis
        return self.mesh.size(axis), self.mesh.rank_in(axis)


class ShardedOptimizer:
    """An optimizer over this rank's shards whose step ends with every rank holding every updated parameter."""

    def __init__(self, optimizer: GroupOptimizer, strategy: Zero1):
        self.optimizer, self.strategy = optimizer, strategy
        # Gradients come last layer first, parameters are wanted first layer first.
        in_order = strategy.buckets[::-1] if strategy.arrivals.may_be_late else strategy.buckets
        self.stages = [(buckets, self.members(buckets)) for buckets in stages(in_order)]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def state(self) -> dict[Tensor, dict[str, Tensor]]:
        return self.optimizer.state

    @property
    def skips_nan(self) -> bool:
        """Whether a gradient_scale of nan makes a step update nothing, as with the optimizer inside."""
        return getattr(self.optimizer, "skips_nan", False)

    def uncount(self) -> None:
        """Take the last step out of the counts: it turned out to have updated nothing."""
        self.optimizer.uncount()

    @torch.no_grad()
    def step(self, gradient_scale: Tensor | None = None) -> None:
        """Update the shards and gather the parameters; matrices first, then a few buckets at a time beside the gathers.

        With units the gathers go on in the next forward pass. Gradients count `gradient_scale` times (a scalar on their
        device).
        """
        arrivals = self.strategy.arrivals
        arrivals.wait()  # of the step before, if no forward pass has done it
        self.optimizer.counted = []
        for group in self.optimizer.param_groups:
            if "matrices" in group:  # an exchange over all ranks, whatever lies in which bucket
                self.optimizer.update(group, gradient_scale)
        for buckets, members in self.stages:
            for index, params in members.items():
                self.optimizer.update(self.optimizer.param_groups[index] | {"params": params}, gradient_scale)
            for bucket in buckets:
                if any(shard.has_gradient for shard in bucket.shards):
                    arrivals.expect(bucket, self.start_gather(bucket))
        if not arrivals.may_be_late:
            arrivals.wait()

    def start_gather(self, bucket: Bucket) -> Pending:
        """Begin to fill a bucket's parameters with what the other ranks have updated."""
        strategy = self.strategy
        if strategy.peer is not None:
            return strategy.peer.start_all_gather(bucket.plan)
        return start_all_gather(bucket.own, strategy.mesh, strategy.axis, out=bucket.flat, stream="gather")

    def members(self, buckets: list[Bucket]) -> dict[int, list[Tensor]]:
        """Of each group that is updated element by element, by its place: the parameters that lie in the buckets."""
        own = {id(shard.local) for bucket in buckets for shard in bucket.shards}
        found = {
            index: [param for param in group["params"] if id(param) in own]
            for index, group in enumerate(self.optimizer.param_groups)
            if "matrices" not in group
        }
        return {index: params for index, params in found.items() if params}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the shards' gradients; the full ones went when they were sent."""
        assert set_to_none, "gradients of shards are dropped, not zeroed"
        for param in self.strategy.parameters:
            param.grad = None


def stages(buckets: list[Bucket]) -> list[list[Bucket]]:
    """Buckets in at most MAX_STAGES runs of about as many bytes: an update has a cost of its own whatever its size."""
    total, runs, filled = sum(bucket.plan.numel for bucket in buckets), [], 0
    for bucket in buckets:
        if not runs or filled >= total / MAX_STAGES * len(runs):
            runs.append([])
        runs[-1].append(bucket)
        filled += bucket.plan.numel
    return runs


def apply_zero1(
    model: nn.Module, mesh: Mesh, settings: Zero1Settings = Zero1Settings(), units: Iterable[nn.Module] = ()
) -> Zero1:
    """Wrap a model for ZeRO-1: rank 0's values on every rank, parameters as views of flat buckets, hooks in place.

    Build the optimizer afterwards and pass it through `shard_optimizer`.
    """
    return Zero1(model, mesh, settings, units)
