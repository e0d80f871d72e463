"""Flat buckets of parameters for ZeRO-1: which parameter lies where, and what of it falls to which rank.

A bucket is one flat buffer, a multiple of P elements, of which rank r owns the r-th equal part: every rank owns the
same number of bytes whatever the parameters' sizes are, and reduce-scatter and all-gather need no copy beyond the
bucket. Each parameter starts at a multiple of ALIGNMENT, since matrix products are slower on unaligned weights.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parallel.sharded_optimizer_shards import Shard

ALIGNMENT = 64  # elements: 128 bytes of bfloat16
# Each bucket costs the host two collectives, the second when it has little else to do: a large model gets larger
# buckets than asked for, as long as two of them in flight stay small.
MANY_BUCKETS, LARGE_BUCKET_BYTES = 16, 128 * 2**20


@dataclass(frozen=True)
class BucketPlan:
    """Parameters of one dtype and their places in a flat buffer of `numel` elements, a multiple of the ranks."""

    names: tuple[str, ...]
    offsets: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    numel: int
    dtype: torch.dtype


def plan_buckets(
    named: Iterable[tuple[str, Tensor]], ranks: int, bucket_bytes: int, first_bucket_bytes: int | None = None
) -> list[BucketPlan]:
    """Cut parameters, in the order given, into buckets of about `bucket_bytes`; one larger than that has its own.

    Where that would make many, buckets are larger, up to LARGE_BUCKET_BYTES. Give parameters in the order in which
    their gradients are ready (reverse of registration). A small first bucket starts communication early.
    """
    named = list(named)
    total = sum(param.numel() * param.element_size() for _, param in named)
    bucket_bytes = max(bucket_bytes, min(total // MANY_BUCKETS, LARGE_BUCKET_BYTES))
    plans: list[BucketPlan] = []
    entries: list[tuple[str, Tensor]] = []
    filled, limit = 0, bucket_bytes if first_bucket_bytes is None else min(first_bucket_bytes, bucket_bytes)
    for name, param in named:
        size = param.numel() * param.element_size()
        if entries and (filled + size > limit or param.dtype != entries[-1][1].dtype):
            plans.append(close_bucket(entries, ranks))
            entries, filled, limit = [], 0, bucket_bytes
        entries.append((name, param))
        filled += size
    if entries:
        plans.append(close_bucket(entries, ranks))
    return plans


def close_bucket(entries: list[tuple[str, Tensor]], ranks: int) -> BucketPlan:
    offsets, position = [], 0
    for _, param in entries:
        offsets.append(position)
        position += -(-param.numel() // ALIGNMENT) * ALIGNMENT
    names, params = zip(*entries, strict=True)
    numel = max(1, -(-position // (ranks * ALIGNMENT))) * ranks * ALIGNMENT
    shapes = tuple(tuple(param.shape) for param in params)
    return BucketPlan(names, tuple(offsets), shapes, numel, params[0].dtype)


def rank_starts(offset: int, numel: int, share: int, ranks: int) -> tuple[int, ...]:
    """Where each rank's part of a parameter at `offset` of a bucket begins, as elements of it; last, its end."""
    return (*(min(max(rank * share - offset, 0), numel) for rank in range(ranks)), numel)


class Bucket:
    """The flat buffer of one plan. The parameters become views of it; `shards` are views of this rank's part.

    `flat` (numel,) is the buffer, where it has to lie somewhere.
    """

    def __init__(self, plan: BucketPlan, params: list[nn.Parameter], ranks: int, rank: int, flat: Tensor | None = None):
        self.plan, self.params = plan, params
        self.share = plan.numel // ranks
        self.flat = params[0].new_zeros(plan.numel) if flat is None else flat.zero_()
        with torch.no_grad():
            for param, view in zip(params, self.views(self.flat), strict=True):
                view.copy_(param)
                param.data = view
        self.own = self.flat[rank * self.share : (rank + 1) * self.share]
        self.shards, self.own_places = [], []
        for name, offset, param in zip(plan.names, plan.offsets, params, strict=True):
            starts = rank_starts(offset, param.numel(), self.share, ranks)
            place = slice(offset + starts[rank] - rank * self.share, offset + starts[rank + 1] - rank * self.share)
            place = place if starts[rank + 1] > starts[rank] else slice(0, 0)
            local = nn.Parameter(self.own[place], requires_grad=param.requires_grad)
            self.shards.append(Shard(name, tuple(param.shape), starts, rank, local))
            self.own_places.append(place)
        # Of the gradients: filled in backward, sent, and kept as this rank's part only.
        self.gradients: Tensor | None = None  # (numel,) in the dtype of the reduction
        self.own_gradient: Tensor | None = None  # (share,)
        self.present = [False] * len(params)
        self.ready = 0

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters' places in a buffer of this bucket's layout, in their shapes."""
        return [
            flat[offset : offset + param.numel()].view(param.shape)
            for offset, param in zip(self.plan.offsets, self.params, strict=True)
        ]
