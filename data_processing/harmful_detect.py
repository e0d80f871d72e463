"""The harmful_detect stage: fastText classifiers for what should not be learnt (NSFW, toxicity), each with its bound.

No model ships with the code: `python -m data_processing.train_classifier` makes one from labelled documents (Dolma's
were trained on Jigsaw's toxic comments), and `harmful_detect.models.nsfw=DIR` uses it.
"""

from dataclasses import dataclass, field
from functools import cached_property

from configs.errors import UserError
from data_processing.document import Document
from data_processing.stage import Dropped, StatelessStage
from data_processing.text_classifier import TextClassifier


@dataclass
class HarmfulDetectConfig:
    """{name of a harm: directory of its model}, and the score from which a document goes."""

    models: dict[str, str] = field(default_factory=dict)
    threshold: float = 0.5
    thresholds: dict[str, float] = field(default_factory=dict)  # for single harms

    def __post_init__(self):
        for name in self.thresholds:
            if name not in self.models:
                raise UserError(
                    f"harmful_detect.thresholds has {name!r}, which harmful_detect.models lacks; add its model"
                )
        for name, bound in {"": self.threshold, **self.thresholds}.items():
            if not 0 <= bound <= 1:
                raise UserError(f"harmful_detect threshold {name}={bound} is out of range; use a score in 0..1")


class HarmfulDetect(StatelessStage):
    """Writes meta.harmful and drops documents by the first harm found; the reason is the harm's name."""

    name = "harmful_detect"

    def __init__(self, config: HarmfulDetectConfig):
        if not config.models:
            raise UserError(
                "harmful_detect.models is empty; add harmful_detect.models.nsfw=DIR"
                " (python -m data_processing.train_classifier makes one) or take the stage out"
            )
        self.config = config

    @cached_property
    def classifiers(self) -> dict[str, TextClassifier]:
        return {name: TextClassifier(path) for name, path in self.config.models.items()}

    def run(self, block: list[Document]) -> tuple[list[Document], list[Dropped]]:
        scores = {name: model.score_all(d.text for d in block) for name, model in self.classifiers.items()}
        kept, dropped = [], []
        for index, document in enumerate(block):
            mine = {name: round(float(values[index]), 4) for name, values in scores.items()}
            document.meta["harmful"] = mine
            over = [n for n, s in mine.items() if s >= self.config.thresholds.get(n, self.config.threshold)]
            if over:
                bound = self.config.thresholds.get(over[0], self.config.threshold)
                dropped.append(Dropped(document, over[0], f"score {mine[over[0]]:.3f} >= {bound}"))
            else:
                kept.append(document)
        return kept, dropped
