"""Batches as a pure function of (seed, global batch index): ranks and micro-batches slice rows of the same batch.

So any number of ranks sees the same data, and to resume a run only the index of the next batch is needed. Order
"random" draws windows anywhere in the tokens; "epoch" gives each non-overlapping window exactly once an epoch. Several
sources are mixed by weight. With document masking, the end-of-text token that ends one document opens the next: it
belongs to the next document and its label is that document's first token, so a model learns to start from it.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from configs.errors import UserError
from llm.data_loader_order import WindowOrder, make_order
from llm.token_files import TokenSplit, find_sources

IGNORED = -100


@dataclass
class Batch:
    """B windows of T tokens: token_ids and targets (B, T) int64, targets -100 where there is no label.

    doc_ids (B, T) int32 and token_positions (B, T) int64, restarting at each document, only with document masking.
    num_targets: labels in this batch, known on the host.
    """

    token_ids: Tensor
    targets: Tensor
    num_targets: int
    doc_ids: Tensor | None = None
    token_positions: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        return self if device.type == "cpu" else self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        return self.map(Tensor.pin_memory)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        tensors = (self.token_ids, self.targets, self.doc_ids, self.token_positions)
        ids, targets, docs, positions = (None if tensor is None else change(tensor) for tensor in tensors)
        return Batch(ids, targets, self.num_targets, docs, positions)


def document_layout(token_ids: np.ndarray, eot_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Document ids and positions within them, both (B, T), of tokens whose documents begin at each eot_id."""
    begins = token_ids == eot_id
    columns = np.arange(token_ids.shape[1])
    latest_begin = np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
    return np.cumsum(begins, axis=1, dtype=np.int32), columns - latest_begin


def make_batch(windows: np.ndarray, eot_id: int | None) -> Batch:
    """Windows (B, T + 1) int64, -100 where padded, to a Batch; `eot_id` is given for document masking."""
    token_ids, targets = windows[:, :-1], np.ascontiguousarray(windows[:, 1:])
    token_ids = np.maximum(token_ids, 0)  # padding has no labels, so any id will do
    batch = Batch(torch.from_numpy(token_ids), torch.from_numpy(targets), int((targets != IGNORED).sum()))
    if eot_id is not None:
        doc_ids, positions = document_layout(token_ids, eot_id)
        batch.doc_ids, batch.token_positions = torch.from_numpy(doc_ids), torch.from_numpy(positions)
    return batch


@dataclass
class LoaderConfig:
    """How windows are drawn; `num_sequences` is the number of rows of the global batch.

    pin_memory: put batches in page-locked memory, from where a copy to the GPU does not make the host wait.
    """

    seq_len: int
    num_sequences: int
    seed: int
    order: str = "random"
    document_masking: bool = False
    pin_memory: bool = False

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise UserError(f"seed={self.seed} must not be negative; use 0 or more")


class BatchLoader:
    """Reads windows of several sources; `global_batch(index)` is the whole batch, the same on every rank.

    A source of weight 0 is as if it were not there. Raises UserError when a source has no whole window.
    """

    def __init__(self, sources: list[TokenSplit], weights: list[float], config: LoaderConfig):
        sources = [source for source, weight in zip(sources, weights, strict=True) if weight > 0]
        weights = [weight for weight in weights if weight > 0]
        self.sources, self.config = sources, config
        self.order: WindowOrder = make_order(config.order, sources, weights, config.seq_len, config.seed)
        self.eot_id = sources[0].meta.eot_id if config.document_masking else None
        self.pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self.next: tuple[tuple[int, range, int], Future] | None = None

    def rows(self, index: int, rows: range) -> np.ndarray:
        """Windows (len(rows), T + 1) of global batch `index`."""
        chosen = self.order.windows(index, self.config.num_sequences)
        pieces = [chosen[row] for row in rows]
        return np.stack([self.sources[s].window(shard, start, self.config.seq_len) for s, shard, start in pieces])

    def global_batch(self, index: int, rows: range | None = None) -> Batch:
        """Global batch `index`, counted from 0, or some of its rows."""
        rows = rows if rows is not None else range(self.config.num_sequences)
        return make_batch(self.rows(index, rows), self.eot_id)

    def micro_batches(self, index: int, rows: range, micro_batch_size: int) -> list[Batch]:
        """These rows of global batch `index` in micro-batches; the next index is read ahead on a thread."""
        wanted = (index, rows, micro_batch_size)
        ahead, self.next = self.next, None
        batches = ahead[1].result() if ahead is not None and ahead[0] == wanted else self.read(*wanted)
        self.next = (
            (index + 1, rows, micro_batch_size),
            self.pool.submit(self.read, index + 1, rows, micro_batch_size),
        )
        return batches

    def read(self, index: int, rows: range, micro_batch_size: int) -> list[Batch]:
        windows = self.rows(index, rows)
        batches = [
            make_batch(windows[first : first + micro_batch_size], self.eot_id)
            for first in range(0, len(windows), micro_batch_size)
        ]
        return [batch.pin_memory() for batch in batches] if self.config.pin_memory else batches

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)


class ValidationSet:
    """The validation split in fixed windows: each of its labels counted once, the last window of a shard padded.

    Limited to `max_tokens` by taking evenly spaced windows, the same ones at every validation.
    """

    def __init__(self, sources: list[TokenSplit], seq_len: int, max_tokens: int, document_masking: bool = False):
        self.sources, self.seq_len = sources, seq_len
        self.eot_id = sources[0].meta.eot_id if document_masking else None
        windows = [
            (source, shard, start)
            for source, split in enumerate(sources)
            for shard, tokens in enumerate(split.shards)
            for start in range(0, len(tokens) - 1, seq_len)
        ]
        if not windows:
            raise UserError("the validation split has no two tokens in a row; raise val_fraction when tokenising")
        count = min(len(windows), max(1, max_tokens // seq_len))
        self.windows = [windows[i * len(windows) // count] for i in range(count)]
        labels = sum(len(tokens) - 1 for split in sources for tokens in split.shards)
        self.bytes_per_token = sum(split.utf8_bytes for split in sources) / labels

    def batches(self, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """This rank's share, in batches of at most `batch_size` windows; every rank has as many batches.

        A rank that has run out gets one row without labels: sharded models want as many forward passes of all ranks.
        """
        mine, longest = self.windows[rank::world_size], len(self.windows[::world_size])
        for first in range(0, longest, batch_size):
            chosen = mine[first : first + batch_size]
            rows = np.full((max(1, len(chosen)), self.seq_len + 1), IGNORED, dtype=np.int64)
            for row, (source, shard, start) in zip(rows, chosen, strict=False):
                tokens = self.sources[source].window(shard, start, self.seq_len)
                row[: len(tokens)] = tokens
            yield make_batch(rows, self.eot_id)


def open_sources(tokens: str | Path, split: str, tokenizer_sha256: str | None = None) -> dict[str, TokenSplit]:
    """Every source below `tokens` that has this split; UserError when none has."""
    directories = find_sources(tokens)
    opened = {
        name: TokenSplit(path, split, tokenizer_sha256)
        for name, path in directories.items()
        if len(directories) == 1 or TokenSplit.has(path, split)
    }
    if not opened:
        raise UserError(f"data.tokens={tokens} has no {split} tokens; raise val_fraction in llm.tokenize_corpus")
    return opened


def source_weights(sources: dict[str, TokenSplit], weights: dict[str, float]) -> list[float]:
    """Each source's share, adding up to 1: as given by name, or by number of tokens."""
    if not weights:
        weights = {name: float(source.num_tokens) for name, source in sources.items()}
    unknown = sorted(weights.keys() ^ sources.keys())
    if unknown or min(weights.values()) < 0 or sum(weights.values()) <= 0:
        raise UserError(
            f"data.weights={weights} must give every source a weight of 0 or more, not all 0; "
            f"the sources are {sorted(sources)}"
        )
    total = sum(weights.values())
    return [weights[name] / total for name in sources]
