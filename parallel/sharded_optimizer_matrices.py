"""Whole matrices from shards, for an update that needs them (Muon's orthogonalisation), each rank doing its share.

Every matrix has one rank that transforms it. Ranks send that rank their parts and get the parts of the result back: two
all-to-alls of bfloat16 a step, in which a rank sends and receives 2/P of the matrices' elements each way, and no matrix
is transformed twice. The iteration rounds its input to bfloat16 first, so sending that loses nothing: the result equals
the single-device update bit for bit where the matrix products do.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parallel.collectives import all_to_all
from parallel.mesh import Mesh
from parallel.sharded_optimizer_shards import Shard

TRANSFER = torch.bfloat16


def iteration_cost(shape: tuple[int, ...]) -> int:
    """Multiplications of one Newton-Schulz iteration on (..., rows, columns), up to a factor."""
    short, long = sorted(shape[-2:])
    return math.prod(shape[:-2]) * (2 * short * short * long + short**3)


def share_out(costs: list[int], ranks: int) -> list[int]:
    """A rank for each item: the dearest first, each to the rank that has least so far (at most 4/3 of the best)."""
    loads, owners = [0] * ranks, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        rank = loads.index(min(loads))
        owners[index] = rank
        loads[rank] += costs[index]
    return owners


def holds_whole_matrices(shard: Shard) -> bool:
    """Whether every rank's part is a number of whole matrices, as for experts (E, F, C) sharded by rows of E."""
    return all(start % math.prod(shard.shape[-2:]) == 0 for start in shard.starts)


class ShardedMatrices:
    """The seam of a Muon group over shards: `shape_of` and `transform` as llm/optimizer_muon asks for them."""

    def __init__(self, shards: list[Shard], mesh: Mesh, axis: str):
        self.mesh, self.axis, self.rank = mesh, axis, mesh.rank_in(axis)
        self.whole = [shard for shard in shards if holds_whole_matrices(shard)]
        self.cut = [shard for shard in shards if not holds_whole_matrices(shard)]
        self.owners = share_out([iteration_cost(shard.shape) for shard in self.cut], mesh.size(axis))
        self.shapes = {shard.local: torch.Size(shard.shape) for shard in shards}

    def shape_of(self, param: Tensor) -> torch.Size:
        """The full shape, on which the rate depends."""
        return self.shapes[param]

    def transform(
        self, params: list[Tensor], tensors: list[Tensor], function: Callable[[list[Tensor]], list[Tensor]]
    ) -> list[Tensor]:
        """function of the full matrices of which `tensors` are the parts held here, as parts again, in their order.

        `params` are the shards that have a gradient. Every rank of the axis must call it, also one that holds nothing.
        """
        parts = dict(zip(params, tensors, strict=True))
        whole = [shard for shard in self.whole if shard.local in parts]
        stacks = [parts[shard.local].reshape(-1, *shard.shape[-2:]) for shard in whole]
        cut = [(shard, owner) for shard, owner in zip(self.cut, self.owners, strict=True) if shard.has_gradient]
        cut.sort(key=lambda entry: entry[1])  # by owner, so that what goes to one rank lies together
        full = self.collect(cut, parts)
        mine = [shard for shard, owner in cut if owner == self.rank]
        results = self.across([*whole, *mine], stacks + full, function)
        done = {shard.local: part.reshape(-1) for shard, part in zip(whole, results, strict=False)}
        done |= self.hand_back(cut, results[len(stacks) :], tensors[0].device if tensors else self.mesh.device)
        return [done[param].view(param.shape) for param in params]

    def across(
        self, shards: list[Shard], matrices: list[Tensor], function: Callable[[list[Tensor]], list[Tensor]]
    ) -> list[Tensor]:
        """function of what is whole along this axis; a strategy that cuts matrices along another one collects here."""
        return function(matrices)

    def counts(self, cut: list[tuple[Shard, int]]) -> tuple[list[int], list[int]]:
        """Elements that this rank has for every owner, and elements that every rank has for this one."""
        ranks = range(self.mesh.size(self.axis))
        to_owner = [sum(length(s, self.rank) for s, owner in cut if owner == rank) for rank in ranks]
        from_rank = [sum(length(s, rank) for s, owner in cut if owner == self.rank) for rank in ranks]
        return to_owner, from_rank

    def collect(self, cut: list[tuple[Shard, int]], parts: dict[Tensor, Tensor]) -> list[Tensor]:
        """The full matrices that are this rank's to transform."""
        sent = [parts[shard.local].reshape(-1).to(TRANSFER) for shard, _ in cut if shard.local in parts]
        sent = torch.cat(sent) if sent else torch.empty(0, dtype=TRANSFER, device=self.mesh.device)
        to_owner, from_rank = self.counts(cut)
        received = self.exchange(sent, to_owner, from_rank).split(from_rank)
        mine = [shard for shard, owner in cut if owner == self.rank]
        by_rank = [
            block.split([length(shard, rank) for shard in mine]) if mine else () for rank, block in enumerate(received)
        ]
        return [torch.cat([blocks[i] for blocks in by_rank]).view(shard.shape) for i, shard in enumerate(mine)]

    def hand_back(
        self, cut: list[tuple[Shard, int]], results: list[Tensor], device: torch.device
    ) -> dict[Tensor, Tensor]:
        """The parts held here of every transformed matrix, by shard."""
        mine = [shard for shard, owner in cut if owner == self.rank]
        flat = [result.reshape(-1).to(TRANSFER) for result in results]
        sent = [
            values[shard.starts[rank] : shard.starts[rank + 1]]
            for rank in range(self.mesh.size(self.axis))
            for shard, values in zip(mine, flat, strict=True)
        ]
        sent = torch.cat(sent) if sent else torch.empty(0, dtype=TRANSFER, device=device)
        to_owner, from_rank = self.counts(cut)
        received = self.exchange(sent, from_rank, to_owner)
        lengths = [length(shard, self.rank) for shard, _ in cut]
        pieces = received.split(lengths) if cut else ()
        return {shard.local: piece for (shard, _), piece in zip(cut, pieces, strict=True)}

    def exchange(self, sent: Tensor, send: list[int], receive: list[int]) -> Tensor:
        return all_to_all(sent, self.mesh, self.axis, send, receive)


def length(shard: Shard, rank: int) -> int:
    """How many elements of it a rank holds."""
    return shard.starts[rank + 1] - shard.starts[rank]


def share_matrices(optimizer: Any, shards: list[Shard], mesh: Mesh, axis: str) -> None:
    """Give every group that works on whole matrices (it has "ns_steps") its seam to them; before `use_shards`."""
    by_name = {shard.name: shard for shard in shards}
    for group in optimizer.param_groups:
        if "ns_steps" in group:
            held = [by_name[name] for name in group["param_names"] if name in by_name]
            group["matrices"] = ShardedMatrices(held, mesh, axis)
