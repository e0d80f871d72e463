"""Where each head looks: attention probabilities of a text, and what each head does, in four numbers.

The probabilities come from the queries and keys that a forward pass hands to its attention backend: the seam `attend`
records them and then calls the backend as always, so the model computes what it would compute. L layers, H heads,
T tokens.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llm.transformer import Transformer
from llm.transformer_attention import Attend
from llm.transformer_context import BlockContext, make_context
from llm.transformer_layers import at_least_float32


class Recorder(nn.Module):
    """An attention backend that keeps the probabilities of the last call, (B, H, T, T) float32, causal, no cache.

    A module, since a backend may be one, and an attribute that holds a module takes nothing else.
    """

    def __init__(self, inner: Attend):
        super().__init__()
        self.inner = inner
        self.probabilities: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: BlockContext) -> tuple[Tensor, Tensor | None]:
        assert ctx.keys is None, "attention maps are of whole, unpacked texts"
        groups = q.shape[2] // k.shape[2]
        scores = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(groups, dim=2))  # (B, H, T, T)
        scores = at_least_float32(scores) / math.sqrt(q.shape[3])
        causal = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()
        self.probabilities = scores.masked_fill(~causal, float("-inf")).softmax(-1)
        return self.inner(q, k, v, ctx)


@contextmanager
def recording(model: Transformer) -> Iterator[list[Recorder]]:
    """A recorder in every block while the context lasts, in the blocks' order."""
    attentions = [block.attention for block in model.blocks.values()]
    recorders = [Recorder(attention.attend) for attention in attentions]
    try:
        for attention, recorder in zip(attentions, recorders, strict=True):
            attention.attend = recorder
        yield recorders
    finally:
        for attention, recorder in zip(attentions, recorders, strict=True):
            del attention.attend
            attention.attend = recorder.inner


@torch.no_grad()
def attention_maps(model: Transformer, token_ids: Tensor) -> Tensor:
    """Token ids (B, T) -> probabilities (B, L, H, T, T): row t of a head says where token t looks, and sums to 1."""
    with recording(model) as recorders:
        model.hidden_states(token_ids, make_context(token_ids))
    return torch.stack([recorder.probabilities for recorder in recorders], dim=1)


@dataclass(frozen=True)
class HeadScores:
    """Of each head, (L, H) float32 each: shares of a token's attention, averaged over tokens, and a distance.

    first: on the first token (a place to rest); own: on itself; previous: on the token before it.
    distance: mean number of tokens that it looks back.
    induction: on random tokens given twice, on the one after the token's earlier self (Olsson et al. 2022).
    """

    first: Tensor
    own: Tensor
    previous: Tensor
    distance: Tensor
    induction: Tensor


def score_heads(model: Transformer, token_ids: Tensor, num_ids: int, seed: int = 1337) -> HeadScores:
    """Scores over texts (B, T), T >= 3; ids of the repeated sequence are drawn from 1..num_ids - 1."""
    maps = attention_maps(model, token_ids)  # (B, L, H, T, T)
    T = maps.shape[-1]
    steps = torch.arange(T, device=maps.device)
    back = (steps[:, None] - steps[None]).float()  # (T, T), how far back a key lies
    diagonal = maps.diagonal(dim1=-2, dim2=-1)  # (B, L, H, T)
    previous = maps.diagonal(offset=-1, dim1=-2, dim2=-1)  # (B, L, H, T - 1)
    return HeadScores(
        first=maps[..., 2:, 0].mean((0, -1)),  # from the third token on: before, first is also own or previous
        own=diagonal[..., 2:].mean((0, -1)),
        previous=previous[..., 1:].mean((0, -1)),
        distance=(maps * back).sum(-1).mean((0, -1)),
        induction=induction_scores(model, T // 2, num_ids, seed),
    )


def induction_scores(model: Transformer, half: int, num_ids: int, seed: int, num_rows: int = 4) -> Tensor:
    """Attention (L, H) from the second copy of a random sequence to the token after the same one in the first."""
    generator = torch.Generator().manual_seed(seed)
    device = model.embedding.weight.device
    once = torch.randint(1, num_ids, (num_rows, half), generator=generator).to(device)
    maps = attention_maps(model, torch.cat((once, once), dim=1))  # (B, L, H, 2 half, 2 half)
    return maps[..., half:, :].diagonal(offset=1, dim1=-2, dim2=-1)[..., :half].mean((0, -1))
