"""Where the parameters of one FSDP unit lie: in this rank's shards, in the messages and in the gathered memory.

Each parameter is cut along dim 0 into P blocks of ceil(rows / P) rows, of which the last may be short or empty. A
message is (P, share): row r holds rank r's block of every parameter, one after the other. Only shapes and numbers here.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT_BYTES = 256  # of a gathered parameter: what CUDA's allocator gives, and matrix products like
SLOT_BYTES = 16  # of a rank's row in a message


@dataclass(frozen=True)
class ParamPlace:
    """One parameter of a unit; `block` elements of it fall to each rank, padding included."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # of the gathered parameter, in which the model computes
    trainable: bool
    rows: int  # of a full block
    block: int
    offset: int  # of the block within a rank's master weights, elements
    gradient_offset: int  # and within its gradients; -1 where there are none
    full_offset: int  # of the gathered parameter within the unit's memory, bytes

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def starts(self, ranks: int) -> tuple[int, ...]:
        """The first element of every rank's block, and the end."""
        return (*(min(rank * self.block, self.numel) for rank in range(ranks)), self.numel)


@dataclass(frozen=True)
class UnitLayout:
    """All parameters of a unit, widest dtype first, so that each lies at a multiple of its size in any message."""

    places: tuple[ParamPlace, ...]
    ranks: int
    share: int  # master elements a rank
    gradient_share: int  # gradient elements a rank
    slot_bytes: int  # of a rank in a gather message
    full_bytes: int  # of the gathered unit, each parameter padded to ranks x block
    message_dtype: torch.dtype  # that of the parameters when they have one, else bytes

    def ranges(self) -> list[tuple[torch.dtype, int, int, int]]:
        """(dtype, first element, one past the last, first byte in the slot) of each run of one dtype, at most a few."""
        runs: list[tuple[torch.dtype, int, int, int]] = []
        position = 0
        for place in self.places:
            if runs and runs[-1][0] == place.dtype:
                dtype, first, _, begin = runs[-1]
                runs[-1] = (dtype, first, place.offset + place.block, begin)
            else:
                runs.append((place.dtype, place.offset, place.offset + place.block, position))
            position += place.block * place.dtype.itemsize
        return runs

    def split_sizes(self) -> list[int]:
        """Bytes of each parameter's block in a slot."""
        return [place.block * place.dtype.itemsize for place in self.places]


def plan_unit(named: list[tuple[str, Tensor]], dtypes: list[torch.dtype], ranks: int) -> UnitLayout:
    """The layout of a unit's parameters; `dtypes` are those in which the model computes with them."""
    order = sorted(range(len(named)), key=lambda index: -dtypes[index].itemsize)
    places, offset, gradient_offset, full, slot = [], 0, 0, 0, 0
    for index in order:
        (name, param), dtype = named[index], dtypes[index]
        shape = tuple(param.shape)
        leading = shape[0] if shape else 1
        rows = -(-leading // ranks)
        block = rows * math.prod(shape[1:])
        trainable = param.requires_grad
        place = ParamPlace(name, shape, dtype, trainable, rows, block, offset, gradient_offset, full)
        places.append(place if trainable else ParamPlace(name, shape, dtype, False, rows, block, offset, -1, full))
        offset += block
        gradient_offset += block if trainable else 0
        slot += block * dtype.itemsize
        full += -(-ranks * block * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    one_dtype = len({place.dtype for place in places}) == 1
    slot = -(-slot // SLOT_BYTES) * SLOT_BYTES
    message = places[0].dtype if one_dtype else torch.uint8
    return UnitLayout(tuple(places), ranks, offset, gradient_offset, slot, full, message)
