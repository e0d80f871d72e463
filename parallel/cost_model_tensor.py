"""Which collectives tensor parallelism adds to an optimizer step, counted from shapes alone.

A layer's input enters the columns and its rows' sums leave them (tensor_parallel_operators): per crossing one tensor of
N x C goes over the tp axis in forward and one in backward, either way of

    whole stream      enter: nothing / all-reduce            leave: all-reduce / nothing
    cut by tokens     enter: all-gather / reduce-scatter     leave: reduce-scatter / all-gather

so both send the same bytes through a rank, 2 (P - 1) / P of N C a crossing. The loss exchanges two numbers a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from parallel.cost_model_traffic import ITEM_BYTES, Message, Param, norm_dtype, trainable

AXIS = "tp"


class TensorCut(NamedTuple):
    """One parameter's cut: dim None where every rank holds the whole, else in `parts` parts along it."""

    dim: int | None = None
    parts: int = 1
    partial: bool = False  # copies' gradients are shares that are summed


@dataclass(frozen=True)
class TensorShape:
    """What the messages of tensor parallelism depend on."""

    ranks: int
    cut_by_tokens: bool  # sequence parallelism
    width: int  # C
    blocks: tuple[int, ...]  # of each block, how many pairs of enter and leave: 2, or 1 with whole experts
    dtype: str  # of what products read and write
    stream_dtype: str  # of the embedding's vectors
    statistics_dtype: str = "float32"  # of the loss' two numbers a row
    chunks: int = 1  # pieces in which a block's tokens cross
    loss_chunks: int = 1  # in which a fused loss exchanges them
    recomputes: bool = False  # activation checkpointing: a block's forward is sent again in backward
    has_embedding: bool = True
    has_output: bool = True
    frozen_start: bool = False  # adapters alone learn: no gradient leaves the first block for the embedding


def cut_params(params: list[Param], cuts: dict[str, TensorCut]) -> list[Param]:
    """The parameters as a rank holds them, padding included."""
    return [cut_param(param, cuts[param.name]) for param in params]


@lru_cache(maxsize=1 << 14)
def cut_param(param: Param, cut: TensorCut) -> Param:
    if cut.dim is None:
        return param
    shape = list(param.shape)
    shape[cut.dim] = -(-shape[cut.dim] // cut.parts)
    return Param(param.name, tuple(shape), param.stage, param.in_block, param.dtype, param.trainable, param.matrix)


def activation_messages(shape: TensorShape, micro_batch_tokens: list[int]) -> Iterator[Message]:
    """The crossings and the loss of each micro-batch of so many tokens."""
    for index, tokens in enumerate(micro_batch_tokens):
        yield from micro_batch_messages(shape, tokens, index)


@lru_cache(maxsize=256)
def micro_batch_messages(shape: TensorShape, tokens: int, index: int) -> tuple[Message, ...]:
    """Of one micro-batch; layouts that differ in their data ranks alone send the same ones."""
    return (*forward_messages(shape, tokens, index), *backward_messages(shape, tokens, index))


def forward_messages(shape: TensorShape, tokens: int, index: int) -> Iterator[Message]:
    last = len(shape.blocks) + 1
    if shape.has_embedding:
        yield leave(shape, tokens, shape.stream_dtype, ("forward", 0, index))
    for layer, pairs in enumerate(shape.blocks, start=1):
        for _ in range(pairs):
            yield from in_chunks(shape, enter(shape, tokens, ("forward", layer, index)))
            yield from in_chunks(shape, leave(shape, tokens, shape.dtype, ("forward", layer, index)))
    if shape.has_output:
        yield from filter(None, [enter(shape, tokens, ("forward", last, index))])
        for chunk in range(shape.loss_chunks):
            rows = tokens * (chunk + 1) // shape.loss_chunks - tokens * chunk // shape.loss_chunks
            nbytes = shape.ranks * 2 * rows * ITEM_BYTES[shape.statistics_dtype]
            yield Message("all_gather", AXIS, shape.statistics_dtype, shape.ranks, nbytes, "forward", last, index)


def backward_messages(shape: TensorShape, tokens: int, index: int) -> Iterator[Message]:
    last = len(shape.blocks) + 1
    if shape.has_output:
        yield leave(shape, tokens, shape.dtype, ("backward", last, index))
    for layer, pairs in reversed(list(enumerate(shape.blocks, start=1))):
        place = ("backward", layer, index)
        for pair in range(pairs if shape.recomputes else 0):
            yield from in_chunks(shape, enter(shape, tokens, place))
            # Nothing is kept of the plain sum that ends a block, so that one is left out.
            if pair == 0 or shape.chunks > 1:
                yield from in_chunks(shape, leave(shape, tokens, shape.dtype, place))
        for pair in range(pairs):  # backward mirrors forward: a sum's gradient enters, a gather's leaves
            yield from in_chunks(shape, enter(shape, tokens, place))
            if not (shape.frozen_start and layer == 1 and pair == pairs - 1):
                yield from in_chunks(shape, leave(shape, tokens, shape.dtype, place))
    if shape.has_embedding and not shape.frozen_start:
        yield from filter(None, [enter(shape, tokens, ("backward", 0, index), shape.stream_dtype)])


def enter(shape: TensorShape, tokens: int, place: tuple[str, int, int], dtype: str | None = None) -> Message | None:
    """All tokens on every rank, from a stream that is cut; a whole one is there already."""
    if not shape.cut_by_tokens:
        return None
    return crossing("all_gather", shape, tokens, dtype or shape.dtype, place)


def leave(shape: TensorShape, tokens: int, dtype: str, place: tuple[str, int, int]) -> Message:
    """The sum of what the ranks have."""
    op = "reduce_scatter_sum" if shape.cut_by_tokens else "all_reduce_sum"
    return crossing(op, shape, tokens, dtype, place)


def crossing(op: str, shape: TensorShape, tokens: int, dtype: str, place: tuple[str, int, int]) -> Message:
    return Message(op, AXIS, dtype, shape.ranks, tokens * shape.width * ITEM_BYTES[dtype], *place)


def in_chunks(shape: TensorShape, message: Message | None) -> Iterator[Message]:
    """One crossing of a block as its pieces."""
    if message is not None and shape.chunks == 1:
        yield message
    elif message is not None:
        yield from [message._replace(nbytes=message.nbytes // shape.chunks)] * shape.chunks


def gradient_messages(
    params: list[Param], cuts: dict[str, TensorCut], ranks: int, held: dict[str, int], has_matrices: int
) -> Iterator[Message]:
    """What follows backward: sums of shares, the norm, and elements of Muon's matrices gathered by this rank.

    `params` are the parts; `held` says how many elements of each this rank's data shard has.
    """
    own = trainable(params)
    yield Message("all_reduce_max", AXIS, "int64", ranks, 8, "host")
    partial = [param for param in own if cuts[param.name].partial]
    for dtype in dict.fromkeys(param.dtype for param in partial):
        elements = sum(cuts[p.name].parts * held[p.name] for p in partial if p.dtype == dtype)
        yield Message("all_reduce_sum", AXIS, dtype, ranks, elements * ITEM_BYTES[dtype], "matrices")
    yield Message("all_reduce_sum", AXIS, norm_dtype(own), ranks, ITEM_BYTES[norm_dtype(own)], "host")
    if has_matrices:
        yield Message("all_gather", AXIS, "bfloat16", ranks, ranks * has_matrices * ITEM_BYTES["bfloat16"], "matrices")
