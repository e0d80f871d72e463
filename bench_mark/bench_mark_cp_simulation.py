"""A ring of P ranks played on one device: every rank's blocks in turn, with the keys that would have arrived.

The blocks, masks, merging and sums are those of parallel/context_parallel; what is left out is sending. So its time
over that of one kernel for the whole sequence is what cutting the sequence costs, before any communication.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llm.parallelize_context_blocks import block_attention, prepare_block
from parallel.context_parallel import empty_results
from parallel.context_parallel_blocks import BlockAttention, Joined, Rows, Sums, wide
from parallel.context_parallel_layout import Intervals, RingBlock, ring_blocks, sequence_order, zigzag_columns


@dataclass(frozen=True)
class SimulatedRing:
    """The ranks' columns, and of each rank its blocks and their masks."""

    columns: list[Tensor]
    blocks: list[list[RingBlock]]
    masks: list[list[Any]]
    attention: BlockAttention

    def forward(self, q: list[Tensor], k: list[Tensor], v: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """out and lse of each rank, from each rank's q, k and v (B, T/P, heads, D)."""
        results = []
        for rank, blocks in enumerate(self.blocks):
            out, lse = empty_results(q[rank])
            for step, (block, mask) in enumerate(zip(blocks, self.masks[rank], strict=True)):
                keys = k[block.source][:, block.keys], v[block.source][:, block.keys]
                joined = Joined(out, lse, step == 0)[block.queries]
                self.attention.forward(q[rank][:, block.queries], *keys, mask, joined)
            results.append((out.to(q[rank].dtype), lse))
        return results

    def backward(
        self, q: list[Tensor], k: list[Tensor], v: list[Tensor], rows: list[Rows]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """dq, dk and dv of each rank."""
        dq, dk, dv = ([torch.empty(x.shape, dtype=wide(x.dtype), device=x.device) for x in part] for part in (q, k, v))
        for rank, blocks in enumerate(self.blocks):
            prepared: dict[int, Any] = {}
            for step, (block, mask) in enumerate(zip(blocks, self.masks[rank], strict=True)):
                source, queries = block.source, block.queries
                keys = k[source][:, block.keys], v[source][:, block.keys]
                if queries.start not in prepared:
                    prepared[queries.start] = self.attention.prepare_rows(rows[rank][queries])
                key_sums = Sums((dk[source][:, block.keys], dv[source][:, block.keys]), rank == 0)
                self.attention.backward(
                    q[rank][:, queries], *keys, prepared[queries.start], mask, Sums((dq[rank][:, queries],), step == 0),
                    lambda sums=key_sums: sums,
                )  # fmt: skip
        return tuple([x.to(q[0].dtype) for x in sums] for sums in (dq, dk, dv))

    def cut(self, x: Tensor) -> list[Tensor]:
        """(B, T, ...) -> each rank's share."""
        return [x[:, columns].contiguous() for columns in self.columns]

    def join(self, shares: list[Tensor], dim: int = 1) -> Tensor:
        """Each rank's share -> (B, T, ...), or (B, H, T) with dim=2."""
        order = sequence_order(sum(share.shape[dim] for share in shares), len(shares)).to(shares[0].device)
        return torch.cat(shares, dim).index_select(dim, order)


def simulated_ring(
    num_tokens: int, ranks: int, backend: str, device: torch.device, intervals: Intervals | None = None
) -> SimulatedRing:
    """A ring over a causal sequence, or over packed documents with `intervals` (B, T) of the whole sequence."""
    columns = [zigzag_columns(num_tokens, ranks, rank).to(device) for rank in range(ranks)]
    blocks = []
    for rank in range(ranks):
        own = None if intervals is None else tuple(ends[:, columns[rank]] for ends in intervals)
        blocks.append(ring_blocks(num_tokens // ranks, ranks, rank, own))
    masks = [[prepare_block(backend, block.mask, device) for block in of_rank] for of_rank in blocks]
    return SimulatedRing(columns, blocks, masks, block_attention(backend))
