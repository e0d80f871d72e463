"""ZeRO-1's updated parameters on their way to all ranks while the next forward pass goes on (as FSDP gathers them).

A gather that a step waits for at its end is exposed but for the updates beside it. Here each unit (a block) waits for
the buckets of its own parameters, before it runs: what stands before the first unit is waited for by the model, what
stands after the last by the last. Whoever reads parameters outside of a forward pass calls `wait`.
"""

from collections.abc import Iterable

import torch
from torch import nn

from parallel.collectives_pending import Pending, wait_all
from parallel.sharded_optimizer_buckets import Bucket


class Arrivals:
    """Gathers under way, by bucket; without units nothing is ever late."""

    def __init__(self, model: nn.Module, units: Iterable[nn.Module], buckets: list[Bucket]):
        self.pending: dict[int, Pending] = {}  # by the bucket's place, in the order in which they were started
        self.place = {id(bucket): index for index, bucket in enumerate(buckets)}
        units = list(units)
        self.may_be_late = bool(units)
        if not units:
            return
        buckets_of = {id(param): index for index, bucket in enumerate(buckets) for param in bucket.params}
        needs = [{buckets_of[id(p)] for p in unit.parameters() if id(p) in buckets_of} for unit in units]
        first, last = self.outside(model, units, buckets_of)
        needs[-1] |= last
        opaque = torch.compiler.disable  # a block compiles with a break there
        for module, needed in [(model, first), *zip(units, needs, strict=True)]:
            module.register_forward_pre_hook(opaque(lambda module, args, needed=frozenset(needed): self.wait(needed)))

    @staticmethod
    def outside(model: nn.Module, units: list[nn.Module], buckets_of: dict[int, int]) -> tuple[set[int], set[int]]:
        """Buckets of the parameters that lie in no unit: those registered before the first one's, and the others."""
        inside = {id(param) for unit in units for param in unit.parameters()}
        first: set[int] = set()
        last: set[int] = set()
        seen_units = False
        for param in model.parameters():
            if id(param) in inside:
                seen_units = True
            elif id(param) in buckets_of:
                (last if seen_units else first).add(buckets_of[id(param)])
        return first, last

    def expect(self, bucket: Bucket, pending: Pending) -> None:
        self.pending[self.place[id(bucket)]] = pending

    def wait(self, needed: frozenset[int] | None = None) -> None:
        """From here on the current stream may read the parameters of these buckets; None: of all."""
        arriving = [index for index in self.pending if needed is None or index in needed]
        wait_all([self.pending.pop(index) for index in arriving])
