"""How much a model gains from context: the loss of the same tokens, given their last 1, 2, 4, ... tokens.

Loss by position mixes two things: early positions have less context, and they are other tokens (beginnings of
documents). Here the targets are the same at every length of context, so a difference is the context's alone.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from configs.errors import UserError
from llm.loss import token_losses
from llm.transformer import Transformer
from llm.transformer_context import make_context


@dataclass(frozen=True)
class ContextLoss:
    """Mean loss (nats a token) of the targets given `context` tokens; `gain` is what the context before that adds.

    spread: the standard error of `gain`, from the targets' own differences.
    """

    context: int
    loss: float
    gain: float
    spread: float


@dataclass(frozen=True)
class Targets:
    """Rows (n, S + 1) of token ids whose last is the target: S tokens of context for each."""

    rows: np.ndarray

    @staticmethod
    def draw(rows: list[np.ndarray], context: int, count: int, seed: int = 1337) -> "Targets":
        """At most `count` targets with `context` tokens before them in their own row, no token chosen twice."""
        places = [(i, end) for i, row in enumerate(rows) for end in range(context + 1, len(row) + 1)]
        if not places:
            longest = max((len(row) for row in rows), default=0)
            raise UserError(f"no text has {context + 1} tokens (the longest {longest}); lower seq_len or add text")
        order = np.random.default_rng(seed).permutation(len(places))[:count]
        return Targets(np.stack([rows[places[i][0]][places[i][1] - context - 1 : places[i][1]] for i in order]))


def context_lengths(longest: int) -> list[int]:
    """1, 2, 4, ... and `longest`."""
    return [*(2**i for i in range(longest.bit_length()) if 2**i < longest), longest]


def losses_by_context(
    model: Transformer, targets: Targets, batch_size: int, autocast_dtype: torch.dtype | None = None
) -> list[ContextLoss]:
    """One entry for each of `context_lengths`; positions always begin at 0, as for a text of that length."""
    rows = torch.from_numpy(targets.rows.astype(np.int64))  # (n, S + 1)
    found: list[ContextLoss] = []
    before: Tensor | None = None
    for context in context_lengths(rows.shape[1] - 1):
        losses = torch.cat([
            last_losses(model, part[:, -context - 1 :], autocast_dtype) for part in rows.split(batch_size)
        ])  # (n,)  # fmt: skip
        gains = torch.zeros_like(losses) if before is None else before - losses
        spread = (gains.std() / len(gains) ** 0.5).item() if len(gains) > 1 else float("nan")
        found.append(ContextLoss(context, losses.mean().item(), gains.mean().item(), spread))
        before = losses
    return found


@torch.no_grad()
def last_losses(model: Transformer, rows: Tensor, autocast_dtype: torch.dtype | None) -> Tensor:
    """-log p of each row's last token given those before it: (B, c + 1) -> (B,) float64 on the CPU."""
    rows = rows.to(model.embedding.weight.device)
    token_ids = rows[:, :-1]
    with torch.autocast(rows.device.type, autocast_dtype, enabled=autocast_dtype is not None):
        logits = model.output(model.hidden_states(token_ids, make_context(token_ids))[:, -1])  # (B, V)
    return token_losses(logits, rows[:, -1]).double().cpu()
