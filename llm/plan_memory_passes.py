"""What a pipeline rank holds during each pass besides what always lives, by data strategy.

`during(op, size)` is asked before `end(op)`, for each operation of the rank's row in order; `size` is what the pass
keeps and needs of activations, of which the passes before hold theirs. Whole parameters (DDP, ZeRO-1) are a part of
what always lives, and all their gradients are there from the first backward pass on. ZeRO-2 and 3 gather blocks for the
step or for a pass, and hold gradients in full until a stage's last pass, or their shards alone.
"""

from dataclasses import dataclass

from parallel.cost_model_memory import RankState, full_bytes, slot_bytes
from parallel.cost_model_pipeline_fsdp import makes_gradients, units_of
from parallel.cost_model_traffic import ITEM_BYTES, DataLayout, Param, gathered_dtype, gradient_share
from parallel.pipeline_schedules import FORWARD, INPUT, WEIGHT, Operation


@dataclass(frozen=True)
class StageBytes:
    """What one micro-batch leaves behind on a stage, and what its passes need besides."""

    blocks: int
    of_block: int  # kept from forward to backward by each block,
    after: int  # and by the head, logits included, or of a boundary
    factors: int  # from zero-bubble's I to W
    forward: int  # beside `kept`, at most, while forward runs
    logits: int  # their gradient, while backward begins
    widest: int  # in a block's backward, what is computed again included, gradients of parameters left out
    boundary: int  # of the tensor that crosses to a neighbour

    @property
    def kept(self) -> int:
        return self.blocks * self.of_block + self.after

    @property
    def backward(self) -> int:
        """Beside `kept`, at most, while backward runs."""
        return max(self.logits, self.widest) + self.boundary


class WholePasses:
    """Beside whole parameters: their gradients."""

    def __init__(self, params: list[Param], copied: int):
        """`copied`: bytes of a tied table's copy, which has a gradient too."""
        self.gradients = sum(param.nbytes for param in params if param.trainable) + copied
        self.largest = max((param.nbytes for param in params if param.in_block), default=0)
        self.there = 0

    def during(self, op: Operation, size: StageBytes) -> int:
        if op.kind == FORWARD:
            return self.there + size.kept + size.forward
        self.there = self.gradients if op.kind != INPUT or self.there else self.there
        # The largest: a gradient before it is added.
        return self.there + self.largest + (size.backward if op.kind != WEIGHT else 0)

    def end(self, op: Operation) -> None:
        pass

    def at_the_end(self, state: RankState) -> int:
        """While gradients are summed over the data ranks."""
        return self.gradients + state.in_flight_last


@dataclass(frozen=True)
class UnitBytes:
    """Of one unit: gathered, on its way, its gradients as backward makes them, and all of them in one message."""

    full: int
    message: int
    gradients: int
    summed: int

    @staticmethod
    def of(unit: list[Param], layout: DataLayout) -> "UnitBytes":
        made = sum(p.numel * ITEM_BYTES[gathered_dtype(p, layout)] for p in unit if p.trainable)
        master = max((ITEM_BYTES[param.dtype] for param in unit), default=0)
        message = slot_bytes(unit, layout) * layout.shard
        return UnitBytes(full_bytes(unit, layout), message, made, gradient_share(unit, layout) * layout.shard * master)


class ShardedPasses:
    """Beside shards: gathered parameters, and gradients in full or their shards."""

    def __init__(
        self, params: list[Param], layout: DataLayout, row: tuple[Operation, ...], stages: dict[int, range], copied: int
    ):
        """`stages`: the pieces of each; `copied` as in WholePasses."""
        self.layout, self.copied = layout, copied
        self.blocks = {
            stage: [UnitBytes.of(unit, layout) for unit in units_of(params, part)] for stage, part in stages.items()
        }
        root = [param for param in params if not param.in_block]
        self.root = UnitBytes.of(root, layout)
        self.with_root = {stage for stage, part in stages.items() if any(p.stage in part for p in root)}
        self.last_needs = {op.stage: op for op in row if op.kind != WEIGHT}
        self.last_makes = {op.stage: op for op in row if makes_gradients(op)}
        self.gathered: set[int] = set()  # stages whose blocks are there, under ZeRO-2
        self.waiting: dict[int, int] = {}  # by stage: gradients that wait in full, or shards of them
        self.of_root = 0  # the same of what is in no block, and of a table's copy
        self.in_flight = 0  # the last message of the pass before

    def during(self, op: Operation, size: StageBytes) -> int:
        """The moment at which most is held."""
        units = self.blocks[op.stage]
        held = self.root.full + sum(self.waiting.values()) + self.of_root
        if self.layout.zero == 2:
            self.gathered.add(op.stage)
            held += sum(unit.full for stage in self.gathered for unit in self.blocks[stage])
        if op.kind == WEIGHT:
            return held + max(self.in_flight, most(units, "gradients") + self.message(op) - size.factors)
        if op.kind == FORWARD:
            return held + self.in_flight + self.gathers(units, 1) + size.kept + size.forward
        return held + max(self.moments_of_backward(op, size))

    def moments_of_backward(self, op: Operation, size: StageBytes) -> list[int]:
        """When it begins; when its first and its last block is at its widest, and when their gradients are taken."""
        units = self.blocks[op.stage]
        begins = self.in_flight + self.gathers(units, 1) + size.logits + size.boundary
        if not units:
            return [begins + self.made_by_root(op)]
        made = most(units, "gradients", 1) if op.kind != INPUT else 0
        widest = self.gathers(units, 2) + made + size.widest + size.boundary - size.after + self.made_by_root(op)
        taken = widest - size.widest + self.message(op)
        goes = size.of_block  # of activations, with each block
        goes -= size.factors // len(units) if op.kind == INPUT else 0
        sums = 0 if op.stage in self.waiting or op.kind == INPUT else most(units, "summed", len(units) - 1)
        sums //= self.layout.shard if self.layout.reduce_each_micro_batch else 1
        rest = (len(units) - 1) * goes
        return [begins, self.in_flight + widest, taken - goes, widest - rest + sums, taken - rest - goes + sums]

    def gathers(self, units: list[UnitBytes], count: int) -> int:
        """ZeRO-3's gathered blocks, `count` at once, and the message of one more if there is one."""
        if self.layout.zero == 2:
            return 0
        more = len(units) > count or len(self.blocks) > 1
        return most(units, "full", count) + (most(units, "message", 1) if more else 0)

    def message(self, op: Operation) -> int:
        """What a block's gradients are copied into: a message, or at first the sums that wait; not in I."""
        sent = self.layout.reduce_each_micro_batch or op.stage not in self.waiting
        return most(self.blocks[op.stage], "summed", 1) if sent and op.kind != INPUT else 0

    def made_by_root(self, op: Operation) -> int:
        """Gradients of what is in no block while the blocks' backward goes on: of the head, and of a table's copy."""
        if op.stage not in self.with_root or op.stage == 0:  # an embedding's comes last
            return 0
        return self.root.gradients + (0 if self.of_root else self.copied)

    def end(self, op: Operation) -> None:
        if op == self.last_needs[op.stage]:
            self.gathered.discard(op.stage)
        if not makes_gradients(op):
            return
        units, each = self.blocks[op.stage], self.layout.reduce_each_micro_batch
        reduced = each or op == self.last_makes[op.stage]
        whole = most(units, "summed")
        self.waiting[op.stage] = whole // self.layout.shard if reduced else whole
        if reduced:
            self.in_flight = most(units, "summed", 1)
        if op.stage in self.with_root:
            whole = self.root.summed
            self.of_root = self.copied + (whole // self.layout.shard if each else whole)
            self.in_flight = whole if each else self.in_flight

    def at_the_end(self, state: RankState) -> int:
        """While the root's gradients, the last ones, are sent."""
        return state.gradients + self.root.full + self.root.gradients + self.root.summed + self.copied


def most(units: list[UnitBytes], what: str, count: int | None = None) -> int:
    """The sum of the largest few, or of all."""
    return sum(sorted((getattr(unit, what) for unit in units), reverse=True)[:count])
