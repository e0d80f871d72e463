"""Pipeline schedules as data: for every rank the operations it runs, in order; nothing here computes or communicates.

GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019), interleaved 1F1B (Narayanan et al. 2021), ZB-H1 and ZB-H2 (Qi
et al. 2024), whose backward is split into the input's gradient, for which the stage before waits, and the weights'
gradient, for which nobody does. Differs from the papers: any number of micro-batches. A number that interleaving does
not divide is scheduled as the next one that it does, less the operations of micro-batches that are not there: what
waits for what is within one micro-batch, so leaving one out cannot make a deadlock.

Stage s lies on rank s % ranks. `python -m parallel.pipeline_schedules_figure` prints and draws them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from configs.errors import UserError, check_choice, check_positive

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zero_bubble_h2")
SPLIT_SCHEDULES = ("zero_bubble", "zero_bubble_h2")  # backward is split
FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"  # B is I and W at once


class Operation(NamedTuple):
    """One micro-batch through one stage."""

    kind: str  # F forward, B backward, I gradient of the stage's input, W gradient of its weights
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}.{self.stage}"


@dataclass(frozen=True, eq=False)  # by identity: what is known of a table is kept with it
class Schedule:
    """`table[rank]` is what the rank runs, in order; `chunks` stages lie on each rank."""

    name: str
    ranks: int
    chunks: int
    micro_batches: int
    table: tuple[tuple[Operation, ...], ...]

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    @property
    def splits_backward(self) -> bool:
        return any(op.kind == WEIGHT for row in self.table for op in row)

    def stages_of(self, rank: int) -> list[int]:
        """The stages that lie on a rank, in the model's order."""
        return list(range(rank, self.stages, self.ranks))


def build_schedule(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """The schedule of this name; UserError for an unknown one, or for chunks with a schedule that has none."""
    check_choice("parallel.pp_schedule", name, SCHEDULES)
    check_positive(**{"parallel.pp": ranks, "micro_batches": micro_batches, "parallel.pp_chunks": chunks})
    if (name == "interleaved") != (chunks > 1):
        raise UserError(
            f"parallel.pp_chunks={chunks} does not fit parallel.pp_schedule={name}; use pp_chunks of 2 or more with "
            f"interleaved and pp_chunks=1 with the others"
        )
    if name == "interleaved":
        rows: Iterable = (interleaved_row(rank, ranks, micro_batches, chunks) for rank in range(ranks))
    else:
        make_row = {
            "gpipe": gpipe_row, "1f1b": one_f_one_b_row, "zero_bubble": zero_bubble_row,
            "zero_bubble_h2": zero_bubble_h2_row,
        }[name]  # fmt: skip
        rows = (make_row(rank, ranks, micro_batches) for rank in range(ranks))
    return Schedule(name, ranks, chunks, micro_batches, tuple(tuple(row) for row in rows))


def gpipe_row(rank: int, ranks: int, micro_batches: int) -> list[Operation]:
    """All forwards, then all backwards, the last micro-batch first: its activations are the newest."""
    forwards = [Operation(FORWARD, rank, index) for index in range(micro_batches)]
    return forwards + [Operation(BACKWARD, rank, index) for index in reversed(range(micro_batches))]


def one_f_one_b_row(rank: int, ranks: int, micro_batches: int) -> list[Operation]:
    """As many forwards as stages follow, then one forward and one backward in turn."""
    forwards = [Operation(FORWARD, rank, index) for index in range(micro_batches)]
    backwards = [Operation(BACKWARD, rank, index) for index in range(micro_batches)]
    return in_turn(forwards, backwards, ranks - 1 - rank)


def interleaved_row(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Operation]:
    """1F1B over chunks: groups of `ranks` micro-batches go through a rank's first stage, then through its second."""
    padded = -(-micro_batches // ranks) * ranks
    groups = [range(first, first + ranks) for first in range(0, padded, ranks)]
    order = [(chunk, index) for group in groups for chunk in range(chunks) for index in group]
    forwards = [Operation(FORWARD, chunk * ranks + rank, index) for chunk, index in order]
    backwards = [Operation(BACKWARD, (chunks - 1 - chunk) * ranks + rank, index) for chunk, index in order]
    row = in_turn(forwards, backwards, 2 * (ranks - 1 - rank) + (chunks - 1) * ranks)
    return [op for op in row if op.micro_batch < micro_batches]


def zero_bubble_row(rank: int, ranks: int, micro_batches: int) -> list[Operation]:
    """ZB-H1: 1F1B's order of forwards and of input gradients; weight gradients fill what 1F1B leaves idle.

    On rank r a weight gradient comes r micro-batches after its input gradient. So as many micro-batches are held as
    on 1F1B's first rank, on every rank, and the last ranks have weight gradients left for when the pipeline drains.
    """
    return split_row(one_f_one_b_row(rank, ranks, micro_batches), rank)


def zero_bubble_h2_row(rank: int, ranks: int, micro_batches: int) -> list[Operation]:
    """ZB-H2: as ZB-H1 with twice the forwards before the first backward, and weight gradients twice as late.

    A rank is then busy while the gradient of its first micro-batch comes back, however much longer I lasts than W. As
    many micro-batches are held as that takes, 2 ranks - 1. What is left is the time until a rank's first input is
    there, which an update that all ranks take together does not let them make up for.
    """
    forwards = [Operation(FORWARD, rank, index) for index in range(micro_batches)]
    backwards = [Operation(BACKWARD, rank, index) for index in range(micro_batches)]
    return split_row(in_turn(forwards, backwards, 2 * (ranks - 1 - rank)), 2 * rank)


def split_row(row: Iterable[Operation], delay: int) -> list[Operation]:
    """Each backward pass as an input gradient and, so many micro-batches later or at the end, a weight gradient."""
    split: list[Operation] = []
    weights: list[Operation] = []
    for op in row:
        if op.kind == FORWARD:
            split.append(op)
            continue
        split.append(op._replace(kind=INPUT))
        weights.append(op._replace(kind=WEIGHT))
        if op.micro_batch >= delay:
            split.append(weights.pop(0))
    return split + weights


def in_turn(forwards: list[Operation], backwards: list[Operation], warm_up: int) -> list[Operation]:
    """`warm_up` forwards, then forward and backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    pairs = zip(forwards[warm_up:], backwards, strict=False)
    row = forwards[:warm_up] + [op for pair in pairs for op in pair]
    return row + backwards[len(forwards) - warm_up :]
