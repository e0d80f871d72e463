"""ZeRO-1's buckets where the ranks of one host read each other's memory (collectives_peer).

Parameters lie there, so that a gather copies the updated shares from rank to rank; for gradients two slots of the
largest bucket's size take turns, as two transfers are under way at most.
"""

import torch
from torch import Tensor

from parallel.collectives_peer import (
    PeerBuffer,
    PeerMemory,
    peer_bytes,
    start_peer_all_gather,
    start_peer_reduce_scatter,
)
from parallel.collectives_pending import Pending
from parallel.mesh import Mesh
from parallel.sharded_optimizer_buckets import BucketPlan

SLOTS = 2


class PeerBuckets:
    """The memory of all buckets; `reduce_dtype` None sums gradients in the parameters' dtype."""

    def __init__(self, plans: list[BucketPlan], reduce_dtype: torch.dtype | None, mesh: Mesh, axis: str):
        self.turn = 0
        sizes = [(plan.numel, plan.dtype) for plan in plans]
        largest = max((peer_bytes([(plan.numel, reduce_dtype or plan.dtype)]) for plan in plans), default=0)
        # Gathers and reductions may be under way at once, on streams of their own: ranks meet in two places.
        self.parameter_memory = PeerMemory(peer_bytes(sizes), mesh, axis)
        self.slot_memory = PeerMemory(SLOTS * largest, mesh, axis)
        taken = [self.parameter_memory.take(*size).use_equal_shares() for size in sizes]
        self.by_plan = {plan.names: buffer for plan, buffer in zip(plans, taken, strict=True)}
        slots = [self.slot_memory.take(largest, torch.uint8) for _ in range(SLOTS)]
        self.slots = [  # each slot as every bucket sees it
            {plan.names: slot.part(plan.numel, reduce_dtype or plan.dtype).use_equal_shares() for plan in plans}
            for slot in slots
        ]
        self.sent: PeerBuffer | None = None

    def parameters(self, plan: BucketPlan) -> Tensor:
        """Where a bucket's parameters lie, (numel,)."""
        return self.by_plan[plan.names].tensor

    def gradients(self, plan: BucketPlan) -> Tensor:
        """Where a bucket's gradients go next, (numel,) in the dtype of the reduction; two calls later again."""
        self.sent = self.slots[self.turn][plan.names]
        self.turn = (self.turn + 1) % SLOTS
        return self.sent.tensor

    def start_reduce_scatter(self) -> Pending:
        """Begin the sum of what `gradients` gave last; wait() returns this rank's share of it."""
        return start_peer_reduce_scatter(self.sent, stream="reduce")

    def start_all_gather(self, plan: BucketPlan) -> Pending:
        """Begin to fill a bucket's parameters from the ranks that updated them."""
        return start_peer_all_gather(self.by_plan[plan.names], stream="gather")
