"""The quality_classifier stage: a fastText model of good documents against random web decides what stays.

The threshold is a score, or follows from the share of random web that is to be kept (`kept_share=0.1` keeps the best
tenth of what the model was trained against). `python -m data_processing.train_classifier` makes the model.
"""

from dataclasses import dataclass
from functools import cached_property

from configs.errors import UserError
from data_processing.document import Document
from data_processing.stage import Dropped, StatelessStage
from data_processing.text_classifier import TextClassifier


@dataclass
class QualityClassifierConfig:
    """The model's directory, and one of threshold and kept_share; with neither documents are only scored."""

    model: str = ""
    threshold: float = 0.0
    kept_share: float = 0.0

    def __post_init__(self):
        for name in ("threshold", "kept_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"quality_classifier.{name}={getattr(self, name)} is out of range; use a value in 0..1")
        if self.threshold and self.kept_share:
            raise UserError(
                f"quality_classifier.threshold={self.threshold} and kept_share={self.kept_share} both decide; set one"
            )


class QualityClassifier(StatelessStage):
    """Writes meta.quality and drops documents below the threshold."""

    name = "quality_classifier"

    def __init__(self, config: QualityClassifierConfig):
        if not config.model:
            raise UserError(
                "quality_classifier.model is empty; add quality_classifier.model=DIR"
                " (python -m data_processing.train_classifier makes one) or take the stage out"
            )
        self.config = config

    @cached_property
    def classifier(self) -> TextClassifier:
        return TextClassifier(self.config.model)

    @cached_property
    def threshold(self) -> float:
        return (
            self.classifier.threshold_for(self.config.kept_share) if self.config.kept_share else self.config.threshold
        )

    def run(self, block: list[Document]) -> tuple[list[Document], list[Dropped]]:
        kept, dropped = [], []
        for document, score in zip(block, self.classifier.score_all(d.text for d in block).tolist(), strict=True):
            document.meta["quality"] = round(score, 4)
            if score < self.threshold:
                dropped.append(Dropped(document, "low_quality", f"score {score:.3f} < {self.threshold:.3f}"))
            else:
                kept.append(document)
        return kept, dropped
