"""From a checked request to what the engine is asked for: token ids and parameters of each sequence."""

from dataclasses import dataclass

from configs.errors import UserError
from llm.chat_prompt import ChatPrompt
from llm.engine_request import RequestParams
from llm.serve_config import ServeLimits
from llm.serve_errors import ApiError
from llm.serve_schema import DEFAULT_MAX_TOKENS, ChatBody, CompletionBody, GenerationBody

Sequences = list[tuple[list[int], RequestParams]]


@dataclass
class Bounds:
    """What this model and this server allow."""

    vocab_size: int  # of the tokenizer
    max_seq_len: int
    limits: ServeLimits

    @property
    def max_prompt_tokens(self) -> int:
        return min(self.limits.max_prompt_tokens or self.max_seq_len, self.max_seq_len - 1)


def prepare_completion(body: CompletionBody, prompt: ChatPrompt, bounds: Bounds) -> Sequences:
    """The sequences of /v1/completions: `n` of the first prompt, then `n` of the second, ..."""
    check_choices(body.num_choices * len(body.prompt), bounds)
    prompts = []
    for text_or_ids in body.prompt:
        if isinstance(text_or_ids, list):
            check_ids(text_or_ids, bounds.vocab_size)
        prompts.append(text_or_ids if isinstance(text_or_ids, list) else prompt.encode_text(text_or_ids))
    max_tokens = body.max_tokens or DEFAULT_MAX_TOKENS
    return sequences(body, prompts, max_tokens, (prompt.stop_ids, ()), bounds)


def prepare_chat(body: ChatBody, prompt: ChatPrompt, bounds: Bounds) -> Sequences:
    """The sequences of /v1/chat/completions: `n` answers to one conversation."""
    check_choices(body.num_choices, bounds)
    try:
        prompt_ids = prompt.encode_chat([message.plain() for message in body.messages])
    except UserError as error:
        raise ApiError(400, str(error), "invalid_messages", "messages") from error
    max_tokens = body.max_completion_tokens or body.max_tokens or bounds.max_seq_len
    return sequences(body, [prompt_ids], max_tokens, (prompt.stop_ids, prompt.chat_stops), bounds)


def sequences(
    body: GenerationBody,
    prompts: list[list[int]],
    max_tokens: int,
    ends: tuple[tuple[int, ...], tuple[str, ...]],
    bounds: Bounds,
) -> Sequences:
    """`n` of each prompt, numbered in one row for their dice; max_tokens is cut to what the context leaves."""
    if bounds.limits.max_new_tokens is not None:
        max_tokens = min(max_tokens, bounds.limits.max_new_tokens)
    sampling = body.sampling()
    stop_ids, stops = ends
    made: Sequences = []
    for prompt_ids in prompts:
        check_length(len(prompt_ids), bounds)
        for _ in range(body.num_choices):
            params = RequestParams(
                sampling=sampling,
                max_new_tokens=min(max_tokens, bounds.max_seq_len - len(prompt_ids)),
                stop_ids=stop_ids,
                stop=(*stops, *(body.stop or ())),
                top_log_probs=body.num_alternatives or 0,
                index=len(made),
            )
            made.append((prompt_ids, params))
    return made


def check_choices(count: int, bounds: Bounds) -> None:
    limit = bounds.limits.max_choices
    if count > limit:
        raise ApiError(400, f"n x prompts = {count} is over this server's limit of {limit} a request", None, "n")


def check_ids(ids: list[int], vocab_size: int) -> None:
    """ApiError unless every id is one of the tokenizer's."""
    for place, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            # The id itself may have thousands of digits; its place is always short.
            reason = f"the token id at place {place} is outside 0..{vocab_size - 1}; use this model's tokenizer"
            raise ApiError(400, reason, "unknown_token_id", "prompt")


def check_length(num_tokens: int, bounds: Bounds) -> None:
    """ApiError for a prompt of no tokens, or of more than fit."""
    if num_tokens == 0:
        raise ApiError(400, "the prompt has no tokens; give it some text", "empty_prompt", "prompt")
    if num_tokens > bounds.max_prompt_tokens:
        raise ApiError(
            400,
            f"the prompt has {num_tokens} tokens and at most {bounds.max_prompt_tokens} fit (the model's context is "
            f"{bounds.max_seq_len}); shorten it",
            "context_length_exceeded",
            "prompt",
        )
