"""Which window is row r of global batch i: two orders, both found without walking through the batches before.

Every draw has a counter-based generator of its own, keyed by (purpose, seed, index), so nothing is carried over.
"""

from functools import lru_cache
from typing import Protocol

import numpy as np

from configs.errors import check_choice
from llm.token_files import TokenSplit

Window = tuple[int, int, int]  # source, shard, start
RANDOM, MIX, EPOCH = 0, 1, 2  # purposes
MIX_BLOCK = 4096  # samples; longer where there are more than 64 sources


class WindowOrder(Protocol):
    def windows(self, index: int, num_sequences: int) -> list[Window]:
        """The windows of global batch `index`, one a row."""


def generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


def make_order(name: str, sources: list[TokenSplit], weights: list[float], seq_len: int, seed: int) -> WindowOrder:
    """The order called "random" or "epoch"."""
    check_choice("data.order", name, ("random", "epoch"))
    order = RandomOrder if name == "random" else EpochOrder
    return order(sources, weights, seq_len, seed)


class RandomOrder:
    """Each row draws a source by weight, then a start uniform over all of that source's windows."""

    def __init__(self, sources: list[TokenSplit], weights: list[float], seq_len: int, seed: int):
        self.starts = [source.starts(seq_len) for source in sources]
        self.cumulative = np.cumsum(weights)
        self.seed = seed

    def windows(self, index: int, num_sequences: int) -> list[Window]:
        draw = generator(RANDOM, self.seed, index)
        chosen = np.searchsorted(self.cumulative, draw.random(num_sequences) * self.cumulative[-1], side="right")
        totals = np.array([starts[-1] for starts in self.starts])
        flat = draw.integers(0, totals[chosen])
        return [(int(s), *locate(self.starts[s], int(start))) for s, start in zip(chosen, flat, strict=True)]


class EpochOrder:
    """Each source's windows in a fresh permutation every epoch; sources interleaved in blocks with fixed quotas.

    Sample n (row r of batch i is n = i * num_sequences + r) lies in block n // block_size. Of the first k blocks a
    source has had floor(k * block_size * weight) samples, the heaviest source what is left: a closed form.
    """

    def __init__(self, sources: list[TokenSplit], weights: list[float], seq_len: int, seed: int):
        for source in sources:
            source.starts(seq_len)  # refuses a source without one whole window
        counts = [[max(0, (len(shard) - 1) // seq_len) for shard in source.shards] for source in sources]
        self.counts = [np.concatenate(([0], np.cumsum(count, dtype=np.int64))) for count in counts]
        self.weights, self.seq_len, self.seed = weights, seq_len, seed
        self.heaviest = int(np.argmax(weights))
        # The heaviest source has at least 1/n of a block and makes up for at most n - 1 roundings: n^2 are enough.
        self.block_size = max(MIX_BLOCK, len(sources) ** 2)
        self.mixed_block = lru_cache(maxsize=4)(self.mix)
        self.permutation = lru_cache(maxsize=2 * len(sources))(self.permute)

    def before(self, block: int) -> np.ndarray:
        """How many samples each source has had before this block."""
        counts = np.floor(block * self.block_size * np.asarray(self.weights)).astype(np.int64)
        counts[self.heaviest] = 0
        counts[self.heaviest] = block * self.block_size - counts.sum()
        return counts

    def mix(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """For each sample of a block: its source, and its number among all samples of that source."""
        first = self.before(block)
        quotas = self.before(block + 1) - first
        assert quotas.min() >= 0, f"a block of {self.block_size} is too short for {len(quotas)} sources"
        chosen = np.repeat(np.arange(len(quotas)), quotas)
        generator(MIX, self.seed, block).shuffle(chosen)
        numbers = np.empty(self.block_size, dtype=np.int64)
        for source, quota in enumerate(quotas):
            numbers[chosen == source] = first[source] + np.arange(quota)
        return chosen, numbers

    def permute(self, source: int, epoch: int) -> np.ndarray:
        return generator(EPOCH, self.seed, source, epoch).permutation(int(self.counts[source][-1]))

    def windows(self, index: int, num_sequences: int) -> list[Window]:
        first = index * num_sequences
        return [self.window(sample) for sample in range(first, first + num_sequences)]

    def window(self, sample: int) -> Window:
        block, place = divmod(sample, self.block_size)
        chosen, numbers = self.mixed_block(block)
        source, number = int(chosen[place]), int(numbers[place])
        epoch, turn = divmod(number, int(self.counts[source][-1]))
        shard, window = locate(self.counts[source], int(self.permutation(source, epoch)[turn]))
        return source, shard, window * self.seq_len


def locate(cumulative: np.ndarray, flat: int) -> tuple[int, int]:
    """A number over all shards to (shard, number within it)."""
    shard = int(np.searchsorted(cumulative, flat, side="right")) - 1
    return shard, flat - int(cumulative[shard])
