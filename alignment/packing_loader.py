"""Packed batches as a pure function of (seed, global batch index), and the held-out examples in fixed rows.

Every epoch shuffles the examples, packs them in windows of a few thousand, and shuffles the rows; the rows of all
epochs follow one another. To resume a run only the index of the next batch is needed, and ranks slice rows of it. These
two stand where llm/data_loader's BatchLoader and ValidationSet stand for pretraining.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from alignment.packing import PACKINGS, best_fit, density, pack, places_of
from alignment.r1_prompt import Example
from configs.errors import UserError, check_choice, check_positive
from llm.data_loader import Batch
from llm.data_loader_order import generator

SHUFFLE, ROWS = 3, 4  # purposes of random numbers, after those of llm/data_loader_order
KEPT_EPOCHS = 2


@dataclass
class PackingConfig:
    """How examples become rows."""

    seq_len: int
    num_sequences: int  # rows of the global batch
    seed: int
    packing: str = "best_fit"  # or "none": one example a row, padded
    window: int = 4096  # examples that are packed together: more mix better, fewer fill a little less
    pin_memory: bool = False

    def __post_init__(self) -> None:
        check_choice("packing", self.packing, PACKINGS)
        check_positive(pack_window=self.window)


def make_bins(lengths: list[int], config: PackingConfig) -> list[list[int]]:
    """Bins of one window, by the config's way of packing."""
    return best_fit(lengths, config.seq_len) if config.packing == "best_fit" else [[i] for i in range(len(lengths))]


class PackedLoader:
    """`micro_batches(index, rows, size)` of the endless list of packed rows; equal on every rank for equal rows."""

    def __init__(self, examples: list[Example], config: PackingConfig):
        if not examples:
            raise UserError("there is no example to train on; check train_data")
        self.examples, self.config = examples, config
        self.lengths = [places_of(example) for example in examples]
        self.ends: list[int] = []  # rows of the first epochs together, as far as they were needed
        self.kept: dict[int, list[list[int]]] = {}

    def epoch(self, number: int) -> list[list[int]]:
        """The rows of one epoch, each a list of examples."""
        if number not in self.kept:
            if len(self.kept) >= KEPT_EPOCHS:
                del self.kept[min(self.kept)]
            self.kept[number] = self.shuffled_rows(number)
        return self.kept[number]

    def shuffled_rows(self, number: int) -> list[list[int]]:
        seed, window = self.config.seed, self.config.window
        order = generator(SHUFFLE, seed, number).permutation(len(self.examples)).tolist()
        rows = []
        for first in range(0, len(order), window):
            members = order[first : first + window]
            bins = make_bins([self.lengths[index] for index in members], self.config)
            rows += [[members[place] for place in one] for one in bins]
        mixed = generator(ROWS, seed, number).permutation(len(rows)).tolist()
        return [rows[row] for row in mixed]

    def row(self, number: int) -> list[int]:
        """The examples of row `number` of all epochs in a row."""
        while not self.ends or number >= self.ends[-1]:
            before = self.ends[-1] if self.ends else 0
            self.ends.append(before + len(self.epoch(len(self.ends))))
        epoch = bisect_right(self.ends, number)
        return self.epoch(epoch)[number - (self.ends[epoch - 1] if epoch else 0)]

    def micro_batches(self, index: int, rows: range, micro_batch_size: int) -> list[Batch]:
        """These rows of global batch `index` in micro-batches."""
        first = index * self.config.num_sequences
        bins = [self.row(first + row) for row in rows]
        batches = [
            pack(self.examples, bins[start : start + micro_batch_size], self.config.seq_len)
            for start in range(0, len(bins), micro_batch_size)
        ]
        return [batch.pin_memory() for batch in batches] if self.config.pin_memory else batches

    def rows_per_epoch(self) -> int:
        return len(self.epoch(0))

    def density(self) -> float:
        """The share of an epoch's tokens that is no padding."""
        return density(self.lengths, self.epoch(0), self.config.seq_len)

    def close(self) -> None:
        """Nothing is open: a row is made in microseconds, without a thread."""


class PackedValidation:
    """The held-out examples in fixed packed rows; `bytes_per_token`: UTF-8 bytes of text a trained token stands for."""

    def __init__(self, examples: list[Example], config: PackingConfig, bytes_per_token: float):
        self.examples, self.config, self.bytes_per_token = examples, config, bytes_per_token
        self.bins = make_bins([places_of(example) for example in examples], config)

    def batches(self, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """This rank's share of the rows; every rank has as many batches, the last ones perhaps of padding alone."""
        mine, longest = self.bins[rank::world_size], len(self.bins[::world_size])
        for first in range(0, longest, batch_size):
            yield pack(self.examples, mine[first : first + batch_size] or [[]], self.config.seq_len)
