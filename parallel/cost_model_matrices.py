"""The messages of an update that needs whole matrices (Muon) when ranks hold parts of them.

Each matrix has one rank that transforms it: the others send it their parts in bfloat16 and get the parts of the result
back, two all-to-alls a step. What a rank sends depends on which matrices are its own, so a prediction is of one rank.
"""

import math
from collections.abc import Iterator

from parallel.cost_model_traffic import (
    BUCKET_ALIGNMENT,
    DataLayout,
    Message,
    Param,
    block_of,
    padded_bucket,
    round_up,
    trainable,
    zero1_buckets,
)

ITEM = 2  # bfloat16


def matrix_messages(params: list[Param], layout: DataLayout, rank: int) -> Iterator[Message]:
    """The two all-to-alls of rank `rank` along the sharded axis; none where every rank holds whole matrices."""
    matrices = [param for param in trainable(params) if param.matrix]
    if layout.shard == 1 or layout.zero == 0 or not matrices:
        return
    starts = zero1_starts(params, layout) if layout.zero == 1 else fsdp_starts(params, layout)
    cut = [param for param in matrices if any(start % math.prod(param.shape[-2:]) for start in starts[param.name])]
    owners = owners_of([iteration_cost(param.shape) for param in cut], layout.shard)
    held = sum(starts[param.name][rank + 1] - starts[param.name][rank] for param in cut)
    owned = sum(param.numel for param, owner in zip(cut, owners, strict=True) if owner == rank)
    for elements in (held, owned):
        yield Message("all_to_all", "dp_shard_cp", "bfloat16", layout.shard, ITEM * elements, "matrices")


def fsdp_starts(params: list[Param], layout: DataLayout) -> dict[str, list[int]]:
    """The first element of each rank's rows of every parameter, and the end."""
    ranks = range(layout.shard + 1)
    return {p.name: [min(rank * block_of(p, layout.shard), p.numel) for rank in ranks] for p in params}


def fsdp_held(params: list[Param], layout: DataLayout, rank: int) -> dict[str, int]:
    """Elements of every parameter on one rank: `fsdp_starts` of that rank alone."""
    held = {}
    for param in params:
        block = block_of(param, layout.shard)
        held[param.name] = min((rank + 1) * block, param.numel) - min(rank * block, param.numel)
    return held


def zero1_held(params: list[Param], layout: DataLayout, rank: int) -> dict[str, int]:
    """The same of equal parts of flat buckets: `zero1_starts` of one rank alone."""
    held = {}
    for bucket in zero1_buckets(trainable(params), layout):
        share, offset = padded_bucket(bucket, layout.shard) // layout.shard, 0
        for param in bucket:
            first, end = (min(max(edge * share - offset, 0), param.numel) for edge in (rank, rank + 1))
            held[param.name] = end - first
            offset += round_up(param.numel, BUCKET_ALIGNMENT)
    return held


def zero1_starts(params: list[Param], layout: DataLayout) -> dict[str, list[int]]:
    """The same where equal parts of flat buckets fall to the ranks."""
    starts = {}
    for bucket in zero1_buckets(trainable(params), layout):
        share, offset = padded_bucket(bucket, layout.shard) // layout.shard, 0
        for param in bucket:
            ends = [rank * share - offset for rank in range(layout.shard)]
            starts[param.name] = [*(min(max(end, 0), param.numel) for end in ends), param.numel]
            offset += round_up(param.numel, BUCKET_ALIGNMENT)
    return starts


def iteration_cost(shape: tuple[int, ...]) -> int:
    """Multiplications of one Newton-Schulz iteration, up to a factor: a Gram matrix, its square, their product."""
    short, long = sorted(shape[-2:])
    return math.prod(shape[:-2]) * (2 * short * short * long + short**3)


def owners_of(costs: list[int], ranks: int) -> list[int]:
    """The dearest first, each to the rank with least to do so far."""
    loads, owners = [0] * ranks, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += costs[index]
    return owners
