"""Which of two models predicts a text better, and how sure that is: bits per byte of the same bytes, paired.

Both models score the same documents; their tokenizers may differ, since what is compared are nats by document, or by
blocks of bytes of it, and bytes are the same for both. The interval is the paired percentile bootstrap (Efron &
Tibshirani 1993; for language models Card et al. 2020): units are drawn with replacement, both models on the same draw,
so that how hard a unit is cancels out. Units are a source's documents, or the blocks where it has few documents:
neighbouring blocks are alike, so an interval from blocks is a little too narrow.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from configs.errors import UserError, check_choice, check_positive
from llm.evaluation_windows import ScoredText

UNITS = ("auto", "document", "block")
MIN_DOCUMENTS = 20  # with fewer of them in a source, "auto" draws blocks
MIN_UNITS = 8  # with fewer there are too few different draws for an interval to mean anything
DRAWN_AT_ONCE = 1 << 22  # numbers of a bootstrap that are in memory together


@dataclass(frozen=True)
class BootstrapConfig:
    """How many times units are drawn, and how much of the draws the interval holds."""

    samples: int = 10_000
    confidence: float = 0.95
    unit: str = "auto"
    seed: int = 1337

    def __post_init__(self) -> None:
        check_positive(samples=self.samples)
        check_choice("unit", self.unit, UNITS)
        if not 0.0 < self.confidence < 1.0:
            raise UserError(f"confidence={self.confidence} must lie between 0 and 1; use 0.95")


@dataclass
class Units:
    """What is drawn: (n,) float64 nats of the first and of the second model, and the bytes, the same for both."""

    first: np.ndarray
    second: np.ndarray
    num_bytes: np.ndarray
    kind: str

    @property
    def difference_bits(self) -> np.ndarray:
        return (self.first - self.second) / math.log(2)


@dataclass(frozen=True)
class Comparison:
    """Bits per byte of both models on one source, their difference first - second, and its interval low..high.

    A difference below zero means that the first model predicts the source better. With fewer than
    MIN_UNITS units low and high are None.
    """

    source: str
    first: float
    second: float
    difference: float
    low: float | None
    high: float | None
    num_units: int
    unit: str
    num_bytes: int

    @property
    def better(self) -> str:
        """The model that the interval speaks for: "first", "second" or "undecided"."""
        if self.low is None or self.low <= 0.0 <= self.high:
            return "undecided"
        return "first" if self.high < 0.0 else "second"


def pair_units(first: Iterable[ScoredText], second: Iterable[ScoredText], unit: str) -> dict[str, Units]:
    """The units of each source, from both models' scores of the same texts in the same order."""
    pairs: dict[str, list[tuple[ScoredText, ScoredText]]] = defaultdict(list)
    for one, other in zip(first, second, strict=True):
        assert one.text == other.text, f"{one.text.name} is paired with {other.text.name}"
        pairs[one.text.source].append((one, other))
    return {source: make_units(of_source, unit) for source, of_source in pairs.items()}


def make_units(pairs: list[tuple[ScoredText, ScoredText]], unit: str) -> Units:
    if unit == "auto":
        unit = "document" if len(pairs) >= MIN_DOCUMENTS else "block"
    if unit == "document":
        nats = np.array([(one.nats, other.nats) for one, other in pairs])  # (n, 2)
        return Units(nats[:, 0], nats[:, 1], np.array([float(one.text.num_bytes) for one, _ in pairs]), unit)
    return Units(
        np.concatenate([one.block_nats for one, _ in pairs]),
        np.concatenate([other.block_nats for _, other in pairs]),
        np.concatenate([one.block_bytes for one, _ in pairs]).astype(np.float64),
        unit,
    )


def compare(sources: dict[str, Units], config: BootstrapConfig) -> list[Comparison]:
    """A line a source, and with several sources one for all; there, units are drawn within each source."""
    generator = np.random.default_rng(config.seed)
    draws = {name: draw_sums(units, config.samples, generator) for name, units in sources.items()}
    lines = [summarise(name, [units], draws[name], config.confidence) for name, units in sources.items()]
    if len(sources) > 1:
        lines.append(summarise("all", list(sources.values()), sum(draws.values()), config.confidence))
    return lines


def draw_sums(units: Units, samples: int, generator: np.random.Generator) -> np.ndarray:
    """Sums of (bits of difference, bytes) over as many units as there are, drawn with replacement: (samples, 2)."""
    columns = np.stack((units.difference_bits, units.num_bytes), axis=1)  # (n, 2)
    n = len(columns)
    at_once = max(1, DRAWN_AT_ONCE // n)
    parts = []
    for start in range(0, samples, at_once):
        times = generator.multinomial(n, np.full(n, 1 / n), size=min(at_once, samples - start))  # (s, n)
        parts.append(times @ columns)
    return np.concatenate(parts)


def summarise(source: str, units: list[Units], draws: np.ndarray, confidence: float) -> Comparison:
    num_bytes = sum(part.num_bytes.sum() for part in units)
    first, second = (sum(nats.sum() for nats in model) / math.log(2) / num_bytes
                     for model in ([part.first for part in units], [part.second for part in units]))  # fmt: skip
    num_units = sum(len(part.first) for part in units)
    low = high = None
    if num_units >= MIN_UNITS:
        tail = (1.0 - confidence) / 2
        low, high = (float(edge) for edge in np.quantile(draws[:, 0] / draws[:, 1], (tail, 1.0 - tail)))
    kinds = sorted({part.kind for part in units})
    return Comparison(
        source, float(first), float(second), float(first - second), low, high, num_units, " and ".join(kinds),
        int(num_bytes),
    )  # fmt: skip
