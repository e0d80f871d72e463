"""Which part of each parameter a rank holds under tensor parallelism: plain numbers, slices and their way back.

A parameter is cut along one dim into `parts` equal parts, the last padded; rank t of the tp axis holds part
t * parts // ranks. With as many parts as ranks each holds its own. With one part all hold the whole, and with fewer
parts than ranks (kv heads under tp > num_kv_heads) neighbouring ranks hold copies.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.errors import UserError


@dataclass(frozen=True)
class Placement:
    """One parameter of full `shape` over `ranks` ranks; dim None: whole on every rank.

    `partial`: each copy's gradient is only a share of it, so that copies have to be summed.
    """

    shape: tuple[int, ...]
    ranks: int
    dim: int | None = None
    parts: int = 1
    partial: bool = False

    @property
    def copies(self) -> int:
        """How many ranks hold the same elements."""
        return self.ranks // self.parts

    @property
    def length(self) -> int:
        """Rows (or columns) of a part, padding included."""
        return -(-self.shape[self.dim] // self.parts)

    @property
    def local_shape(self) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.length, *self.shape[self.dim + 1 :])

    def part(self, rank: int) -> int:
        """Which part a rank holds; its copies are neighbours."""
        return rank * self.parts // self.ranks

    def copy(self, rank: int) -> int:
        """Which copy of its part a rank holds."""
        return rank % self.copies

    def span(self, rank: int) -> tuple[int, int]:
        """First row (or column) that a rank holds, and one past the last, padding left out."""
        first = self.part(rank) * self.length
        return first, min(first + self.length, self.shape[self.dim])

    def box(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offsets, shape) of what a rank holds within the full parameter, without padding."""
        offsets, shape = [0] * len(self.shape), list(self.shape)
        if self.dim is not None:
            first, last = self.span(rank)
            offsets[self.dim], shape[self.dim] = first, last - first
        return tuple(offsets), tuple(shape)

    def slice(self, full: Tensor, rank: int) -> Tensor:
        """A rank's part of the full tensor, a contiguous copy, zero where it is padded."""
        if self.dim is None:
            return full.clone(memory_format=torch.contiguous_format)
        first, last = self.span(rank)
        local = full.new_zeros(self.local_shape)
        local.narrow(self.dim, 0, last - first).copy_(full.narrow(self.dim, first, last - first))
        return local

    def assemble(self, parts: Tensor) -> Tensor:
        """What all ranks hold, stacked (ranks, *local_shape) -> the full tensor; of copies the first counts."""
        if self.dim is None:
            return parts[0]
        dim = self.dim
        return torch.cat(list(parts[:: self.copies]), dim=dim).narrow(dim, 0, self.shape[dim]).contiguous()


def place(shape: tuple[int, ...], ranks: int, dim: int | None, parts: int, partial: bool, name: str) -> Placement:
    """A Placement that leaves every rank something; UserError where a rank would hold padding alone."""
    if dim is None or parts == 1:
        return Placement(shape, ranks, partial=partial)
    placement = Placement(shape, ranks, dim, parts, partial and parts < ranks)
    if (parts - 1) * placement.length >= shape[dim]:
        raise UserError(
            f"parallel.tp={ranks} leaves a rank nothing of {name}, which has {shape[dim]} rows; "
            f"use parallel.tp of at most {max_parts(shape[dim], ranks)}"
        )
    return placement


def max_parts(length: int, below: int) -> int:
    """The largest number of parts under `below` of which none is empty."""
    fits = [parts for parts in range(1, below) if (parts - 1) * math.ceil(length / parts) < length]
    return max(fits, default=1)
