"""What goes into the engine and what comes out: a request's parameters, a token, a whole completion, the counters."""

from dataclasses import dataclass, field

from configs.errors import UserError, check_positive
from llm.sampling import SamplingConfig

MAX_ALTERNATIVES = 20


@dataclass(frozen=True)
class RequestParams:
    """How one request is answered.

    max_new_tokens: at most so many tokens; the model's context may end the request before.
    stop_ids: the request ends with the first of these, which is its last token and not part of its text.
    stop: the request ends where one of these strings would stand in its text, which ends before it.
    top_log_probs: so many likeliest ids are reported with each token.
    index: with sampling.seed the request's dice: equal (seed, index) draw the same, whatever shares the batch.
    """

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    max_new_tokens: int = 200
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    top_log_probs: int = 0
    index: int = 0

    def __post_init__(self) -> None:
        check_positive(max_new_tokens=self.max_new_tokens)
        if not 0 <= self.top_log_probs <= MAX_ALTERNATIVES:
            raise UserError(f"top_log_probs={self.top_log_probs} must lie in 0..{MAX_ALTERNATIVES}; lower it")
        if any(not text for text in self.stop):
            raise UserError("stop holds an empty string, which would end every text at once; leave it out")


@dataclass
class TokenEvent:
    """One sampled token of one request.

    log_prob: log softmax(scores / temperature) of the token, after penalties and bans, before top-k, top-p and min-p;
        at temperature 0 as at temperature 1.
    kept_mass: the probability, under the same distribution, of what the filters kept; 1.0 without them and at
        temperature 0. The token was drawn with log-probability log_prob - log(kept_mass).
    text: what may be shown now; "" while a character or a possible stop string is not whole.
    alternatives: the likeliest ids and their log-probabilities, best first.
    finish_reason: None, "stop", "length", "cancelled" or "error".
    """

    request_id: int
    token_id: int
    log_prob: float
    kept_mass: float
    weight_version: int
    text: str = ""
    alternatives: list[tuple[int, float]] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Completion:
    """All of one request: its tokens with what TokenEvent says of each, and its text."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    kept_masses: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""

    def add(self, event: TokenEvent) -> None:
        self.token_ids.append(event.token_id)
        self.log_probs.append(event.log_prob)
        self.kept_masses.append(event.kept_mass)
        self.weight_versions.append(event.weight_version)
        self.text += event.text
        self.finish_reason = event.finish_reason or self.finish_reason


@dataclass
class EngineStats:
    """Counters since the engine was made, and what it holds now.

    prompt_tokens: of submitted prompts. computed_tokens: run through the model, recomputation included.
    shared_tokens: prompt tokens whose keys another request had left. preemptions: requests put back for want of pages.
    """

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_total: int = 0
    pages_cached: int = 0  # kept for sharing, used by nobody now
    prompt_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    shared_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
