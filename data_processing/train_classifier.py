"""Train a fastText classifier for harmful_detect or quality_classifier from two sets of documents.

    python -m data_processing.train_classifier positives=data/good negatives=data/web output=data/models/quality

Positives are what the score shall be high for: good documents for quality_classifier, harmful ones for harmful_detect.
Both are JSONL documents (a file, a directory, a glob). Prints the scores on held-out documents.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import hydra
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from configs.errors import UserError
from configs.loader import CONFIG_DIR, run_script, start_script
from data_processing.document import read_documents
from data_processing.text_classifier import ClassifierConfig, train_classifier


@dataclass
class TrainClassifierConfig:
    """Where the documents are, where the model goes, and how it is trained."""

    positives: str = ""
    negatives: str = ""
    output: str = "data/models/classifier"
    max_documents: int = 0  # of each side; 0 is no limit
    classifier: ClassifierConfig = field(default_factory=ClassifierConfig)

    def __post_init__(self):
        for name in ("positives", "negatives"):
            if not getattr(self, name):
                raise UserError(f"{name} is empty; add {name}=PATH of JSONL documents")


def read_texts(path: str, limit: int) -> Iterator[str]:
    """The documents' texts, at most `limit` of them (0: all)."""
    return (document.text for document in islice(read_documents(path), limit or None))


def body(config: TrainClassifierConfig) -> dict[str, Any]:
    """Train, write the model and print how it does."""
    positives, negatives = (read_texts(path, config.max_documents) for path in (config.positives, config.negatives))
    facts = train_classifier(positives, negatives, config.output, config.classifier)
    table = Table("on held-out documents", "")
    for name, value in facts["held_out"].items():
        table.add_row(name, f"{value:.4f}" if isinstance(value, float) else str(value))
    Console().print(table)
    Console().print(f"{config.output}/model.bin and model.json")
    return facts


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="train_classifier")
def main(config: DictConfig) -> None:
    run_script(body, TrainClassifierConfig, config)


if __name__ == "__main__":
    start_script(main, TrainClassifierConfig, "train_classifier")
