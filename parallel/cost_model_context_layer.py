"""One layer's attention under context parallelism: memory traffic of a ring's sums, and the peak of what a rank holds.

Kernels go on from a rank's float32 out and add to float32 gradients, so of the traffic that cutting adds most runs
beside products (`hidden`); what is left are passes of their own (`passes`): delta of the second chunk's rows, whose
blocks take it apart, and roundings at the end. Memory is counted from the tensors that are alive at once, in the order
of parallel/context_parallel and context_parallel_exchange, one sequence a rank; q, k, v and dout count, since a layer
has them. Elements are bfloat16 and sums float32 unless said otherwise.
"""

from dataclasses import dataclass

from parallel.cost_model_context import ContextShape
from parallel.cost_model_traffic import ITEM_BYTES

FP32 = 4


@dataclass(frozen=True)
class SumsTraffic:
    """Bytes to and from memory of one rank and layer that one kernel for the whole sequence would not move."""

    hidden: float
    passes: float


def blocks_of_a_row(ranks: int) -> float:
    """Blocks that a rank's row takes part in, on average over rows and ranks; of keys it is as many.

    All of its rows in its own and in those of earlier ranks, half of them in those of later ranks.
    """
    return 1 + 0.75 * (ranks - 1)


def forward_traffic(ranks: int, rows: int, width: int, item_bytes: int = 2) -> SumsTraffic:
    """`rows` x `width` of out: written by each block, read by all but the first, rounded at the end."""
    if ranks == 1:
        return SumsTraffic(0.0, 0.0)
    touched = 2 * blocks_of_a_row(ranks) - 1
    return SumsTraffic(rows * width * (FP32 * touched - item_bytes), rows * width * (FP32 + item_bytes))


def backward_traffic(ranks: int, rows: int, width: int, kv_width: int, item_bytes: int = 2) -> SumsTraffic:
    """dQ of `rows` x `width`, dK and dV of `rows` x `kv_width` each, likewise; delta again for half of the rows."""
    if ranks == 1:
        return SumsTraffic(0.0, 0.0)
    elements, touched = rows * (width + 2 * kv_width), 2 * blocks_of_a_row(ranks) - 1
    delta = rows * width * item_bytes * (ranks - 1) / ranks  # out and dout of a second chunk; the last rank has none
    return SumsTraffic(elements * (FP32 * touched - item_bytes), elements * (FP32 + item_bytes) + delta)


def layer_peak_bytes(shape: ContextShape, tokens: int) -> float:
    """Peak bytes of one layer's attention, forward and backward, of a rank with `tokens` tokens; no ranks: alone."""
    item, sums = ITEM_BYTES[shape.dtype], ITEM_BYTES[shape.sum_dtype]
    queries = float(tokens * shape.heads * shape.head_dim)  # elements of q, out, dout or dq
    keys = 2.0 * tokens * shape.kv_heads * shape.head_dim  # of k and v together
    rows = tokens * shape.heads * FP32  # bytes of lse, of delta, and of lse as backward reads it
    inputs = item * (2 * queries + keys)
    if shape.ranks == 1:
        return inputs + item * (2 * queries + keys) + 3 * rows
    if shape.mode == "ring":
        kept = inputs + item * queries + sums * queries + (1 + 2 * 1.5) * rows  # and out, lse, delta, the sums of dq
        moving = 2 * sums * keys  # the sums of dk and dv, sent and arriving
        between, ending = 2 * item * keys, item * keys + item * queries  # keys sent and arriving; keys, dq rounded
        return kept + moving + max(between, ending)
    if shape.mode == "all_gather":
        gathered = item * shape.ranks * keys
        after_kernel = inputs + 2 * item * queries + 2 * gathered + 3 * rows
        # The gradients of gathered keys: put back into the ranks' order, then in float32 beside their sums.
        reordered = inputs + 2 * item * queries + 3 * gathered
        summed = inputs + 2 * item * queries + gathered + sums * (shape.ranks + 1) * keys
        return max(after_kernel, reordered, summed)
    spread = max(1.0, shape.ranks / shape.kv_heads)
    traded = item * (queries + spread * keys)  # q, k, v of all tokens and some heads
    return inputs + 2 * traded + 4 * item * queries + 3 * rows  # their gradients; out and dout before and after
