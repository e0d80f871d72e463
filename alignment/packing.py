"""Several examples in one row: best-fit bins, document masks, and positions that restart at each example.

A row of `seq_len` tokens holds whole examples one after the other, so that hardly a token is padding, and attention
stays within an example (doc_ids), so that loss and gradients are those of padded rows. An example of n tokens takes
n - 1 places: its last token is a target only. B rows, T = seq_len.
"""

from collections.abc import Sequence

import numpy as np
import torch

from alignment.r1_prompt import Example
from configs.errors import UserError
from llm.data_loader import IGNORED, Batch

PACKINGS = ("best_fit", "none")


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices whose lengths add up to at most `capacity`: best fit, longest first.

    Each goes into the fullest bin that it fits, found through one bit a remaining capacity: n log n in all. Of equal
    lengths the first comes first. UserError for one that fits no bin.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    if order and lengths[order[0]] > capacity:
        raise UserError(
            f"example {order[0]} takes {lengths[order[0]]} tokens and a row holds data.seq_len={capacity}; raise it"
        )
    bins: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # bins by the tokens that still fit
    rooms = 0  # bit r: there is a bin with room r
    for index in order:
        length = lengths[index]
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            chosen = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
            bins[chosen].append(index)
        else:
            room, chosen = capacity, len(bins)
            bins.append([index])
        by_room[room - length].append(chosen)
        rooms |= 1 << (room - length)
    return bins


def places_of(example: Example) -> int:
    """The places that an example takes in a row."""
    return len(example.token_ids) - 1


def pack(examples: Sequence[Example], bins: Sequence[Sequence[int]], seq_len: int) -> Batch:
    """A Batch of one row a bin: (B, T) ids, targets of the response alone, doc_ids and positions.

    doc_ids count the examples of a row from 1; 0 is padding, which stands at the end.
    """
    shape = (len(bins), seq_len)
    token_ids, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    targets, doc_ids = np.full(shape, IGNORED, np.int64), np.zeros(shape, np.int32)
    for row, members in enumerate(bins):
        start = 0
        for number, index in enumerate(members, 1):
            ids = np.asarray(examples[index].token_ids, np.int64)
            learned = np.asarray(examples[index].response_mask, bool)[1:]
            span = slice(start, start + len(ids) - 1)
            token_ids[row, span] = ids[:-1]
            targets[row, span] = np.where(learned, ids[1:], IGNORED)
            doc_ids[row, span] = number
            positions[row, span] = np.arange(len(ids) - 1)
            start = span.stop
    tensors = [torch.from_numpy(array) for array in (token_ids, targets, doc_ids, positions)]
    return Batch(tensors[0], tensors[1], int((targets != IGNORED).sum()), tensors[2], tensors[3])


def density(lengths: Sequence[int], bins: Sequence[Sequence[int]], capacity: int) -> float:
    """The share of all places that hold a token of an example."""
    return sum(lengths) / (len(bins) * capacity) if bins else 0.0
