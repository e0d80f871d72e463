"""What a rank holds of a named tensor, and the boxes that a checkpoint stores it as.

A strategy says which run of elements of the full, single-device tensor it holds: all of it (replicated), a range of
rows (FSDP's shards along dim 0) or any flat range (ZeRO-1's slices of a bucket). A checkpoint knows only boxes
full[offsets : offsets + shape]; a run is at most 2 ndim - 1 of them, views of the same memory, so that saving and
loading copy nothing on the way.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """`local` holds full.flatten()[start : start + local.numel()] of the tensor `name`, whose full shape is `shape`.

    With `box` = (offsets, sizes) it is a run of full[offsets : offsets + sizes] instead, as tensor parallelism cuts
    columns. Elements of `local` past the end are padding: neither saved nor loaded. `replicas` ranks hold these very
    elements and this is number `replica` of them; one of them writes.
    """

    name: str  # as in the single-device model
    shape: tuple[int, ...]
    start: int
    local: Tensor  # contiguous, live: loading writes into it
    replicas: int = 1
    replica: int = 0
    box: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    group: str = ""  # tells apart sets of ranks that are as many but not the same ones

    @property
    def numel(self) -> int:
        """How many elements of `local` belong to the full tensor."""
        return max(0, min(self.local.numel(), math.prod(self.sizes) - self.start))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of what `local` is a run of."""
        return self.shape if self.box is None else self.box[1]

    def of(self, name: str, local: Tensor) -> "Piece":
        """The same elements of another tensor of the same full shape, such as an optimizer's moment."""
        assert local.numel() == self.local.numel(), f"{name}: {local.numel()} elements beside {self.local.numel()}"
        return replace(self, name=name, local=local)


@dataclass(frozen=True)
class Box:
    """full[offsets : offsets + values.shape] of the tensor `name`; `values` is a view of the piece's memory."""

    name: str
    shape: tuple[int, ...]  # of the full tensor
    offsets: tuple[int, ...]
    values: Tensor


def whole(name: str, tensor: Tensor, replicas: int = 1, replica: int = 0) -> Piece:
    """The piece that is all of a tensor, on one rank or replicated over several."""
    return Piece(name, tuple(tensor.shape), 0, tensor, replicas, replica)


def boxes_of(piece: Piece) -> list[Box]:
    """The piece as boxes, without padding; none when it holds no element of a tensor that has some."""
    tensor = piece.local.detach()
    origin = (0,) * len(piece.shape) if piece.box is None else piece.box[0]
    if tuple(tensor.shape) == piece.sizes and not piece.start:
        return [Box(piece.name, piece.shape, origin, tensor)]
    flat, boxes, position = tensor.view(-1), [], 0
    for inside, shape in boxes_of_range(piece.sizes, piece.start, piece.numel):
        count = math.prod(shape)
        offsets = tuple(begin + offset for begin, offset in zip(origin, inside, strict=True))
        boxes.append(Box(piece.name, piece.shape, offsets, flat[position : position + count].view(shape)))
        position += count
    return boxes


def boxes_of_range(shape: tuple[int, ...], start: int, count: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, shape) of the boxes that make up elements start .. start + count, in order.

    Rows that are whole go into one box; the row cut at the front and the one at the back are ranges of their own.
    """
    if count <= 0:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, skipped = divmod(start, row)
    if skipped or count < row:
        part = min(count, row - skipped)
        for offsets, box in boxes_of_range(shape[1:], skipped, part):
            yield (first, *offsets), (1, *box)
        yield from boxes_of_range(shape, start + part, count - part)
        return
    rows = count // row
    yield (first, *(0 for _ in shape[1:])), (rows, *shape[1:])
    yield from boxes_of_range(shape, start + rows * row, count - rows * row)


def pieces_to_write(pieces: Iterable[Piece]) -> list[Piece]:
    """Those of this rank's pieces that it writes: each replicated one falls to one rank, shared out by bytes.

    Ranks that hold the same pieces in the same order agree without a word: each goes to whoever has least so far.
    """
    chosen, loads = [], {}
    for piece in pieces:
        load = loads.setdefault((piece.replicas, piece.group), [0] * piece.replicas)
        writer = load.index(min(load))
        load[writer] += piece.numel * piece.local.element_size()
        if writer == piece.replica and (piece.numel or not math.prod(piece.shape)):
            chosen.append(piece)
    return chosen


def scalar(name: str, tensor: Tensor, beside: Piece) -> Piece | None:
    """A 0-d state such as a step count, which every rank that holds a part keeps: the one with element 0 saves it."""
    assert tensor.ndim == 0, f"{name} is {list(tensor.shape)}, not a scalar"
    if beside.start or not beside.numel or (beside.box is not None and any(beside.box[0])):
        return None
    return Piece(name, (), 0, tensor, beside.replicas, beside.replica, group=beside.group)


def empty_like(piece: Piece, name: str, dtype: torch.dtype) -> Piece:
    """A new tensor for the same elements, zero in the padding: where loading puts an optimizer's state."""
    make = torch.empty_like if piece.numel == piece.local.numel() else torch.zeros_like
    return piece.of(name, make(piece.local, dtype=dtype, requires_grad=False))
