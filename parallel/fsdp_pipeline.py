"""ZeRO-2 and ZeRO-3 on a pipeline rank, whose passes are those of several micro-batches and stages in turn.

The runner says which pass begins and ends (pipeline_parallel.Keeper), and the table of the schedule says what follows
it, so a block is gathered one ahead across passes too: while a pass's last block computes, the first one of the next
pass is on its way, and stays where it is the same. ZeRO-3 gathers a stage's blocks for each pass, ZeRO-2 once a step,
from a stage's first forward pass to its last backward pass, as TorchTitan does under a pipeline. Parameters in no block
stay for the step, since a stage's passes follow each other closely, and a tied table's second gradient comes last.

A weight gradient that zero-bubble puts aside needs no parameters. Gradients of a stage are whole when its last B or W
is over: they are reduced then, or after each B or W if settings.reduce_each_micro_batch is true.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from parallel.fsdp import Fsdp, FsdpSettings
from parallel.fsdp_units import FsdpUnit
from parallel.pipeline_schedules import BACKWARD, FORWARD, INPUT, WEIGHT, Operation


@dataclass(frozen=True)
class StageUnits:
    """What the stages of a rank run."""

    blocks: dict[int, tuple[int, ...]]  # of each stage: places among the units
    with_root: frozenset[int]  # stages that use what is in no block
    are_split: bool = False  # some weight gradients are made after backward, by W or at the end of B


class Place(NamedTuple):
    """An operation's place in a step."""

    following: Operation | None  # the next one that needs parameters
    is_last: bool  # of its kind on its stage: B and I are the last to need parameters, B and W to make gradients


def places_of(operations: Iterable[Operation]) -> dict[Operation, Place]:
    """Of each operation of a rank, in the order in which they run."""
    places: dict[Operation, Place] = {}
    following: Operation | None = None
    seen: set[tuple[str, int]] = set()
    for op in reversed(tuple(operations)):
        places[op] = Place(following, (op.kind, op.stage) not in seen)
        seen.add((op.kind, op.stage))
        following = following if op.kind == WEIGHT else op
    return places


class PipelinedFsdp(Fsdp):
    """Fsdp whose micro-batches are told apart by `begin_pass` and `end_pass`; after the last one `finish_gradients`."""

    def __init__(
        self, model: nn.Module, units: list[FsdpUnit], modules: list[nn.Module], settings: FsdpSettings,
        stages: StageUnits,
    ):  # fmt: skip
        super().__init__(model, units, modules, settings)
        self.stages = stages
        self.known: dict[tuple[Operation, ...], dict[Operation, Place]] = {}
        self.places: dict[Operation, Place] = {}
        self.op: Operation | None = None  # the pass under way
        self.order: tuple[FsdpUnit, ...] = ()  # in which it uses its units
        self.ahead: FsdpUnit | None = None  # with which the pass that follows it begins

    def begin_micro_batch(self, last: bool) -> None:
        """Before a step (`last` false) what is in no block is gathered, for a tied table is asked for; else nothing."""
        if not last and self.root is not None:
            self.root.finish_gather()

    def begin_passes(self, operations: tuple[Operation, ...]) -> None:
        """To be called before a step's first pass with all operations of this rank, or with none for forward alone."""
        if operations not in self.known:
            self.known[operations] = places_of(operations)
        self.places = self.known[operations]
        self.is_open = bool(operations)

    def begin_pass(self, op: Operation) -> None:
        """Begin to gather what a pass needs."""
        following, self.is_last = self.places.get(op, Place(None, False))
        self.op = op
        if op.kind == WEIGHT:
            return
        self.order = self.order_of(op)
        self.ahead = next(iter(self.order_of(following)), None) if following is not None else None
        for unit in self.order:
            unit.ready, unit.is_reduced = 0, False
        if self.root is not None and op.stage in self.stages.with_root:
            self.root.start_gather()
        first = self.order[0] if self.order else self.ahead
        if first is not None:
            first.start_gather()

    def order_of(self, op: Operation) -> tuple[FsdpUnit, ...]:
        return self.units_of(op.stage) if op.kind == FORWARD else self.units_of(op.stage)[::-1]

    def units_of(self, stage: int) -> tuple[FsdpUnit, ...]:
        return tuple(self.units[index] for index in self.stages.blocks[stage])

    def open_root(self) -> None:
        if self.root is not None and self.op is not None and self.op.stage in self.stages.with_root:
            self.root.finish_gather()

    def gather_ahead(self, index: int) -> None:
        """The unit after the one that computes: the neighbour in the same pass, or the next pass's first."""
        neighbour = self.units[index] if 0 <= index < len(self.units) else None
        wanted = neighbour if neighbour in self.order else self.ahead
        if wanted is not None:
            wanted.start_gather()

    def is_needed_next(self, unit: FsdpUnit) -> bool:
        """After its part in this pass: it is the last one, and the pass that follows begins with it."""
        return unit is self.ahead and unit is self.order[-1]

    def gradient_is_there(self, unit: FsdpUnit, param: nn.Parameter) -> None:
        """Where backward makes all gradients of a block they go as soon as they are there, else at the pass's end."""
        if self.takes_at_once and unit is not self.root:
            super().gradient_is_there(unit, param)

    @property
    def takes_at_once(self) -> bool:
        return self.op.kind == BACKWARD and not self.stages.are_split

    def end_backward(self, unit: FsdpUnit) -> None:
        unit.in_backward, unit.is_reduced = False, True
        if self.takes_at_once:
            self.take_gradients(unit)
        if self.is_last or not (self.keeps or self.is_needed_next(unit)):
            unit.reshard()

    def end_pass(self, op: Operation) -> None:
        """End a pass's units, all of whose gradients there are have been made."""
        if op.kind == FORWARD:
            return
        units = self.units_of(op.stage)[::-1]
        for unit in units:
            if op.kind != WEIGHT and not unit.is_reduced:
                self.end_backward(unit)
        if op.kind == INPUT:
            return
        for unit in () if self.takes_at_once else units:
            self.take_gradients(unit)
        if self.root is not None and op.stage in self.stages.with_root and not self.is_last:
            self.take_gradients(self.root)  # the last ones wait for a tied table's from the other end

    def close_micro_batch(self) -> None:
        """In finish_gradients: the root's last gradients go."""
        if not self.is_open:
            return
        self.is_open, self.is_last = False, True
        if self.root is not None:
            self.take_gradients(self.root)
