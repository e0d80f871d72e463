"""Validation: loss, perplexity, bits per byte and loss by position, as sums that ranks can add.

The loss is the sum over target tokens divided by their number, over all ranks' shares. Bits per byte divides the same
sum by the UTF-8 bytes of the text instead, so that models with different tokenizers can be compared (Gao et al. 2020,
The Pile, section 3.1). T positions in the window.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from llm.loss import IGNORE_INDEX, token_losses
from llm.parallelize_context import ContextShards
from llm.parallelize_pipeline import Pipeline
from llm.transformer_context import make_context

NUM_BUCKETS = 16


class Batch(Protocol):
    """What evaluation reads of llm.data_loader's batches."""

    token_ids: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64, -100 where ignored
    doc_ids: Tensor | None
    token_positions: Tensor | None

    def to(self, device: torch.device) -> "Batch": ...


@dataclass
class PositionLoss:
    """The mean loss over target tokens at window positions first..last, counted from 0; `loss` in nats a token."""

    first: int
    last: int
    loss: float
    num_tokens: int


@dataclass
class Evaluation:
    """A validation's result; losses in nats a token."""

    loss: float
    perplexity: float
    bits_per_byte: float
    num_tokens: int
    num_bytes: float
    loss_by_position: list[dict[str, Any]]  # PositionLoss fields, ready for JSON


class EvaluationSums:
    """`tensor` (2, T) float64: the sum of losses and the number of targets at each position of the window.

    Ranks evaluate shares of the data and add their tensors (one all-reduce) before anyone calls `result`.
    """

    def __init__(self, seq_len: int, device: torch.device | str = "cpu"):
        self.tensor = torch.zeros(2, seq_len, dtype=torch.float64, device=device)

    def add(self, losses: Tensor, targets: Tensor, columns: Tensor | None = None) -> None:
        """Count one batch: losses (B, T') with 0 where targets (B, T') are ignored, T' <= T.

        `columns` (T',) says where in the window they lie, if not at its start; those beyond T are padding.
        """
        sums = torch.stack((losses.double().sum(0), (targets != IGNORE_INDEX).sum(0).double()))  # (2, T')
        if columns is None:
            self.tensor[:, : losses.shape[1]] += sums
        else:
            inside = columns < self.tensor.shape[1]
            self.tensor[:, columns[inside]] += sums[:, inside]

    def result(self, bytes_per_token: float) -> Evaluation:
        """The figures, given the UTF-8 bytes of text that one target token stands for on average."""
        by_position = self.tensor.cpu()
        loss_sum, num_tokens = by_position.sum(1).tolist()
        assert num_tokens > 0, "an evaluation needs at least one target token"
        loss = loss_sum / num_tokens
        num_bytes = num_tokens * bytes_per_token
        return Evaluation(
            loss=loss,
            perplexity=math.exp(min(loss, 700.0)),  # beyond 700 a float64 overflows
            bits_per_byte=loss_sum / math.log(2) / num_bytes,
            num_tokens=int(num_tokens),
            num_bytes=num_bytes,
            loss_by_position=[asdict(bucket) for bucket in position_buckets(by_position)],
        )


def position_buckets(by_position: Tensor, num_buckets: int = NUM_BUCKETS) -> list[PositionLoss]:
    """At most `num_buckets` of them, each wider than the one before: the loss falls fastest at the window's start."""
    seq_len = by_position.shape[1]
    edges = torch.logspace(0, math.log2(seq_len + 1), num_buckets + 1, base=2.0).round().int().unique().tolist()
    buckets = []
    for first, end in pairwise(edges):  # positions counted from 1
        loss_sum, num_tokens = by_position[:, first - 1 : end - 1].sum(1).tolist()
        if num_tokens:
            buckets.append(PositionLoss(first - 1, end - 2, loss_sum / num_tokens, int(num_tokens)))
    return buckets


@torch.no_grad()
def evaluate_sums(
    model: nn.Module,
    batches: Iterable[Batch],
    seq_len: int,
    device: torch.device,
    autocast_dtype: torch.dtype | None = None,
    shards: ContextShards | None = None,
) -> EvaluationSums:
    """Run the model over this rank's batches; `autocast_dtype` is what training runs its matmuls in, or None.

    With `shards` (context parallelism) the sums are those of this rank's tokens of each batch.
    """
    context_of = make_context if shards is None else shards.make_context
    sums = EvaluationSums(seq_len, device)
    for batch in batches:
        columns = None if shards is None else shards.columns_of(batch.token_ids.shape[1], device)
        batch = (batch if shards is None else shards.shard(batch)).to(device)
        ctx = context_of(batch.token_ids, batch.token_positions, batch.doc_ids)
        with torch.autocast(device.type, autocast_dtype, enabled=autocast_dtype is not None):
            logits = model(batch.token_ids, ctx)  # (B, T, V)
        sums.add(token_losses(logits, batch.targets), batch.targets, columns)
    return sums


def evaluate_stages(
    pipeline: Pipeline,
    batches: Iterable[Batch],
    seq_len: int,
    device: torch.device,
    shards: ContextShards | None = None,
) -> EvaluationSums:
    """The same of windows of seq_len tokens through a pipeline's stages: ranks without the last one have zeros."""
    sums = EvaluationSums(seq_len, device)
    columns = None if shards is None else shards.columns_of(seq_len, device)
    cut = list(batches) if shards is None else [shards.shard(batch) for batch in batches]

    def see(logits: Tensor, batch: Batch) -> None:
        sums.add(token_losses(logits, batch.targets), batch.targets, columns)

    pipeline.evaluate(cut, see)
    return sums


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    seq_len: int,
    bytes_per_token: float,
    device: torch.device,
    autocast_dtype: torch.dtype | None = None,
) -> Evaluation:
    """`evaluate_sums` and its `result` on a single rank."""
    return evaluate_sums(model, batches, seq_len, device, autocast_dtype).result(bytes_per_token)
