"""Which tokens of a batch were sampled, and sums of them by completion: the seam that every aggregation goes through.

A policy loss is a sum over sampled tokens divided by a count of the *global* batch. What is counted depends on the
aggregation: tokens (DAPO), or completions, whose tokens then weigh 1/length (GRPO) or 1/constant (Dr. GRPO, Liu et al.
2025). Sums and counts add over micro-batches and ranks, so that a step is the same however the batch is cut; a mean of
micro-batch means is not. Completions must not be cut over micro-batches or ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

AGGREGATIONS = ("token_mean", "sequence_mean", "constant")


@dataclass
class Responses:
    """The sampled tokens among the targets of a batch (B, T).

    mask: (B, T) bool, True where the target was sampled; the end-of-text token that ended a completion is one of them.
    doc_ids: (B, T) integers in 0..T, where rows hold several completions (a Batch's doc_ids); None: a row is one.
    """

    mask: Tensor
    doc_ids: Tensor | None = None

    def totals(self, values: Tensor) -> Tensor:
        """The sum of `values` (B, T) over the sampled tokens of each completion, at each of its tokens: (B, T)."""
        kept = torch.where(self.mask, values, 0.0)
        if self.doc_ids is None:
            return kept.sum(1, keepdim=True).expand(values.shape)
        index = self.doc_ids.long()
        by_document = kept.new_zeros(kept.shape[0], kept.shape[1] + 1).scatter_add(1, index, kept)  # (B, T + 1)
        return by_document.gather(1, index)

    def lengths(self) -> Tensor:
        """Sampled tokens of each token's completion: (B, T) float32."""
        return self.totals(self.mask.float())

    def means(self, values: Tensor) -> Tensor:
        """The mean of `values` over each completion's sampled tokens, at each of its tokens: (B, T)."""
        return self.totals(values) / self.lengths().clamp(min=1.0)

    def masked_sum(self, values: Tensor) -> Tensor:
        """The sum of `values` (B, T) over all sampled tokens; what stands elsewhere may be anything, nan too."""
        return torch.where(self.mask, values, 0.0).sum()

    def num_tokens(self) -> int:
        return int(self.mask.sum())

    def num_sequences(self) -> int:
        """Completions with at least one sampled token; an empty one counts nowhere."""
        if self.doc_ids is None:
            return int(self.mask.any(1).sum())
        held = torch.zeros(self.mask.shape[0], self.mask.shape[1] + 1, dtype=torch.int32, device=self.mask.device)
        held.scatter_add_(1, self.doc_ids.long(), self.mask.int())
        return int((held > 0).sum())


def count_units(responses: Responses, aggregation: str) -> int:
    """What this batch adds to the count that the sum of the global batch is divided by (a Batch's num_targets)."""
    assert aggregation in AGGREGATIONS, f"{aggregation} is none of {AGGREGATIONS}"
    return responses.num_tokens() if aggregation == "token_mean" else responses.num_sequences()


def aggregate(values: Tensor, responses: Responses, aggregation: str, max_response_tokens: int | None = None) -> Tensor:
    """The sum of token values (B, T), weighted so that dividing by the global count_units gives the batch's loss.

    token_mean      sum_t v_t                               / tokens
    sequence_mean   sum_i (1 / len_i) sum_t v_it            / completions
    constant        sum_i (1 / max_response_tokens) sum_t v_it  / completions
    """
    assert aggregation in AGGREGATIONS, f"{aggregation} is none of {AGGREGATIONS}"
    if aggregation == "token_mean":
        return responses.masked_sum(values)
    if aggregation == "sequence_mean":
        return responses.masked_sum(values / responses.lengths().clamp(min=1.0))
    assert max_response_tokens, f"aggregation=constant needs max_response_tokens, not {max_response_tokens}"
    return responses.masked_sum(values) / max_response_tokens
