"""What pipeline parallelism sends and how long it idles, from plain numbers.

Messages: an activation and a gradient a boundary and micro-batch, batched where a rank sends or receives several at one
time. The log counts of a batch the bytes that the rank sends, or those it receives where it sends nothing. A tied table
crosses twice a step: its gradient from the last rank to the first, and its values back. Which message falls into which
batch is the program's (pipeline_schedules_program), a table as much as the schedule is; sizes are counted here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from parallel.cost_model_traffic import ITEM_BYTES, Message
from parallel.pipeline_schedules import Schedule, build_schedule
from parallel.pipeline_schedules_program import Exchange, Program, program_of
from parallel.pipeline_schedules_simulation import Durations, Simulation, simulate

AXIS = "pp"
PIPELINE_WAITS = ("exchange", "all_reduce_sum")  # in which a rank waits for other stages: messages, and the norm


@lru_cache(maxsize=256)
def known_schedule(name: str, ranks: int, micro_batches: int, chunks: int) -> Schedule:
    """build_schedule, of which a plan asks for the same ones again and again."""
    return build_schedule(name, ranks, micro_batches, chunks)


@lru_cache(maxsize=1024)
def known_program(name: str, ranks: int, micro_batches: int, chunks: int, rank: int) -> Program:
    """program_of such a schedule."""
    return program_of(known_schedule(name, ranks, micro_batches, chunks), rank)


@dataclass(frozen=True)
class PipelineShape:
    """What crosses between ranks: `tokens` of each micro-batch, of `width` elements each."""

    ranks: int
    schedule: str
    chunks: int
    tokens: tuple[int, ...]
    width: int
    dtype: str  # of activations and their gradients
    table_elements: int = 0  # of a tied table, 0 without one
    table_dtype: str = "float32"
    table_learns: bool = True  # a frozen one has no gradient to send
    norm_dtype: str = "float32"

    @property
    def boundary_bytes(self) -> list[int]:
        """Of one micro-batch's activations; its gradient has as many."""
        return [tokens * self.width * ITEM_BYTES[self.dtype] for tokens in self.tokens]


def pipeline_messages(shape: PipelineShape, rank: int) -> Iterator[Message]:
    """Every message over the pp axis that one rank takes part in during an optimizer step."""
    yield Message("all_reduce_max", AXIS, "int64", shape.ranks, 8, "host")
    table = shape.table_elements * ITEM_BYTES[shape.table_dtype]
    if table and rank in (0, shape.ranks - 1):
        yield Message("exchange", AXIS, shape.table_dtype, shape.ranks, table, "forward")
        if shape.table_learns:
            yield Message("exchange", AXIS, shape.table_dtype, shape.ranks, table, "backward")
    sizes = shape.boundary_bytes
    for step in known_program(shape.schedule, shape.ranks, len(shape.tokens), shape.chunks, rank):
        if isinstance(step, Exchange):
            nbytes = sum(sizes[message.micro_batch] for message in step.sends or step.receives)
            yield Message("exchange", AXIS, shape.dtype, shape.ranks, nbytes, "forward")
    yield Message("all_reduce_sum", AXIS, shape.norm_dtype, shape.ranks, ITEM_BYTES[shape.norm_dtype], "host")


def predict_pipeline(shape: PipelineShape, durations: Durations, stage_scale: list[float] | None = None) -> Simulation:
    """The step on paper: when each operation runs, idle time, most activations held.

    `durations` are of a stage of scale 1, `stage_scale` how much dearer each stage is.
    """
    schedule = known_schedule(shape.schedule, shape.ranks, len(shape.tokens), shape.chunks)
    return simulate(schedule, durations, stage_scale)


def simulate_stages(shape: PipelineShape, durations: list[Durations]) -> Simulation:
    """The same with the seconds of each stage, in their order."""
    return simulate(known_schedule(shape.schedule, shape.ranks, len(shape.tokens), shape.chunks), durations)
