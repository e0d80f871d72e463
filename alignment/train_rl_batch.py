"""Completions as padded micro-batches for the training step: llm.data_loader's Batch with what a policy loss needs.

A row is prompt and completion; targets are the completion's tokens alone, the end-of-text token that ended it among
them, and -100 on the prompt and on padding. Rows are padded on the right, where causal attention never looks. B rows,
T tokens, N sampled tokens of the micro-batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alignment.grpo_responses import Responses, count_units
from alignment.train_rl_samples import Sample
from llm.data_loader import IGNORED, Batch

PADDING = 8  # rows are padded to a multiple of it: fewer shapes, and matrix products that fill their tiles
TENSORS = (
    "token_ids", "targets", "doc_ids", "token_positions", "rows", "advantages", "sampler_log_probs", "old_log_probs",
    "reference_log_probs",
)  # fmt: skip


@dataclass
class PolicyBatch(Batch):
    """A Batch whose targets were sampled; all (B, T) but `rows`.

    num_targets: what it adds to the count that the step divides by (tokens or completions, by the aggregation).
    rows: (N,) int64, the places of sampled targets in the flattened (B * T): the output layer reads these states alone.
    old_log_probs: the trainer's before the batch's first update; None: they are those of the update itself.
    """

    rows: Tensor | None = None
    advantages: Tensor | None = None
    sampler_log_probs: Tensor | None = None
    old_log_probs: Tensor | None = None
    reference_log_probs: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> "PolicyBatch":
        changed = {name: value if (value := getattr(self, name)) is None else change(value) for name in TENSORS}
        return PolicyBatch(num_targets=self.num_targets, **changed)

    @property
    def responses(self) -> Responses:
        return Responses(self.targets != IGNORED)


def make_policy_batch(samples: Sequence[Sample], advantages: Sequence[float], aggregation: str) -> PolicyBatch:
    """One padded micro-batch of samples with their advantages."""
    longest = max(len(one.prompt_ids) + len(one.token_ids) for one in samples) - 1
    shape = (len(samples), -(-longest // PADDING) * PADDING)  # (B, T)
    token_ids, targets = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORED)
    spread, log_probs = torch.zeros(shape), torch.zeros(shape)
    for row, (sample, advantage) in enumerate(zip(samples, advantages, strict=True)):
        ids = torch.tensor(sample.prompt_ids + sample.token_ids)
        first, last = len(sample.prompt_ids) - 1, len(ids) - 1  # token t + 1 is the target of place t
        token_ids[row, :last] = ids[:-1]
        targets[row, first:last] = ids[first + 1 :]
        spread[row, first:last] = advantage
        log_probs[row, first:last] = torch.tensor(sample.log_probs)
    mask = targets != IGNORED
    units = count_units(Responses(mask), aggregation)
    rows = mask.flatten().nonzero()[:, 0]  # (N,)
    return PolicyBatch(token_ids, targets, units, rows=rows, advantages=spread, sampler_log_probs=log_probs)


def empty_policy_batch(batch: Batch) -> PolicyBatch:
    """A batch of padding alone, for a rank that has run out of samples, from the training step's own."""
    zeros = torch.zeros(batch.token_ids.shape, device=batch.token_ids.device)
    rows = torch.zeros(0, dtype=torch.int64, device=batch.token_ids.device)
    return PolicyBatch(batch.token_ids, batch.targets, 0, rows=rows, advantages=zeros, sampler_log_probs=zeros)


def share_of_rank(count: int, lengths: Sequence[int], rank: int, size: int) -> list[int]:
    """The indices of the samples that a data rank learns from: dealt out by length, so that ranks have equal work."""
    order = sorted(range(count), key=lambda index: (-lengths[index], index))
    return order[rank::size]


def cut_micro_batches(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices, longest first, in micro-batches of at most `max_tokens` padded tokens; one sample may exceed them."""
    micro_batches: list[list[int]] = []
    for index in order:
        current = micro_batches[-1] if micro_batches else None
        if current is None or (len(current) + 1) * lengths[current[0]] > max_tokens:
            micro_batches.append([index])
        else:
            current.append(index)
    return micro_batches


@dataclass
class MicroBatching:
    """How samples become a rank's micro-batches."""

    aggregation: str
    max_tokens: int  # padded, of one micro-batch
    rank: int = 0
    size: int = 1  # data ranks

    def make(self, samples: Sequence[Sample], advantages: Sequence[float]) -> list[PolicyBatch]:
        """This rank's micro-batches; a completion without tokens has nothing to learn from and is left out."""
        kept = [index for index, sample in enumerate(samples) if sample.token_ids]
        lengths = [len(samples[index].prompt_ids) + len(samples[index].token_ids) for index in kept]
        order = share_of_rank(len(kept), lengths, self.rank, self.size)
        return [
            make_policy_batch([samples[kept[i]] for i in group], [advantages[kept[i]] for i in group], self.aggregation)
            for group in cut_micro_batches(order, lengths, self.max_tokens)
        ]
