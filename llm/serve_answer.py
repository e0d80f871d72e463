"""What is sent back: OpenAI's objects for completions and chats, whole or as chunks of a stream.

An entry of log-probabilities is reported for every sampled token, the one that ended the answer included; the text
that it released may be empty (half a character, a token that ends the answer, what may become a stop string).
"""

import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from llm.bpe_tokenizer import Tokenizer
from llm.engine_request import TokenEvent

# One encoder for all: json.dumps with these settings would make a new one for each token.
encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass
class Choice:
    """What has come of one sequence."""

    index: int
    pieces: list[str] = field(default_factory=list)
    num_chars: int = 0  # of the pieces
    num_tokens: int = 0
    events: list[tuple[TokenEvent, int]] = field(default_factory=list)  # with the characters before; if asked for
    finish_reason: str | None = None

    def add(self, event: TokenEvent, keep: bool) -> None:
        if keep:
            self.events.append((event, self.num_chars))
            self.pieces.append(event.text)
        self.num_chars += len(event.text)
        self.num_tokens += 1
        self.finish_reason = event.finish_reason


class Answer:
    """Builds the objects of one request; subclasses know the shape of a choice."""

    prefix, whole, part = "", "", ""

    def __init__(self, model: str, tokenizer: Tokenizer, num_prompt_tokens: int, num_alternatives: int | None):
        self.model, self.tokenizer = model, tokenizer
        self.num_prompt_tokens = num_prompt_tokens
        self.num_alternatives = num_alternatives
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.head = self.tail = ""  # of an event, around its delta

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def usage(self, choices: list[Choice]) -> dict[str, int]:
        completion = sum(choice.num_tokens for choice in choices)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.num_prompt_tokens + completion,
        }

    def complete(self, choices: list[Choice]) -> dict[str, Any]:
        """The object of a request that did not stream."""
        return self.envelope(self.whole, [self.choice(one) for one in choices]) | {"usage": self.usage(choices)}

    def event_lines(self, deltas: list[dict[str, Any]], with_usage: bool) -> bytes:
        """A server-sent event for each delta, in one piece; the envelope, which is theirs all, is encoded once.

        JSON escapes line breaks, so an event is always one line.
        """
        if not self.head:
            empty = self.envelope(self.part, []) | ({"usage": None} if with_usage else {})
            self.head, self.tail = f"data: {encode_json(empty)}\n\n".split('"choices":[')
            self.head += '"choices":['
        lines = [f"{self.head}{encode_json(delta)}{self.tail}" for delta in deltas]
        return "".join(lines).encode("utf-8", "replace")

    def usage_chunk(self, choices: list[Choice]) -> dict[str, Any]:
        """The last event, when the client asked for it."""
        return self.envelope(self.part, []) | {"usage": self.usage(choices)}

    def deltas(self, taken: list[tuple[Choice, TokenEvent, int]]) -> list[dict[str, Any]]:
        """The deltas of tokens with the characters before each: one a choice, or one a token with log-probabilities.

        With those a client wants to know which text belongs to which token.
        """
        if self.num_alternatives is not None:
            return [self.delta(choice.index, [(event, num_chars)]) for choice, event, num_chars in taken]
        groups: dict[int, list[tuple[TokenEvent, int]]] = {}
        for choice, event, num_chars in taken:
            groups.setdefault(choice.index, []).append((event, num_chars))
        return [self.delta(index, events) for index, events in groups.items()]

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        """The deltas before the first token."""
        return []

    def choice(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def delta(self, index: int, events: list[tuple[TokenEvent, int]]) -> dict[str, Any]:
        raise NotImplementedError

    def name(self, token_id: int) -> str:
        """A token's text; "bytes:\\xe2\\x82" for one that is not UTF-8 by itself, as OpenAI writes it."""
        content = self.token_bytes(token_id)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def token_bytes(self, token_id: int) -> bytes:
        """The token's bytes; none for an id of the model's padding, which the tokenizer does not have."""
        return self.tokenizer.token_bytes(token_id) if token_id < self.tokenizer.vocab_size else b""


class CompletionAnswer(Answer):
    """/v1/completions."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": "".join(choice.pieces),
            "logprobs": self.log_probs(choice.events),
            "finish_reason": choice.finish_reason,
        }

    def delta(self, index: int, events: list[tuple[TokenEvent, int]]) -> dict[str, Any]:
        text, finish_reason = "".join(event.text for event, _ in events), events[-1][0].finish_reason
        return {"index": index, "text": text, "logprobs": self.log_probs(events), "finish_reason": finish_reason}

    def log_probs(self, events: list[tuple[TokenEvent, int]]) -> dict[str, Any] | None:
        if self.num_alternatives is None:
            return None
        return {
            "tokens": [self.name(event.token_id) for event, _ in events],
            "token_logprobs": [event.log_prob for event, _ in events],
            "top_logprobs": [self.alternatives(event) for event, _ in events] if self.num_alternatives else None,
            "text_offset": [offset for _, offset in events],
        }

    def alternatives(self, event: TokenEvent) -> dict[str, float]:
        """The likeliest tokens, best first; of two that read alike, the likelier one."""
        named: dict[str, float] = {}
        for token_id, log_prob in event.alternatives:
            named.setdefault(self.name(token_id), log_prob)
        return named


class ChatAnswer(Answer):
    """/v1/chat/completions."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def deltas(self, taken: list[tuple[Choice, TokenEvent, int]]) -> list[dict[str, Any]]:
        """The deltas of tokens with the characters before each: one a choice, or one a token with log-probabilities.

        With those a client wants to know which text belongs to which token.
        """
        groups: dict[int, list[tuple[TokenEvent, int]]] = {}
        for number, (choice, event, num_chars) in enumerate(taken):
            key = choice.index if self.num_alternatives is None else number
            groups.setdefault(key, []).append((event, num_chars))
        indices = {
            choice.index if self.num_alternatives is None else n: choice.index for n, (choice, _, _) in enumerate(taken)
        }
        return [self.delta(indices[key], events) for key, events in groups.items()]

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": i, "delta": delta, "logprobs": None, "finish_reason": None} for i in range(num_choices)]

    def choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": "".join(choice.pieces), "refusal": None},
            "logprobs": self.log_probs([event for event, _ in choice.events]),
            "finish_reason": choice.finish_reason,
        }

    def delta(self, index: int, events: list[tuple[TokenEvent, int]]) -> dict[str, Any]:
        delta = {"content": "".join(event.text for event, _ in events)}
        logprobs = self.log_probs([event for event, _ in events])
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": events[-1][0].finish_reason}

    def log_probs(self, events: list[TokenEvent]) -> dict[str, Any] | None:
        if self.num_alternatives is None:
            return None
        return {"content": [self.entry(event) for event in events], "refusal": None}

    def entry(self, event: TokenEvent) -> dict[str, Any]:
        alternatives = [self.token(token_id, log_prob) for token_id, log_prob in event.alternatives]
        return self.token(event.token_id, event.log_prob) | {"top_logprobs": alternatives}

    def token(self, token_id: int, log_prob: float) -> dict[str, Any]:
        content = self.token_bytes(token_id)
        return {"token": content.decode("utf-8", "replace"), "logprob": log_prob, "bytes": list(content)}
