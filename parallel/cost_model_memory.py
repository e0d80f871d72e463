"""What one rank holds of a model's weights, gradients and optimizer state, and what messages add for a while.

The whiteboard form, for float32 masters and AdamW, with P ranks and n parameters (Rajbhandari et al. 2020):

    zero 0    4n weights + 4n gradients + 8n moments
    zero 1    4n         + 4n           + 8n / P      gradients only until they are sent
    zero 2    4n / P     + 4n / P       + 8n / P      and all parameters gathered from forward to backward
    zero 3    4n / P     + 4n / P       + 8n / P      and two blocks gathered at a time

Here with the padding of buckets and blocks. Activations are the model's affair (llm/plan_memory puts both together).
"""

from dataclasses import dataclass

from parallel.cost_model_traffic import (
    ITEM_BYTES,
    SLOT_ALIGNMENT,
    DataLayout,
    Param,
    block_of,
    ddp_buckets,
    gathered_dtype,
    gradient_share,
    padded_bucket,
    round_up,
    trainable,
    zero1_buckets,
)

FULL_ALIGNMENT = 256  # bytes, of each gathered parameter


@dataclass(frozen=True)
class RankState:
    """Bytes on one rank. The first three live from step to step, the gradients from backward to the update."""

    weights: int
    optimizer: int
    gradients: int  # at the update
    waiting: int  # gradients of earlier micro-batches beside the last one's backward; 0 with a single micro-batch
    in_flight: int  # messages of blocks' gradients under way at once, beside the gradients
    in_flight_last: int  # and of what is no block, at the end of backward
    gathered_root: int  # FSDP: full parameters of what is no block
    gathered_blocks: tuple[int, ...]  # and of each block
    gather_message: int  # of one block on its way
    peer: int = 0  # buckets that other ranks read, there from the start; gradients that become views of them count here
    filled_last: int = 0  # gradients that the last message was made from, beside it (ZeRO-1)

    @property
    def held(self) -> int:
        """From step to step."""
        return self.weights + self.optimizer + self.peer


def rank_state(params: list[Param], layout: DataLayout, moments: dict[str, int]) -> RankState:
    """`moments` gives for each parameter's name the bytes of optimizer state an element (AdamW in float32: 8)."""
    if layout.zero == 0 or layout.ranks == 1:
        return replicated_state(params, layout, moments)
    return zero1_state(params, layout, moments) if layout.zero == 1 else fsdp_state(params, layout, moments)


def replicated_state(params: list[Param], layout: DataLayout, moments: dict[str, int]) -> RankState:
    own = trainable(params)
    weights, gradients = (sum(param.nbytes for param in listed) for listed in (params, own))
    state = sum(param.numel * moments[param.name] for param in own)
    waiting = gradients if layout.micro_batches > 1 else 0
    in_flight = last = peer = 0
    if layout.ranks > 1 and layout.bucketed:
        # A bucket is filled from gradients that go when it is full.
        sizes = [(sum(param.nbytes for param in bucket), of_blocks(bucket)) for bucket in ddp_buckets(own, layout)]
        in_flight = max((size for size, is_of_blocks in sizes if is_of_blocks), default=0)
        last = max(size for size, _ in sizes)
        copies = 0
        if layout.reduce_dtype and layout.reduce_dtype != own[0].dtype:  # copies that all live until the end
            copies = sum(param.numel for param in own) * ITEM_BYTES[layout.reduce_dtype]
        if layout.transport == "peer" and copies:
            peer, copies = copies, 0
        elif layout.transport == "peer":  # no buffer is made anew, and gradients become views of those that are there
            peer, gradients, in_flight, last = gradients, 0, 0, 0
        in_flight, last = in_flight + copies, last + copies
    return RankState(weights, state, gradients, waiting, in_flight, last, 0, (), 0, peer)


def of_blocks(bucket: list[Param]) -> bool:
    return any(param.in_block for param in bucket)


def zero1_state(params: list[Param], layout: DataLayout, moments: dict[str, int]) -> RankState:
    own, frozen = trainable(params), sum(param.nbytes for param in params if not param.trainable)
    buckets = zero1_buckets(own, layout)
    sizes = [padded_bucket(bucket, layout.shard) for bucket in buckets]
    items = [ITEM_BYTES[bucket[0].dtype] for bucket in buckets]
    weights = frozen + sum(size * item for size, item in zip(sizes, items, strict=True))
    shares = sum(size * item for size, item in zip(sizes, items, strict=True)) // layout.shard
    sent = [size * (ITEM_BYTES[layout.reduce_dtype] if layout.reduce_dtype else item)
            for size, item in zip(sizes, items, strict=True)]  # fmt: skip
    full = sum(param.nbytes for param in own)
    state = sum(-(-param.numel * moments[param.name] // layout.shard) for param in own)
    # Two messages may be under way; the gradients that they were filled from are gone.
    in_flight = sum(sorted(size for size, bucket in zip(sent, buckets, strict=True) if of_blocks(bucket))[-2:])
    waiting = full if layout.micro_batches > 1 else 0
    filled = sum(param.nbytes for param in buckets[-1])  # gradients that the last message is made from
    if layout.transport == "peer":  # two messages of the largest size, for good
        return RankState(weights, state, shares, waiting, 0, 0, 0, (), 0, 2 * max(sent), filled)
    return RankState(weights, state, shares, waiting, in_flight, sum(sent[-2:]), 0, (), 0, 0, filled)


def fsdp_state(params: list[Param], layout: DataLayout, moments: dict[str, int]) -> RankState:
    own, ranks = trainable(params), layout.shard
    blocks: dict[int, list[Param]] = {}
    for param in params:
        if param.in_block:
            blocks.setdefault(param.stage, []).append(param)
    root = [param for param in params if not param.in_block]
    master = max(ITEM_BYTES[param.dtype] for param in params)
    weights = sum(block_of(param, ranks) for param in params) * master
    gradients = sum(block_of(param, ranks) for param in own) * master
    state = sum(block_of(param, ranks) * moments[param.name] for param in own)
    sent = ITEM_BYTES[layout.reduce_dtype] if layout.reduce_dtype else master
    last, *messages = (ranks * gradient_share(unit, layout) * sent for unit in [root, *blocks.values()])
    waiting = 0
    if layout.micro_batches > 1:  # the root's message of the micro-batch before is still there
        waiting = gradients + last if layout.reduce_each_micro_batch else ranks * gradients
    gathered = tuple(full_bytes(unit, layout) for unit in blocks.values())
    largest = max((slot_bytes(unit, layout) * ranks for unit in blocks.values()), default=0)
    in_flight = max(messages, default=0)
    return RankState(weights, state, gradients, waiting, in_flight, last, full_bytes(root, layout), gathered, largest)


def full_bytes(unit: list[Param], layout: DataLayout) -> int:
    """Memory of a gathered unit, each parameter padded to equal blocks and aligned."""
    sizes = [layout.shard * block_of(p, layout.shard) * ITEM_BYTES[gathered_dtype(p, layout)] for p in unit]
    return sum(round_up(size, FULL_ALIGNMENT) for size in sizes)


def slot_bytes(unit: list[Param], layout: DataLayout) -> int:
    """A rank's part of a unit's gather."""
    used = sum(block_of(param, layout.shard) * ITEM_BYTES[gathered_dtype(param, layout)] for param in unit)
    return round_up(used, SLOT_ALIGNMENT)
