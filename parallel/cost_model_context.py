"""What context parallelism sends, exactly, and how much of a ring's time is not hidden: from plain numbers.

A layer on P ranks, of which each holds N tokens (over all rows of the micro-batch), K kv heads, H heads of width D:

    ring         forward  P - 1 exchanges of 2 N K D        backward  the same again, and P of 2 N K D float32 sums
    all_gather   forward  a gather of 2 P N K D             backward  a reduce-scatter of 2 P N K D in float32
    ulysses      forward  all-to-alls of N H D (q and out) and N max(K, P) D (k and v); backward the same

A ring hides a step's messages behind its block of attention: per token both grow with the sequence, but a block's
products grow with its square, so from some length on nothing is exposed but the last exchange of backward.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from parallel.cost_model_traffic import ITEM_BYTES, Message

AXIS = "cp"
QUERY_SHARE = 3 / 7  # of a backward block: S, dP and dQ, before S, dP, dV and dK


@dataclass(frozen=True)
class ContextShape:
    """What the messages of context parallelism depend on; heads are those that tensor parallelism leaves on a rank."""

    ranks: int
    mode: str
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    dtype: str  # of q, k and v
    recomputes: bool = False  # activation checkpointing: a layer's forward is sent again in backward

    @property
    def sum_dtype(self) -> str:
        """That of dK and dV on their way."""
        return "float64" if self.dtype == "float64" else "float32"


def context_messages(shape: ContextShape, micro_batch_tokens: list[int]) -> Iterator[Message]:
    """The messages over the cp axis of micro-batches of which this rank has so many tokens each."""
    for index, tokens in enumerate(micro_batch_tokens):
        for layer in range(1, shape.layers + 1):
            yield from forward_messages(shape, tokens, ("forward", layer, index))
        for layer in range(shape.layers, 0, -1):
            place = ("backward", layer, index)
            if shape.recomputes:
                yield from forward_messages(shape, tokens, place)
            yield from backward_messages(shape, tokens, place)


def forward_messages(shape: ContextShape, tokens: int, place: tuple[str, int, int]) -> Iterator[Message]:
    keys = 2 * tokens * shape.kv_heads * shape.head_dim * ITEM_BYTES[shape.dtype]
    if shape.mode == "ring":
        for _ in range(shape.ranks - 1):
            yield Message("exchange", AXIS, shape.dtype, shape.ranks, keys, *place)
    elif shape.mode == "all_gather":
        yield Message("all_gather", AXIS, shape.dtype, shape.ranks, shape.ranks * keys, *place)
    else:
        yield from traded(shape, tokens, place)


def backward_messages(shape: ContextShape, tokens: int, place: tuple[str, int, int]) -> Iterator[Message]:
    sums = 2 * tokens * shape.kv_heads * shape.head_dim * ITEM_BYTES[shape.sum_dtype]
    if shape.mode == "ring":
        yield from forward_messages(shape, tokens, place)
        for _ in range(shape.ranks):
            yield Message("exchange", AXIS, shape.sum_dtype, shape.ranks, sums, *place)
    elif shape.mode == "all_gather":
        yield Message("reduce_scatter_sum", AXIS, shape.sum_dtype, shape.ranks, shape.ranks * sums, *place)
    else:
        yield from traded(shape, tokens, place)


def traded(shape: ContextShape, tokens: int, place: tuple[str, int, int]) -> Iterator[Message]:
    """q, k, v one way and out the other."""
    kv_heads = max(shape.kv_heads, shape.ranks)
    for heads in (shape.heads, kv_heads, kv_heads, shape.heads):
        nbytes = tokens * heads * shape.head_dim * ITEM_BYTES[shape.dtype]
        yield Message("all_to_all", AXIS, shape.dtype, shape.ranks, nbytes, *place)


@dataclass(frozen=True)
class RingTime:
    """Seconds of one layer's attention on a rank, and of them those in which it waits for messages."""

    seconds: float
    exposed_s: float


def ring_forward_time(ranks: int, block_s: float, keys_s: float) -> RingTime:
    """P blocks; behind each but the last the next one's keys arrive."""
    seconds = (ranks - 1) * max(block_s, keys_s) + block_s
    return RingTime(seconds, seconds - ranks * block_s)


def ring_backward_time(
    ranks: int, block_s: float, keys_s: float, sums_s: float, before_sums: float = QUERY_SHARE
) -> RingTime:
    """The same, and behind the first `before_sums` of a block the sums of the one before; the last go home alone.

    On one side stream a block's sums go first, then the next keys. The kernel of dK and dV adds to the sums, so it
    waits for them; those of dQ, three products of seven, run before it.
    """
    if ranks == 1:
        return RingTime(block_s, 0.0)
    joined = max(before_sums * block_s, sums_s) + (1 - before_sums) * block_s
    middle = max(0, ranks - 2) * max(joined, sums_s + keys_s)
    seconds = max(block_s, keys_s) + middle + joined + sums_s
    return RingTime(seconds, seconds - ranks * block_s)
