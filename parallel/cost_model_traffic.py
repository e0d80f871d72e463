"""Which collectives one optimizer step sends under data parallelism, counted from shapes alone.

Each message carries the bytes that the log gives it (collectives_log), so a step's sum per operation, axis and dtype
can be compared with comm.jsonl number for number. The rules by which gradients share a message are counted here anew,
not asked of ddp, sharded_optimizer and fsdp: a prediction that ran their code would only repeat it.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1}
BUCKET_ALIGNMENT = 64  # elements, of each parameter in a ZeRO-1 bucket and of each rank's part of it
MANY_BUCKETS, LARGE_BUCKET_BYTES = 16, 128 * 2**20  # of ZeRO-1: fewer and larger ones for a large model
SLOT_ALIGNMENT = 16  # bytes, of a rank's part of an FSDP gather


@dataclass(frozen=True)
class Param:
    """One parameter: `stage` is its place in forward (0 embedding, 1 .. L the blocks, L + 1 what follows them)."""

    name: str
    shape: tuple[int, ...]
    stage: int
    in_block: bool
    dtype: str = "float32"
    trainable: bool = True
    matrix: bool = False  # updated as a whole matrix (Muon)

    def __hash__(self) -> int:
        return hash(self.name)

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class DataLayout:
    """How gradients, optimizer and parameters lie over the data ranks; the fields of ParallelConfig that matter."""

    replicate: int = 1  # groups of ranks that each hold one copy of what zero shards
    shard: int = 1  # ranks of such a group
    zero: int = 0
    bucketed: bool = True  # False: DDP's naive mode
    bucket_bytes: int = 25 * 2**20
    first_bucket_bytes: int = 2**20
    reduce_dtype: str | None = None  # of gradients on the wire
    param_dtype: str | None = None  # of matrices that FSDP gathers; vectors and the embedding keep theirs
    casts_all: bool = False  # no, these too
    micro_batches: int = 1
    reduce_each_micro_batch: bool = True  # FSDP
    transport: str = "backend"  # of buckets; "peer": they lie where other ranks read them, for good

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard

    @property
    def is_fsdp(self) -> bool:
        return self.zero >= 2


class Message(NamedTuple):
    """One collective: what the log says of it, and where in the step it is sent (a plan makes millions of these).

    `phase`: "forward" before that stage's forward, "backward" after that stage's backward (gathers: before it),
    "matrices" around the update of whole matrices, "optimizer" after the update of its part, until the next forward
    of that stage, "host" for a few numbers on the host.
    """

    op: str
    axis: str
    dtype: str
    ranks: int
    nbytes: int
    phase: str
    stage: int = 0
    micro_batch: int = 0


@dataclass(frozen=True)
class Traffic:
    """All messages of one kind in a step: the fields of a comm.jsonl line that do not depend on time."""

    op: str
    axis: str
    dtype: str
    ranks: int
    calls: int
    bytes: int


def step_messages(params: list[Param], layout: DataLayout) -> list[Message]:
    """Every collective of one optimizer step, in which every trainable parameter has a gradient, in sending order."""
    if layout.ranks == 1:
        return []
    kinds = {0: ddp_messages if layout.bucketed else naive_messages, 1: zero1_messages}
    return [agreement_on_targets(layout), *kinds.get(layout.zero, fsdp_messages)(params, layout)]


def agreement_on_targets(layout: DataLayout) -> Message:
    return Message("all_gather", "dp_cp", "int64", layout.ranks, layout.ranks * 3 * 8, "host")


def step_traffic(params: list[Param], layout: DataLayout) -> list[Traffic]:
    """The messages of a step summed per operation, axis and dtype, as comm.jsonl sums them."""
    return summed(step_messages(params, layout))


def summed(messages: Iterable[Message]) -> list[Traffic]:
    found: dict[tuple[str, str, str], Traffic] = {}
    for m in messages:
        key = (m.op, m.axis, m.dtype)
        known = found.get(key, Traffic(*key, m.ranks, 0, 0))
        found[key] = replace(known, calls=known.calls + 1, bytes=known.bytes + m.nbytes)
    return list(found.values())


def trainable(params: list[Param]) -> list[Param]:
    return [param for param in params if param.trainable]


def naive_messages(params: list[Param], layout: DataLayout) -> Iterator[Message]:
    """A flag a parameter, then each gradient on its own after backward."""
    own, last = trainable(params), (0, layout.micro_batches - 1)
    yield Message("all_reduce_sum", "dp_cp", "int32", layout.ranks, 4 * len(own), "host")
    for param in own:
        yield Message("all_reduce_sum", "dp_cp", param.dtype, layout.ranks, param.nbytes, "backward", *last)


def ddp_messages(params: list[Param], layout: DataLayout) -> Iterator[Message]:
    """One all-reduce a bucket, behind the gradients one flag a parameter, in the last micro-batch's backward."""
    for bucket in ddp_buckets(trainable(params), layout):
        dtype = layout.reduce_dtype or bucket[0].dtype
        nbytes = ITEM_BYTES[dtype] * (sum(param.numel for param in bucket) + len(bucket))
        stage = min(param.stage for param in bucket)
        yield Message(
            "all_reduce_sum", "dp_cp", dtype, layout.ranks, nbytes, "backward", stage, layout.micro_batches - 1
        )


def ddp_buckets(params: list[Param], layout: DataLayout) -> list[list[Param]]:
    """Last parameters first; a bucket of one dtype closes once it holds its bytes, the first one sooner."""
    closed: list[list[Param]] = []
    opened: dict[str, list[Param]] = {}
    for param in reversed(params):
        bucket = opened.setdefault(param.dtype, [])
        bucket.append(param)
        bound = layout.bucket_bytes if closed else layout.first_bucket_bytes
        if sum(member.nbytes for member in bucket) >= bound:
            closed.append(opened.pop(param.dtype))
    return closed + sorted(opened.values(), key=lambda bucket: -params.index(bucket[-1]))


def zero1_messages(params: list[Param], layout: DataLayout) -> Iterator[Message]:
    """A reduce-scatter and later an all-gather a bucket; copies of a shard sum it in between."""
    own, ranks = trainable(params), layout.shard
    buckets = zero1_buckets(own, layout)
    sizes = [padded_bucket(bucket, ranks) for bucket in buckets]
    for bucket, numel in zip(buckets, sizes, strict=True):
        sent, kept = layout.reduce_dtype or bucket[0].dtype, bucket[0].dtype
        place = ("backward", stage_of(bucket), layout.micro_batches - 1)
        if ranks > 1:
            yield Message("reduce_scatter_sum", "dp_shard_cp", sent, ranks, numel * ITEM_BYTES[sent], *place)
        if layout.replicate > 1:
            nbytes = numel // ranks * ITEM_BYTES[kept]
            yield Message("all_reduce_sum", "dp_replicate", kept, layout.replicate, nbytes, *place)
    yield from agreements(own, layout)
    for bucket, numel in zip(buckets, sizes, strict=True):
        if ranks > 1:
            dtype = bucket[0].dtype
            nbytes = numel * ITEM_BYTES[dtype]
            yield Message("all_gather", "dp_shard_cp", dtype, ranks, nbytes, "optimizer", stage_of(bucket))


def zero1_buckets(params: list[Param], layout: DataLayout) -> list[list[Param]]:
    """Last parameters first; a bucket closes before it would grow beyond its bytes, or where the dtype changes."""
    buckets: list[list[Param]] = []
    filled, total = 0, sum(param.nbytes for param in params)
    usual = max(layout.bucket_bytes, min(total // MANY_BUCKETS, LARGE_BUCKET_BYTES))
    for param in reversed(params):
        bound = usual
        if len(buckets) <= 1:
            bound = min(bound, layout.first_bucket_bytes)
        if not buckets or filled + param.nbytes > bound or param.dtype != buckets[-1][0].dtype:
            buckets.append([])
            filled = 0
        buckets[-1].append(param)
        filled += param.nbytes
    return buckets


def padded_bucket(bucket: list[Param], ranks: int) -> int:
    """Elements of a bucket whose parameters and whose equal parts are aligned."""
    used = sum(round_up(param.numel, BUCKET_ALIGNMENT) for param in bucket)
    return max(1, -(-used // (ranks * BUCKET_ALIGNMENT))) * ranks * BUCKET_ALIGNMENT


def fsdp_messages(params: list[Param], layout: DataLayout) -> Iterator[Message]:
    """Gathers before a unit's forward and (ZeRO-3) backward, reduce-scatters after it; the root unit stays between."""
    root = [param for param in params if not param.in_block]
    blocks = [
        [p for p in params if p.in_block and p.stage == s] for s in sorted({p.stage for p in params if p.in_block})
    ]
    for micro_batch in range(layout.micro_batches):
        first, last = micro_batch == 0, micro_batch == layout.micro_batches - 1
        if first or layout.zero == 3:
            for unit in [root, *blocks]:
                yield from gather_message(unit, layout, "forward", micro_batch)
        for unit in [*reversed(blocks), root]:
            if layout.zero == 3 and unit is not root and unit is not blocks[-1]:  # that one is still there
                yield from gather_message(unit, layout, "backward", micro_batch)
            if last or layout.reduce_each_micro_batch:
                yield from reduce_message(unit, layout, micro_batch)
            if last and layout.replicate > 1 and trainable(unit):
                nbytes = gradient_share(unit, layout) * ITEM_BYTES[unit[0].dtype]
                place = ("backward", stage_of(unit), micro_batch)
                yield Message("all_reduce_sum", "dp_replicate", unit[0].dtype, layout.replicate, nbytes, *place)
    yield from agreements(trainable(params), layout)


def agreements(own: list[Param], layout: DataLayout) -> Iterator[Message]:
    """Which parameters have a gradient anywhere, and the norm of the gradient whose parts the ranks hold."""
    dtype = norm_dtype(own)
    if layout.shard > 1:
        yield Message("all_reduce_sum", "dp_shard_cp", "int32", layout.shard, 4 * len(own), "host")
    if layout.replicate > 1:
        yield Message("all_reduce_sum", "dp_replicate", "int32", layout.replicate, 4 * len(own), "host")
    if layout.shard > 1:
        yield Message("all_reduce_sum", "dp_shard_cp", dtype, layout.shard, ITEM_BYTES[dtype], "host")


def gather_message(unit: list[Param], layout: DataLayout, phase: str, micro_batch: int) -> Iterator[Message]:
    if layout.shard > 1 and unit:
        dtypes = {gathered_dtype(param, layout) for param in unit}
        slot = sum(block_of(param, layout.shard) * ITEM_BYTES[gathered_dtype(param, layout)] for param in unit)
        nbytes = layout.shard * round_up(slot, SLOT_ALIGNMENT)
        dtype = dtypes.pop() if len(dtypes) == 1 else "uint8"  # several dtypes travel as bytes
        yield Message("all_gather", "dp_shard_cp", dtype, layout.shard, nbytes, phase, stage_of(unit), micro_batch)


def reduce_message(unit: list[Param], layout: DataLayout, micro_batch: int) -> Iterator[Message]:
    if layout.shard > 1 and trainable(unit):
        dtype = layout.reduce_dtype or unit[0].dtype
        nbytes = layout.shard * gradient_share(unit, layout) * ITEM_BYTES[dtype]
        place = ("backward", stage_of(unit), micro_batch)
        yield Message("reduce_scatter_sum", "dp_shard_cp", dtype, layout.shard, nbytes, *place)


def gradient_share(unit: list[Param], layout: DataLayout) -> int:
    """Gradient elements of a unit on each rank, padding included."""
    return sum(block_of(param, layout.shard) for param in trainable(unit))


def block_of(param: Param, ranks: int) -> int:
    """Elements of a parameter on each rank: its rows are cut into equal blocks, the last ones short or empty."""
    rows = max(1, param.shape[0]) if param.shape else 1
    return -(-rows // ranks) * (param.numel // rows)


def stage_of(unit: list[Param]) -> int:
    return min((param.stage for param in unit), default=0)


def gathered_dtype(param: Param, layout: DataLayout) -> str:
    keeps = len(param.shape) < 2 or param.name.startswith("embedding.")  # llm.parallelize.is_kept_by_autocast
    keeps = keeps and not layout.casts_all
    return layout.param_dtype if layout.param_dtype and not keeps else param.dtype


def norm_dtype(params: list[Param]) -> str:
    return "float64" if params and params[0].dtype == "float64" else "float32"


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
