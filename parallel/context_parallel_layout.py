"""Which tokens of a sequence a rank holds, and which keys its queries see in each block of a ring: plain indices.

Zig-zag (as in Llama 3, Dubey et al. 2024, section 3.3.2): the sequence is cut into 2 P chunks of n tokens, of which
rank r holds chunks r and 2 P - 1 - r. Under a causal mask every rank then has the same work. Both
chunks lie in order, so an interval of keys of the whole sequence is an interval of any rank's keys too, and each block
of a ring needs no other notion of a mask than the kernels have:

    keys of an earlier rank    all queries see its first chunk, none its second
    own keys                   causal
    keys of a later rank       only the second chunk of queries sees them, and both chunks
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MODES = ("ring", "all_gather", "ulysses")  # parallel.cp_mode
Intervals = tuple[Tensor, Tensor]  # key_lo, key_hi, each (B or 1, T) int32: a query sees key_lo <= j < key_hi


@dataclass(frozen=True)
class BlockMask:
    """Which of `num_keys` keys each of `num_queries` queries sees: "full", "causal", or within `intervals`."""

    kind: str
    num_queries: int
    num_keys: int
    intervals: Intervals | None = None


@dataclass(frozen=True)
class RingBlock:
    """One block of a ring: these of the rank's queries against these keys of the rank `source` steps before it."""

    source: int
    queries: slice
    keys: slice
    mask: BlockMask


def padded_length(num_tokens: int, multiple: int) -> int:
    """The next multiple, to which a sequence is padded at its end."""
    return -(-num_tokens // multiple) * multiple


def zigzag_columns(num_tokens: int, ranks: int, rank: int) -> Tensor:
    """The columns (T / P,) int64 of a sequence that a rank holds: chunks `rank` and 2 P - 1 - `rank` of 2 P."""
    assert num_tokens % (2 * ranks) == 0, f"{num_tokens} tokens in 2 x {ranks} chunks"
    return torch.arange(num_tokens).view(2 * ranks, -1)[[rank, 2 * ranks - 1 - rank]].flatten()


def contiguous_columns(num_tokens: int, ranks: int, rank: int) -> Tensor:
    """The columns (T / P,) int64 of the rank's equal share in order, where no work depends on the place (Ulysses)."""
    assert num_tokens % ranks == 0, f"{num_tokens} tokens over {ranks} ranks"
    return torch.arange(num_tokens).view(ranks, -1)[rank]


def sequence_order(num_tokens: int, ranks: int) -> Tensor:
    """(T,) int64: where each token of the sequence lies in the ranks' zig-zag shares laid end to end."""
    return torch.argsort(torch.cat([zigzag_columns(num_tokens, ranks, rank) for rank in range(ranks)]))


def local_intervals(intervals: Intervals, chunk: int, ranks: int, source: int) -> Intervals:
    """Intervals of the whole sequence's keys as intervals of the keys that rank `source` holds, chunks of `chunk`."""
    firsts = (source * chunk, (2 * ranks - 1 - source) * chunk)

    def count_before(ends: Tensor) -> Tensor:
        return sum((ends - first).clamp(0, chunk) for first in firsts).int()

    return count_before(intervals[0]), count_before(intervals[1])


def ring_blocks(num_local: int, ranks: int, rank: int, intervals: Intervals | None = None) -> list[RingBlock]:
    """The blocks of a rank in the order in which keys arrive: its own, then those of the rank before it, and so on.

    `intervals` are those of the rank's queries over the whole sequence (packed documents), within the causal mask;
    None is plain causal.
    """
    return [ring_block(num_local // 2, ranks, rank, (rank - step) % ranks, intervals) for step in range(ranks)]


def ring_block(chunk: int, ranks: int, rank: int, source: int, intervals: Intervals | None) -> RingBlock:
    queries = slice(chunk if source > rank else 0, 2 * chunk)
    keys = slice(0, chunk if source < rank else 2 * chunk)
    shape = (queries.stop - queries.start, keys.stop)
    if intervals is None:
        return RingBlock(source, queries, keys, BlockMask("causal" if source == rank else "full", *shape))
    key_lo, key_hi = (ends[:, queries] for ends in local_intervals(intervals, chunk, ranks, source))
    return RingBlock(source, queries, keys, BlockMask("intervals", *shape, (key_lo.contiguous(), key_hi.contiguous())))
