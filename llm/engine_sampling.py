"""The next token of every row of a batch, each row by its own settings, with its exact log-probability.

The filters are llm/sampling.py's, in its order; here each takes one value a row. A row's result does not depend on what
the others ask for: a filter that only some need is computed for all and changes nothing where it is off.
R rows, V ids. Log-probabilities and masses are of softmax(scores / temperature) after penalties and bans.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llm.sampling import BANNED, SamplingConfig, draw


@dataclass
class SlotSettings:
    """The settings of every slot on the device: a table (5, slots) float32, one row for each property below."""

    table: Tensor

    @classmethod
    def make(cls, num_slots: int, device: torch.device) -> "SlotSettings":
        off = torch.tensor([[0.0], [0.0], [1.0], [0.0], [1.0]], device=device)
        return cls(off.repeat(1, num_slots))

    def set(self, slots: Tensor, numbers: Tensor) -> None:
        """numbers (5, n) of the slots (n,) int64, as `setting_numbers` gives them, on the device."""
        self.table.index_copy_(1, slots, numbers.float())

    def rows(self, slots: Tensor) -> "SlotSettings":
        return SlotSettings(self.table[:, slots])

    @property
    def temperature(self) -> Tensor:
        return self.table[0]

    @property
    def top_k(self) -> Tensor:
        return self.table[1].long()

    @property
    def top_p(self) -> Tensor:
        return self.table[2]

    @property
    def min_p(self) -> Tensor:
        return self.table[3]

    @property
    def penalty(self) -> Tensor:
        return self.table[4]


def setting_numbers(sampling: SamplingConfig) -> list[float]:
    """A column of SlotSettings' table."""
    return [sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.repetition_penalty]


@dataclass(frozen=True)
class SamplingMode:
    """What a step's requests need, known to the host: `draws` any temperature above 0, `truncates` any filter."""

    draws: bool = False
    truncates: bool = False

    @classmethod
    def of(cls, sampling: list[SamplingConfig]) -> "SamplingMode":
        drawing = [s for s in sampling if s.temperature > 0]
        return cls(bool(drawing), any(s.top_k or s.top_p < 1 or s.min_p > 0 for s in drawing))


@dataclass
class Sampled:
    """What R rows have drawn.

    packed: (R, 3) float64, ids, log-probabilities and kept masses: what the host reads of most rows, in one copy.
    scores: (R, V) after penalties; temperatures: (R,), 0 for the likeliest; log_norms: (R,) of the scaled scores.
    """

    packed: Tensor
    scores: Tensor
    temperatures: Tensor
    log_norms: Tensor

    def first(self, count: int) -> "Sampled":
        """The first rows alone."""
        return Sampled(*(values[:count] for values in vars(self).values()))

    def alternatives(self, count: int) -> tuple[Tensor, Tensor]:
        """The `count` likeliest ids (R, count) and their log-probabilities, best first."""
        values, ids = self.scores.float().topk(min(count, self.scores.shape[1]), dim=-1)
        return ids, values / divisors(self.temperatures)[:, None] - self.log_norms[:, None]


def divisors(temperatures: Tensor) -> Tensor:
    """What scores are divided by: the temperatures, and 1 where the likeliest token is taken."""
    return torch.where(temperatures == 0, 1.0, temperatures)


def sample_rows(scores: Tensor, settings: SlotSettings | None, uniforms: Tensor, mode: SamplingMode) -> Sampled:
    """Scores (R, V) float32 after penalties, uniforms (R,) float64 in [0, 1); settings of the rows, if any draws."""
    if not mode.draws:
        return likeliest(scores)
    greedy = settings.temperature == 0
    scaled = scores / divisors(settings.temperature)[:, None]
    log_norms = torch.logsumexp(scaled, dim=-1)  # (R,)
    token_ids = scaled.argmax(-1)
    kept_masses, kept = torch.ones_like(log_norms), scaled
    if mode.truncates:
        kept = truncate(scaled, settings)
        masses = (torch.logsumexp(kept, dim=-1) - log_norms).exp()
        kept_masses = torch.where(greedy | (kept == scaled).all(-1), 1.0, masses)
    token_ids = torch.where(greedy, token_ids, draw(kept, uniforms))
    log_probs = scaled.gather(1, token_ids[:, None])[:, 0] - log_norms
    packed = torch.stack((token_ids.double(), log_probs.double(), kept_masses.double()), dim=1)
    return Sampled(packed, scores, settings.temperature, log_norms)


def likeliest(scores: Tensor) -> Sampled:
    """sample_rows where every row is greedy."""
    log_norms = torch.logsumexp(scores, dim=-1)  # (R,)
    highest, token_ids = scores.max(dim=-1)
    packed = torch.stack((token_ids.double(), (highest - log_norms).double(), torch.ones_like(log_norms).double()), 1)
    return Sampled(packed, scores, torch.zeros_like(log_norms), log_norms)


def sample_rows_fused(scores: Tensor, slots: Tensor, uniforms: Tensor, tables: Any, mode: SamplingMode) -> Sampled:
    """The same by kernel/sampling, which also writes tables.last_tokens (tables: the EngineRunner).

    Its sums are a row's own, so that company changes no bit; filters mask scores, and what they keep is drawn from and
    summed by the same kernel.
    """
    from kernel.sampling import RowInputs, choose_tokens

    temperatures = tables.settings.temperature
    rows = RowInputs(slots, uniforms, temperatures, tables.last_tokens)
    packed, log_norms = choose_tokens(scores, rows, mode.draws)
    own = temperatures[slots]
    if mode.truncates:
        settings = tables.settings.rows(slots)
        kept = scores.masked_fill(truncate(scores.float() / divisors(own)[:, None], settings) == BANNED, BANNED)
        kept = torch.where((own == 0)[:, None], scores, kept)
        packed, kept_norms = choose_tokens(kept, rows, mode.draws)
        gained = (kept_norms - log_norms).double()  # 0 where nothing is dropped
        packed = torch.stack((packed[:, 0], packed[:, 1] + gained, gained.exp()), dim=1)
    return Sampled(packed, scores, own, log_norms)


def truncate(scaled: Tensor, settings: SlotSettings) -> Tensor:
    """top-k, then top-p of what is left, then min-p, a value a row: banned scores become -inf, (R, V)."""
    V = scaled.shape[1]
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    last = torch.where(settings.top_k == 0, V, settings.top_k).clamp_max(V) - 1
    smallest = ordered.gather(1, last[:, None])  # (R, 1): ties with the k-th stay
    ordered = ordered.masked_fill(ordered < smallest, BANNED)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # the mass of the tokens above this one
    dropped = (before >= settings.top_p[:, None]) & (settings.top_p < 1)[:, None]
    dropped |= probabilities < settings.min_p[:, None] * probabilities[:, :1]
    dropped |= ordered == BANNED
    dropped[:, 0] = False  # rounding must not take the last token left
    return scaled.masked_fill(torch.empty_like(dropped).scatter_(1, order, dropped), BANNED)


def penalise_rows(scores: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Scores (R, V) of tokens in `seen` (R, V) bool, divided by a row's penalty (R,) if positive, else multiplied."""
    penalty = penalty[:, None]
    return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
