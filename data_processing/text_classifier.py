"""fastText classifiers of two classes (Joulin et al. 2016): trained, evaluated, saved and loaded the same way by all.

A model is a directory: model.bin, and model.json with how it was made, its scores on held-out documents and the
quantiles of its scores on both classes (from which a threshold follows for any share that is to be kept).
A document is held out by a hash of its text, so that the same text never stands on both sides.
"""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from configs.errors import UserError, check_positive
from configs.run_dir import read_json, write_json_atomic
from data_processing.language_identification import import_fasttext, load_fasttext, sample_text
from data_processing.text_hash import in_share

POSITIVE, NEGATIVE = "__label__positive", "__label__negative"
QUANTILES = 1001
MARKS = re.compile(r"([^\w\s])")
TRAIN_HINT = "train one: python -m data_processing.train_classifier positives=... negatives=... output=..."


@dataclass
class ClassifierConfig:
    """fastText's settings; one thread makes training repeatable."""

    dimensions: int = 32
    epochs: int = 5
    learning_rate: float = 0.3
    word_ngrams: int = 2
    buckets: int = 200_000
    min_count: int = 1
    sample_characters: int = 4_000
    held_out_share: float = 0.1
    seed: int = 1
    threads: int = 1

    def __post_init__(self):
        check_positive(dimensions=self.dimensions, epochs=self.epochs, sample_characters=self.sample_characters)
        if not 0 < self.held_out_share < 1:
            raise UserError(f"held_out_share={self.held_out_share} is out of range; use a share between 0 and 1")


def classifier_line(text: str, characters: int) -> str:
    """The one line that the classifier sees: lower case, marks apart, no label of fastText's in it."""
    line = MARKS.sub(r" \1 ", sample_text(text, characters).lower().replace("__label__", ""))
    return " ".join(line.split())


def area_under_curve(positives: np.ndarray, negatives: np.ndarray) -> float:
    """Chance that a positive scores above a negative (ties count half): the area under the ROC curve."""
    ordered = np.sort(negatives)
    below = np.searchsorted(ordered, positives, side="left") + np.searchsorted(ordered, positives, side="right")
    return float(below.mean() / (2 * negatives.size))


def evaluate_scores(positives: np.ndarray, negatives: np.ndarray, threshold: float = 0.5) -> dict[str, float]:
    """Precision, recall, F1 and accuracy at a threshold, and the area under the ROC curve."""
    hits, false = int((positives >= threshold).sum()), int((negatives >= threshold).sum())
    precision, recall = hits / max(hits + false, 1), hits / positives.size
    return {
        "threshold": threshold,
        "precision": precision,
        "recall": recall,
        "f1": 2 * precision * recall / max(precision + recall, 1e-12),
        "accuracy": (hits + negatives.size - false) / (positives.size + negatives.size),
        "area_under_curve": area_under_curve(positives, negatives),
        "positives": positives.size,
        "negatives": negatives.size,
    }


class TextClassifier:
    """A loaded model: `score` gives the probability of the positive class in 0..1."""

    def __init__(self, directory: str | Path):
        directory = Path(directory).expanduser()
        self.facts = read_json(directory / "model.json") if (directory / "model.json").exists() else {}
        self.model = load_fasttext(directory / "model.bin", TRAIN_HINT)
        if set(self.model.get_labels()) != {POSITIVE, NEGATIVE}:
            raise UserError(f"the model in {directory} has labels {self.model.get_labels()}; {TRAIN_HINT}")
        self.characters = self.facts.get("config", {}).get("sample_characters", ClassifierConfig.sample_characters)

    def score_all(self, texts: Iterable[str]) -> np.ndarray:
        """(texts,) float64 scores."""
        lines = [classifier_line(text, self.characters) for text in texts]
        if not lines:
            return np.zeros(0)
        labels, scores = self.model.predict(lines, k=2)
        found = [
            dict(zip(names, values, strict=True)).get(POSITIVE, 0.0)
            for names, values in zip(labels, scores, strict=True)
        ]
        return np.clip(np.array(found, dtype=np.float64), 0.0, 1.0)

    def score(self, text: str) -> float:
        return float(self.score_all([text])[0])

    def threshold_for(self, kept_share: float) -> float:
        """The score that this share of the negatives ("random web") reaches, from the held-out quantiles."""
        quantiles = self.facts.get("negative_quantiles")
        if not quantiles:
            raise UserError(
                f"the model has no negative_quantiles in model.json, so kept_share={kept_share} has no"
                " threshold; set threshold=... or train it anew"
            )
        return float(np.quantile(np.array(quantiles), 1 - kept_share))


def _split(texts: Iterable[str], share: float) -> tuple[list[str], list[str]]:
    train, held_out = [], []
    for text in texts:
        (held_out if in_share(text, share) else train).append(text)
    return train, held_out


def train_classifier(
    positives: Iterable[str], negatives: Iterable[str], output: str | Path, config: ClassifierConfig
) -> dict[str, Any]:
    """Train on two streams of texts, evaluate on those held out, write the model directory and return model.json."""
    sides = [_split(texts, config.held_out_share) for texts in (positives, negatives)]
    for name, (train, held_out) in zip(("positives", "negatives"), sides, strict=True):
        if not train or not held_out:
            counts = f"{len(train)} to train on and {len(held_out)} held out"
            raise UserError(f"{name} give {counts}; a classifier needs both, so give more documents")
    output = Path(output).expanduser()
    output.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "train.txt"
        with open(path, "w", encoding="utf-8") as file:
            for label, (train, _) in zip((POSITIVE, NEGATIVE), sides, strict=True):
                file.writelines(f"{label} {classifier_line(text, config.sample_characters)}\n" for text in train)
        model = import_fasttext().train_supervised(
            input=str(path), dim=config.dimensions, epoch=config.epochs, lr=config.learning_rate,
            wordNgrams=config.word_ngrams, bucket=config.buckets, minCount=config.min_count, seed=config.seed,
            thread=config.threads, loss="softmax", verbose=0,
        )  # fmt: skip
        model.save_model(str(output / "model.bin"))
    write_json_atomic(output / "model.json", {"config": asdict(config)})
    classifier = TextClassifier(output)
    scores = [classifier.score_all(held_out) for _, held_out in sides]
    ranks = np.linspace(0, 1, QUANTILES)
    facts = {
        "config": asdict(config),
        "trained_on": {"positives": len(sides[0][0]), "negatives": len(sides[1][0])},
        "held_out": evaluate_scores(*scores),
        "positive_quantiles": np.quantile(scores[0], ranks).round(6).tolist(),
        "negative_quantiles": np.quantile(scores[1], ranks).round(6).tolist(),
    }
    write_json_atomic(output / "model.json", facts)
    return facts
