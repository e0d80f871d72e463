"""Batched generation: one prefill of right-padded prompts, then one token a row and step with the KV cache.

Rows of unequal prompts share a batch; each has its own positions, and a finished row leaves the batch at once. With
temperature 0 the tokens are those that full recomputation without a cache would choose (tests/llm/test_kv_cache.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.errors import UserError, check_positive
from llm.kv_cache import KVCache
from llm.sampling import Sampler, SamplingConfig
from llm.transformer import Transformer
from llm.transformer_context import make_context


@dataclass
class GenerationLimits:
    """When a row ends.

    max_new_tokens: at most so many tokens a prompt; model.max_seq_len, prompt included, may end it before.
    stop_ids: a row ends with the first of these, which is its last token.
    num_ids: ids from here up are never chosen; a model's vocabulary is padded beyond the tokenizer's. None: all.
    """

    max_new_tokens: int = 200
    stop_ids: Sequence[int] = ()
    num_ids: int | None = None

    def __post_init__(self) -> None:
        check_positive(max_new_tokens=self.max_new_tokens)


def generate(
    model: Transformer,
    prompts: list[list[int]],
    sampling: SamplingConfig,
    limits: GenerationLimits,
    first_index: int = 0,
) -> list[list[int]]:
    """The new tokens of each prompt, in the prompts' order; `first_index` is the first prompt's number for its seed."""
    completions: list[list[int]] = [[] for _ in prompts]
    for row, token_id in generate_stream(model, prompts, sampling, limits, first_index):
        completions[row].append(token_id)
    return completions


@torch.inference_mode()
def generate_stream(
    model: Transformer,
    prompts: list[list[int]],
    sampling: SamplingConfig,
    limits: GenerationLimits,
    first_index: int = 0,
) -> Iterator[tuple[int, int]]:
    """Yield (prompt, token id) as tokens are chosen, the rows of one step in order.

    Raises UserError for an empty prompt or one that fills the model's context.
    """
    if not prompts:
        return
    budgets = row_budgets(prompts, limits.max_new_tokens, model.config.max_seq_len)
    sampler = Sampler(sampling, prompts, first_index)
    cache = model.make_cache(len(prompts), max(len(p) + n for p, n in zip(prompts, budgets, strict=True)))
    logits = prefill(model, prompts, cache)  # (B, V)
    alive = list(range(len(prompts)))
    while True:
        chosen = sampler.sample(logits[:, : limits.num_ids])  # (B,)
        token_ids = chosen.tolist()
        yield from zip(alive, token_ids, strict=True)
        for row in alive:
            budgets[row] -= 1
        kept = [i for i, row in enumerate(alive) if budgets[row] > 0 and token_ids[i] not in limits.stop_ids]
        if not kept:
            return
        if len(kept) < len(alive):
            alive = [alive[i] for i in kept]
            chosen = chosen[kept]
            sampler.keep_rows(kept)
            cache.keep_rows(kept)
        logits = model(chosen[:, None], make_context(chosen[:, None], cache=cache))[:, 0]  # (B, V)


def row_budgets(prompts: list[list[int]], max_new_tokens: int, max_seq_len: int) -> list[int]:
    """How many tokens each prompt may get: max_new_tokens, or what the model's context leaves."""
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"prompt {index} has no tokens; start it with the end-of-text token or give it text")
        if len(prompt) >= max_seq_len:
            raise UserError(
                f"prompt {index} has {len(prompt)} tokens and model.max_seq_len={max_seq_len} leaves no room for a "
                f"new one; shorten it to {max_seq_len - 1} tokens or fewer"
            )
    return [min(max_new_tokens, max_seq_len - len(prompt)) for prompt in prompts]


def prefill(model: Transformer, prompts: list[list[int]], cache: KVCache) -> Tensor:
    """Run the prompts through the model at once, fill the cache, return each row's last logits (B, V)."""
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    padded = [prompt + [0] * (longest - len(prompt)) for prompt in prompts]
    token_ids = torch.tensor(padded, device=cache.positions.device)  # (B, T)
    hidden = model.hidden_states(token_ids, make_context(token_ids, cache=cache))  # (B, T, C)
    cache.trim(lengths)
    rows = torch.arange(len(prompts), device=hidden.device)
    # Only the last state of each row meets the output matrix: B x V logits, not B x T x V.
    return model.output(hidden[rows, cache.positions - 1])  # (B, V)
