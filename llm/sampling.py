"""From logits to the next token: pure functions on logits (B, V), a config that composes them, and a row's own dice.

The filters follow Hugging Face's definitions and order (repetition penalty, n-gram ban, temperature, top-k, top-p,
min-p), so that the same numbers mean the same thing elsewhere. Top-p is nucleus sampling (Holtzman et al. 2020),
min-p is Nguyen et al. 2024, the repetition penalty is CTRL's (Keskar et al. 2019). Each row draws from a generator
seeded by (seed, prompt index) alone: what a prompt samples does not depend on the batch that it shares.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.errors import UserError, check_positive

BANNED = float("-inf")


@dataclass
class SamplingConfig:
    """How the next token is chosen; the defaults sample from the model's own distribution."""

    temperature: float = 1.0  # 0: greedy, the likeliest token
    top_k: int = 0  # keep the k likeliest tokens; 0: all
    top_p: float = 1.0  # keep the fewest likeliest tokens whose probabilities reach p; 1: all
    min_p: float = 0.0  # keep tokens at least min_p times as likely as the likeliest; 0: all
    repetition_penalty: float = 1.0  # divide the score of a token that was seen (multiply, if it is negative); 1: off
    no_repeat_ngram: int = 0  # no n tokens in a row occur twice in a row's prompt and output; 0: off
    seed: int = 1337

    def __post_init__(self) -> None:
        for name, value in [("temperature", self.temperature), ("top_k", self.top_k), ("seed", self.seed)]:
            if value < 0:
                raise UserError(f"{name}={value} must not be negative; use 0 or more")
        if self.no_repeat_ngram < 0:
            raise UserError(f"no_repeat_ngram={self.no_repeat_ngram} must not be negative; use 0 to switch it off")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"top_p={self.top_p} must lie in (0, 1]; use 1 to keep every token")
        if not 0.0 <= self.min_p <= 1.0:
            raise UserError(f"min_p={self.min_p} must lie in [0, 1]; use 0 to keep every token")
        check_positive(repetition_penalty=self.repetition_penalty)


def top_k_filter(logits: Tensor, top_k: int) -> Tensor:
    """Ban all but the k likeliest tokens of each row; ties with the k-th stay: (B, V) -> (B, V)."""
    if top_k == 0 or top_k >= logits.shape[-1]:
        return logits
    smallest_kept = logits.topk(top_k, dim=-1).values[:, -1:]  # (B, 1)
    return logits.masked_fill(logits < smallest_kept, BANNED)


def top_p_filter(logits: Tensor, top_p: float) -> Tensor:
    """Keep the fewest likeliest tokens whose probabilities sum to at least p: (B, V) -> (B, V)."""
    if top_p >= 1.0:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # the mass of the tokens above this one
    dropped = before >= top_p
    dropped[:, 0] = False  # rounding must not take the last token left
    return logits.masked_fill(dropped.scatter(-1, order, dropped), BANNED)


def min_p_filter(logits: Tensor, min_p: float) -> Tensor:
    """Ban tokens less than min_p times as likely as the row's likeliest: (B, V) -> (B, V)."""
    if min_p == 0.0:
        return logits
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), BANNED)


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Scores of tokens in `seen` (B, V) bool, divided by the penalty when positive and multiplied when negative."""
    if penalty == 1.0:
        return logits
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def ban_tokens(logits: Tensor, banned: list[set[int]]) -> Tensor:
    """Ban row i's `banned[i]`, unless that would leave the row nothing to say."""
    rows = [row for row, ids in enumerate(banned) for _ in ids]
    if not rows:
        return logits
    columns = [token_id for ids in banned for token_id in ids]
    mask = torch.zeros_like(logits, dtype=torch.bool)
    mask[rows, columns] = True
    mask &= ~mask.all(-1, keepdim=True)
    return logits.masked_fill(mask, BANNED)


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Invert the cumulative distribution at `uniforms` (B,) float64 in [0, 1): logits (B, V) -> ids (B,) int64."""
    cumulative = logits.double().softmax(-1).cumsum(-1)  # (B, V)
    total = cumulative[:, -1:]  # (B, 1), 1 up to rounding
    below_total = torch.nextafter(total, torch.zeros_like(total))
    targets = torch.minimum(uniforms[:, None] * total, below_total)
    # right=True finds the first entry above the target: it rose there, so its token is not a banned one.
    return torch.searchsorted(cumulative, targets, right=True)[:, 0]


def row_generator(seed: int, prompt_index: int) -> torch.Generator:
    """The dice of one prompt: a CPU generator that depends on the seed and the prompt's index only."""
    digest = hashlib.sha256(f"{seed}/{prompt_index}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


class NgramIndex:
    """Which tokens would complete an n-gram that a row already holds, kept up to date token by token."""

    def __init__(self, n: int, token_ids: list[int]):
        self.n = n
        self.tail: tuple[int, ...] = ()  # the last n - 1 tokens
        self.followers: dict[tuple[int, ...], set[int]] = {}
        for token_id in token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        if len(self.tail) == self.n - 1:
            self.followers.setdefault(self.tail, set()).add(token_id)
        self.tail = (*self.tail, token_id)[-self.n + 1 :] if self.n > 1 else ()

    def banned(self) -> set[int]:
        return self.followers.get(self.tail, set())


class Sampler:
    """Chooses one token a row and remembers what the filters need of each row: its dice, its tokens, its n-grams."""

    def __init__(self, config: SamplingConfig, prompts: list[list[int]], first_index: int = 0):
        self.config = config
        self.generators = [row_generator(config.seed, first_index + row) for row in range(len(prompts))]
        self.prompts = prompts
        self.seen: Tensor | None = None  # (B, V) bool, made when V and the device are known
        n = config.no_repeat_ngram
        self.ngrams = [NgramIndex(n, prompt) for prompt in prompts] if n else []

    def sample(self, logits: Tensor) -> Tensor:
        """Logits (B, V), any float dtype -> the chosen ids (B,) int64 on the same device."""
        scores = self.penalised(logits.float())
        if self.config.temperature == 0.0:
            chosen = scores.argmax(-1)
        else:
            scores = top_k_filter(scores / self.config.temperature, self.config.top_k)
            scores = min_p_filter(top_p_filter(scores, self.config.top_p), self.config.min_p)
            uniforms = [torch.rand((), dtype=torch.float64, generator=one) for one in self.generators]
            chosen = draw(scores, torch.stack(uniforms).to(scores.device))
        self.note(chosen)
        return chosen

    def penalised(self, scores: Tensor) -> Tensor:
        if self.config.repetition_penalty != 1.0:
            if self.seen is None:
                self.seen = self.seen_in_prompts(scores)
            scores = penalise_repetition(scores, self.seen, self.config.repetition_penalty)
        return ban_tokens(scores, [index.banned() for index in self.ngrams])

    def seen_in_prompts(self, scores: Tensor) -> Tensor:
        seen = torch.zeros_like(scores, dtype=torch.bool)  # (B, V)
        for row, prompt in enumerate(self.prompts):
            seen[row, prompt] = True
        return seen

    def note(self, chosen: Tensor) -> None:
        if self.seen is not None:
            self.seen.scatter_(1, chosen[:, None], True)
        if self.ngrams:
            for index, token_id in zip(self.ngrams, chosen.tolist(), strict=True):
                index.append(token_id)

    def keep_rows(self, rows: list[int]) -> None:
        """Drop the other rows."""
        self.generators = [self.generators[row] for row in rows]
        self.prompts = [self.prompts[row] for row in rows]
        self.ngrams = [self.ngrams[row] for row in rows] if self.ngrams else []
        if self.seen is not None:
            self.seen = self.seen[rows]
