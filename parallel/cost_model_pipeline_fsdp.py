"""What ZeRO-2 and 3 send over the data ranks of a pipeline rank, counted from its row of the schedule's table.

ZeRO-3 gathers a stage's blocks for every pass that needs them (F, B, I; not W), but for one that the pass before has
left: its last block stays where the next pass begins with it. ZeRO-2 gathers each block once a step, both the root
unit (what is in no block) once. Gradients are reduced after each B or W, or after a stage's last one alone.
"""

from collections.abc import Iterator

from parallel.cost_model_traffic import (
    ITEM_BYTES,
    DataLayout,
    Message,
    Param,
    agreement_on_targets,
    agreements,
    gather_message,
    gradient_share,
    reduce_message,
    stage_of,
    trainable,
)
from parallel.pipeline_schedules import BACKWARD, FORWARD, WEIGHT, Operation

Unit = list[Param]
Row = tuple[Operation, ...]


def pipelined_fsdp_messages(
    params: list[Param], layout: DataLayout, row: Row, stages: dict[int, range]
) -> list[Message]:
    """Every message of a step over the data ranks; `params` and `stages` (their pieces) are those of one rank."""
    if layout.ranks == 1:
        return []
    blocks = {stage: units_of(params, pieces) for stage, pieces in stages.items()}
    root = [param for param in params if not param.in_block]
    with_root = {stage for stage, pieces in stages.items() if any(param.stage in pieces for param in root)}
    last = {op.stage: op for op in row if makes_gradients(op)}
    found = [agreement_on_targets(layout), *gather_message(root, layout, "forward", 0)]
    for op, order, is_there in gathers_of(row, blocks, layout.zero):
        phase = "forward" if op.kind == FORWARD else "backward"
        for unit in order[1:] if is_there else order:
            found += gather_message(unit, layout, phase, op.micro_batch)
    for op in row:
        if not makes_gradients(op):
            continue
        is_last = op == last[op.stage]
        if is_last or layout.reduce_each_micro_batch:
            for unit in reversed(blocks[op.stage]):
                found += reductions(unit, layout, op.micro_batch, is_last)
        if op.stage in with_root and layout.reduce_each_micro_batch and not is_last:
            found += reductions(root, layout, op.micro_batch, False)
    found += reductions(root, layout, layout.micro_batches - 1, True)
    return [*found, *agreements(trainable(params), layout)]


def units_of(params: list[Param], pieces: range) -> list[Unit]:
    """The blocks of a stage, in the order of forward."""
    units: dict[int, Unit] = {}
    for param in params:
        if param.in_block and param.stage in pieces:
            units.setdefault(param.stage, []).append(param)
    return [units[stage] for stage in sorted(units)]


def makes_gradients(op: Operation) -> bool:
    """Whether all gradients of a micro-batch on its stage are there after it."""
    return op.kind in (BACKWARD, WEIGHT)


def gathers_of(row: Row, blocks: dict[int, list[Unit]], zero: int) -> Iterator[tuple[Operation, list[Unit], bool]]:
    """Of each pass that gathers: the units in its order, and whether the first one is there already."""
    left: Unit | None = None
    seen: set[int] = set()
    passes = [op for op in row if op.kind != WEIGHT]
    orders = [blocks[op.stage] if op.kind == FORWARD else blocks[op.stage][::-1] for op in passes]
    for op, order, following in zip(passes, orders, [*orders[1:], []], strict=True):
        if not order:
            left = None
        elif zero == 3:
            yield op, order, order[0] is left
            left = order[-1] if following and following[0] is order[-1] else None
        elif op.stage not in seen:
            seen.add(op.stage)
            yield op, order, False


def reductions(unit: Unit, layout: DataLayout, micro_batch: int, is_last: bool) -> Iterator[Message]:
    """A unit's reduce-scatter, and after its last one the sum over the ranks that hold the same shards."""
    yield from reduce_message(unit, layout, micro_batch)
    if is_last and layout.replicate > 1 and trainable(unit):
        nbytes = gradient_share(unit, layout) * ITEM_BYTES[unit[0].dtype]
        place = ("backward", stage_of(unit), micro_batch)
        yield Message("all_reduce_sum", "dp_replicate", unit[0].dtype, layout.replicate, nbytes, *place)
