"""The bodies of requests, checked: OpenAI's fields with OpenAI's meaning, and a few of ours beside them.

A field that this server does not know, or knows and cannot serve (tools, logit_bias, penalties on frequency), is
refused unless it holds the value that changes nothing: an answer never ignores what was asked for without a word.
"""

import secrets
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from configs.errors import UserError
from llm.sampling import SamplingConfig
from llm.serve_errors import ApiError

MAX_STOPS, MAX_STOP_CHARS, MAX_ALTERNATIVES = 16, 256, 20
DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as OpenAI's
Zero = Literal[0] | None
Prompt = str | list[str] | list[int] | list[list[int]]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class GenerationBody(Body):
    """What both kinds of request share."""

    model: str | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # taken and not used, as metadata and store
    metadata: dict[str, str] | None = None
    store: bool | None = None
    # Ours, the names of llm.sampling:
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    no_repeat_ngram: Annotated[int, Field(ge=0, le=64)] | None = None
    # Known and not served; only what changes nothing passes:
    frequency_penalty: Zero = None
    presence_penalty: Zero = None
    logit_bias: Annotated[dict[str, int], Field(max_length=0)] | None = None

    @field_validator("frequency_penalty", "presence_penalty", mode="before")
    @classmethod
    def whole_zero(cls, value: Any) -> Any:
        return 0 if isinstance(value, float) and value == 0.0 else value

    @field_validator("stop")
    @classmethod
    def check_stop(cls, value: str | list[str] | None) -> list[str]:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > MAX_STOPS:
            raise ValueError(f"{len(stops)} stop strings were given; give at most {MAX_STOPS}")
        for stop in stops:
            if not 0 < len(stop) <= MAX_STOP_CHARS:
                raise ValueError(f"a stop string has {len(stop)} characters; give 1 to {MAX_STOP_CHARS}")
        return stops

    @model_validator(mode="after")
    def check_stream_options(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options were given without stream=true; set it or leave them out")
        return self

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def num_alternatives(self) -> int | None:
        """How many likeliest tokens to report beside each, or None for no log-probabilities at all."""
        raise NotImplementedError

    def sampling(self) -> SamplingConfig:
        """The engine's settings; without a seed each request draws its own."""
        given = {
            name: getattr(self, name)
            for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "no_repeat_ngram")
            if getattr(self, name) is not None
        }
        # OpenAI's seeds may be negative, ours may not.
        seed = secrets.randbits(62) if self.seed is None else self.seed % 2**63
        try:
            return SamplingConfig(**given, seed=seed)
        except UserError as error:
            raise ApiError(400, str(error)) from error


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Any
    max_tokens: Annotated[int, Field(ge=1)] | None = None  # DEFAULT_MAX_TOKENS
    logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    suffix: None = None

    @field_validator("prompt")
    @classmethod
    def check_prompt(cls, value: Any) -> list[str] | list[list[int]]:
        """One text or list of ids, or several, as a list of them; none of them empty."""
        prompts = [value] if isinstance(value, str) or is_ids(value) else value
        if not isinstance(prompts, list) or not prompts:
            raise ValueError("give text, a list of texts, a list of token ids, or a list of such lists, not empty")
        if not all(isinstance(one, str) for one in prompts) and not all(is_ids(one) for one in prompts):
            raise ValueError("the prompts must be all texts or all lists of token ids (whole numbers, not empty)")
        if not all(prompts):
            raise ValueError("a prompt is empty; give it at least one character or token id")
        return prompts

    @property
    def num_alternatives(self) -> int | None:
        return self.logprobs


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    """One message; what a client echoes of our answers (refusal, annotations, ...) passes while it is empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None

    def plain(self) -> dict[str, str]:
        """{"role", "content"} with the parts joined; a developer's message is the system's."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def check_together(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs was given without logprobs=true; set it or leave top_logprobs out")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens mean the same; give one of them")
        if not any(message.plain()["content"].strip() for message in self.messages):
            raise ValueError("all messages are empty; give one of them some content")
        return self

    @property
    def num_alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def parse_body(schema: type[GenerationBody], content: bytes) -> Any:
    """An instance of `schema` from a request's bytes; ApiError 400 with the first thing that is wrong."""
    try:
        return schema.model_validate_json(content)
    except ValidationError as error:
        raise explain(error) from error


def explain(error: ValidationError) -> ApiError:
    """One complaint in one line, with the field that it is about: of the first field's, the most specific one."""
    complaints = error.errors(include_url=False, include_input=False, include_context=False)
    first = max((one for one in complaints if one["loc"][:1] == complaints[0]["loc"][:1]), key=lambda e: len(e["loc"]))
    field = ".".join(str(part) for part in first["loc"] if not is_branch(part)) or None
    reason = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unrecognised argument {field}; leave it out", "unknown_parameter", field)
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {reason}", "invalid_json")
    return ApiError(400, f"{field}: {reason}" if field else reason, "invalid_value", field)


def is_branch(part: str | int) -> bool:
    """Whether a part of an error's place names a type of a union (`list[str]`), not a field of the request."""
    return isinstance(part, str) and (part in ("str", "int", "float", "bool") or "[" in part)
