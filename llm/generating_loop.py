"""Prompts to tokens in one call: an engine made for them, run to its end.

For a script or a test that has a model and some prompts; who serves requests over time keeps an Engine (llm/engine.py).
The model stays as it is, so that training can sample between steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from configs.errors import UserError, check_positive
from llm.engine import Engine, EngineConfig, RequestParams
from llm.sampling import SamplingConfig
from llm.transformer import Transformer

MAX_RUNNING = 64  # prompts in a step


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
    check_prompts(prompts, model.config.max_seq_len)
    longest = max(map(len, prompts)) + limits.max_new_tokens
    engine = Engine(model, EngineConfig(
        max_running=min(len(prompts), MAX_RUNNING), max_seq_len=min(longest, model.config.max_seq_len),
        cuda_graph=False, num_ids=limits.num_ids, fuse=False,
    ))  # fmt: skip
    rows = {}
    for row, prompt in enumerate(prompts):
        params = RequestParams(sampling, limits.max_new_tokens, tuple(limits.stop_ids), index=first_index + row)
        rows[engine.submit(prompt, params)] = row
    while engine.has_work:
        for event in engine.step():
            yield rows[event.request_id], event.token_id


def check_prompts(prompts: list[list[int]], max_seq_len: int) -> None:
    """UserError, with the prompt's number, for one that is empty or leaves no room for a token."""
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"prompt {index} has no tokens; start it with the end-of-text token or give it text")
        if len(prompt) >= max_seq_len:
            raise UserError(
                f"prompt {index} has {len(prompt)} tokens and model.max_seq_len={max_seq_len} leaves no room for a "
                f"new one; shorten it to {max_seq_len - 1} tokens or fewer"
            )
