"""What a model thinks of each token of a text: windows that slide over it, and the losses by token and by byte.

A text longer than the model's window is read in windows of seq_len tokens that move by `stride`: a window counts only
the targets that the one before it has not, so each token is scored once, after the first window with seq_len - stride
tokens before it at least. A text starts after the end-of-text token, as in training, and no end-of-text is scored:
what is divided by are exactly the bytes of the text. T window tokens, B windows.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from configs.errors import UserError
from llm.bpe_tokenizer import Tokenizer
from llm.evaluation import EvaluationSums
from llm.evaluation_text import Text
from llm.loss import IGNORE_INDEX, token_losses
from llm.transformer_context import make_context

BLOCK_BYTES = 4096  # a long text's losses are kept by blocks of so many bytes, the same for every tokenizer
GROUP_BATCHES = 16  # windows of so many batches are sorted by length, so that rows of one batch need little padding


class Window(NamedTuple):
    """Targets begin..end - 1 of a text, of which those from `counted` on count."""

    begin: int
    end: int
    counted: int


def sliding_windows(num_targets: int, seq_len: int, stride: int) -> list[Window]:
    """Windows that together count each of a text's targets once; the last one is moved back, not cut short."""
    windows = [Window(0, min(seq_len, num_targets), 0)]
    while windows[-1].end < num_targets:
        done = windows[-1].end
        end = min(done + stride, num_targets)
        windows.append(Window(end - seq_len, end, done))
    return windows


@dataclass(frozen=True)
class ScoreConfig:
    """How windows are cut and run; `stride` tokens lie between the starts of two windows of a text."""

    seq_len: int
    stride: int
    batch_size: int = 16
    autocast_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.stride <= self.seq_len:
            raise UserError(f"stride={self.stride} must lie in 1..seq_len={self.seq_len}; seq_len is the quickest")


@dataclass
class ScoredText:
    """A text's losses: `token_nats` (tokens,), and sums over blocks of BLOCK_BYTES of it, (blocks,) float64 each.

    A token belongs to the block in which it begins.
    """

    text: Text
    token_ids: np.ndarray
    token_nats: np.ndarray
    block_nats: np.ndarray
    block_bytes: np.ndarray

    @property
    def nats(self) -> float:
        return float(self.token_nats.sum())


class TextScorer:
    """Scores texts with one model; `sums` collects the loss by position in the window over all of them."""

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, config: ScoreConfig, device: torch.device):
        self.model, self.tokenizer, self.config, self.device = model, tokenizer, config, device
        self.sums = EvaluationSums(config.seq_len, device)
        self.byte_lengths = np.array([len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)])

    def score(self, texts: Iterable[Text]) -> Iterator[ScoredText]:
        """Each text with its losses, in order; texts are taken in groups, so memory does not grow with their number."""
        group, waiting = [], 0
        for text in texts:
            ids = self.tokenizer.encode_array(text.text)  # (tokens,)
            group.append((text, ids))
            waiting += 1 + len(ids) // self.config.stride
            if waiting >= GROUP_BATCHES * self.config.batch_size:
                yield from self.score_group(group)
                group, waiting = [], 0
        yield from self.score_group(group)

    def score_group(self, group: list[tuple[Text, np.ndarray]]) -> Iterator[ScoredText]:
        rows = [np.concatenate(([self.tokenizer.start_id], ids)).astype(np.int64) for _, ids in group]
        all_nats = self.token_nats(rows)
        for (text, ids), nats in zip(group, all_nats, strict=True):
            yield ScoredText(text, ids, nats, *self.by_block(ids, nats, text.num_bytes))

    def token_nats(self, rows: list[np.ndarray]) -> list[np.ndarray]:
        """-log p of each row's tokens but the first, given those before it: (n + 1,) int64 -> (n,) float64."""
        nats = [np.zeros(len(row) - 1) for row in rows]
        config = self.config
        windows = [
            (index, window)
            for index, row in enumerate(rows)
            for window in sliding_windows(len(row) - 1, config.seq_len, config.stride)
            if len(row) > 1
        ]
        windows.sort(key=lambda entry: entry[1].begin - entry[1].end)  # longest first
        for first in range(0, len(windows), config.batch_size):
            batch = windows[first : first + config.batch_size]
            losses = self.window_losses(rows, batch).cpu().double().numpy()  # (B, T)
            for (index, window), row_losses in zip(batch, losses, strict=True):
                counted = slice(window.counted - window.begin, window.end - window.begin)
                nats[index][window.counted : window.end] = row_losses[counted]
        return nats

    @torch.no_grad()
    def window_losses(self, rows: list[np.ndarray], batch: list[tuple[int, Window]]) -> Tensor:
        """Losses (B, T) of a batch of windows, padded on the right, where causal attention cannot see it."""
        longest = max(window.end - window.begin for _, window in batch)
        token_ids = torch.zeros(len(batch), longest, dtype=torch.int64)  # (B, T)
        targets = torch.full((len(batch), longest), IGNORE_INDEX)  # (B, T)
        for place, (index, window) in enumerate(batch):
            ids = torch.from_numpy(rows[index][window.begin : window.end + 1])
            token_ids[place, : len(ids) - 1] = ids[:-1]
            skipped = window.counted - window.begin
            targets[place, skipped : len(ids) - 1] = ids[1 + skipped :]
        token_ids, targets = token_ids.to(self.device), targets.to(self.device)
        dtype = self.config.autocast_dtype
        with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            logits = self.model(token_ids, make_context(token_ids))  # (B, T, V)
        losses = token_losses(logits, targets)
        self.sums.add(losses, targets)
        return losses

    def by_block(self, ids: np.ndarray, nats: np.ndarray, num_bytes: int) -> tuple[np.ndarray, np.ndarray]:
        """A text's nats and bytes summed over its blocks, (blocks,) each."""
        num_blocks = -(-num_bytes // BLOCK_BYTES)
        lengths = self.byte_lengths[ids]
        # A tokenizer that composes characters has fewer bytes than the text; the last block then is a little short.
        blocks = np.minimum((np.cumsum(lengths) - lengths) // BLOCK_BYTES, num_blocks - 1)
        block_bytes = np.full(num_blocks, BLOCK_BYTES)
        block_bytes[-1] = num_bytes - BLOCK_BYTES * (num_blocks - 1)
        return np.bincount(blocks, weights=nats, minlength=num_blocks), block_bytes


@dataclass(frozen=True)
class SourceScore:
    """One source's figures, or all sources' together; perplexity is of a token, bits_per_byte of the text."""

    source: str
    documents: int
    num_tokens: int
    num_bytes: int
    nats: float

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.num_bytes

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nats / self.num_tokens, 700.0))  # beyond 700 a float64 overflows

    def to_json(self) -> dict[str, str | float]:
        return {
            "source": self.source,
            "documents": self.documents,
            "num_tokens": self.num_tokens,
            "num_bytes": self.num_bytes,
            "loss": self.nats / self.num_tokens,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
        }


def sum_by_source(scored: Iterable[ScoredText]) -> dict[str, SourceScore]:
    """Totals a source, in the order in which sources appear."""
    totals: dict[str, SourceScore] = {}
    for one in scored:
        name = one.text.source
        new = SourceScore(name, 1, len(one.token_ids), one.text.num_bytes, one.nats)
        totals[name] = add(totals[name], new) if name in totals else new
    return totals


def add(first: SourceScore, second: SourceScore) -> SourceScore:
    return replace(
        first,
        documents=first.documents + second.documents,
        num_tokens=first.num_tokens + second.num_tokens,
        num_bytes=first.num_bytes + second.num_bytes,
        nats=first.nats + second.nats,
    )
