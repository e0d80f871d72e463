"""The mix: how often each source's documents come, for a token budget shared by weight, and their shuffled order.

A source with weight w gets w of the budget, which is so many epochs of it; more than `max_epochs` are cut and the rest
of its share stays unused (reported, never filled up with others). A share of an epoch takes documents evenly spread
over the source, by carrying over what is owed, so that the sum is right to one document.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from configs.errors import UserError, check_positive


@dataclass
class MixConfig:
    """Weights by source (none: as they come), the budget, and the shuffle."""

    weights: dict[str, float] = field(default_factory=dict)
    tokens: int = 0  # 0: as many as the sources hold
    max_epochs: float = 4.0  # Muennighoff et al. 2023: repeats beyond four teach little
    shuffle: bool = True
    seed: int = 1

    def __post_init__(self):
        check_positive(**{"mix.max_epochs": self.max_epochs})
        if self.tokens < 0 or any(weight < 0 for weight in self.weights.values()):
            raise UserError(f"mix.tokens={self.tokens} mix.weights={self.weights}: use numbers of 0 or more")
        if self.weights and not sum(self.weights.values()):
            raise UserError(f"mix.weights={self.weights} add up to 0; give one source a weight")


@dataclass(slots=True)
class SourceShare:
    """What one source gets; tokens are bytes / bytes_per_token."""

    weight: float
    available_tokens: float
    budget_tokens: float
    epochs: float  # after the cap
    capped: bool


def plan_mix(config: MixConfig, available_bytes: dict[str, int], bytes_per_token: float) -> dict[str, SourceShare]:
    """Each source's share; UserError for a weight of a source that is not there."""
    available = {name: size / bytes_per_token for name, size in available_bytes.items()}
    total = sum(available.values())
    weights = config.weights or {name: tokens / max(total, 1) for name, tokens in available.items()}
    for name in weights:
        if name not in available:
            raise UserError(f"mix.weights has {name!r}; the sources are {', '.join(sorted(available))}")
    scale, budget = sum(weights.values()), config.tokens or total
    shares = {}
    for name, tokens in available.items():
        wanted = budget * weights.get(name, 0.0) / scale
        epochs = wanted / tokens if tokens else 0.0
        shares[name] = SourceShare(
            weights.get(name, 0.0) / scale, tokens, wanted, min(epochs, config.max_epochs), epochs > config.max_epochs
        )
    return shares


class CopyCounter:
    """How many copies of the next document of a source: epochs are paid out by carrying over what is owed."""

    def __init__(self, shares: dict[str, SourceShare]):
        self.shares = shares
        self.owed = dict.fromkeys(shares, 0.0)

    def copies(self, source: str, size: int) -> int:
        """Copies of a document of `size` bytes."""
        self.owed[source] += self.shares[source].epochs * size
        count = max(round(self.owed[source] / size), 0) if size else 0
        self.owed[source] -= count * size
        return count


class Shuffler:
    """A shuffle in bounded memory: each document goes to a random bucket, each bucket is permuted in memory."""

    def __init__(self, config: MixConfig, buckets: int):
        self.config, self.buckets = config, buckets
        self.rng = np.random.default_rng(config.seed)

    def bucket(self, done: float) -> int:
        """The bucket of the next document; `done` (0..1) of the bytes came before it, which decides when unshuffled."""
        if not self.config.shuffle:
            return min(int(done * self.buckets), self.buckets - 1)
        return int(self.rng.integers(self.buckets))

    def order(self, bucket: int, count: int) -> np.ndarray:
        """(count,) int64: the order of a bucket's documents."""
        if not self.config.shuffle:
            return np.arange(count)
        return np.random.default_rng([self.config.seed, bucket]).permutation(count)


def describe_shares(shares: dict[str, SourceShare]) -> dict[str, Any]:
    """The shares as they go into stats.json."""
    return {name: asdict(share) for name, share in shares.items()}
