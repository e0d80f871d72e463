"""The language_identification stage: fastText's lid.176 says which language a text is in, and others go.

The model (Joulin et al. 2016; 176 languages) has habits that are handled here: capitals mislead it ("it" for English
in ALL CAPS), so shouted text is read in lower case; it calls an empty text "en", so a text without letters is "und";
its score can pass 1, so it is cut there. language_identification_model fetches the compressed model (0.9 MB); the large
one, lid.176.bin, goes by `language_identification.model=PATH`.
"""

import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from configs.errors import UserError, check_positive, missing_extra
from data_processing.document import Document
from data_processing.stage import StatelessStage

MODEL_NAME = "lid.176.ftz"
UNKNOWN = "und"
LABEL = "__label__"
SHOUTED_SHARE = 0.6  # capitals among the letters that have case


@dataclass
class LanguageIdentificationConfig:
    """Which languages stay; an empty list keeps all and only writes meta.language."""

    languages: list[str] = field(default_factory=list)
    min_score: float = 0.5
    model: str = ""  # path of lid.176.ftz or lid.176.bin; "": where language_identification_model puts it
    sample_characters: int = 2_000  # of a longer text, half from its start and half from its middle

    def __post_init__(self):
        check_positive(**{"language_identification.sample_characters": self.sample_characters})
        if not 0 <= self.min_score <= 1:
            raise UserError(f"language_identification.min_score={self.min_score} is out of range; use a value in 0..1")


def default_model_path() -> Path:
    """Where the model lies in this Python environment."""
    return Path(sys.prefix) / "share" / "mew" / MODEL_NAME


def import_fasttext():
    """fasttext, or the UserError that names the install command."""
    try:
        import fasttext
    except ImportError as error:
        raise missing_extra("fasttext-community", "data") from error
    return fasttext


def load_fasttext(path: str | Path, fix: str):
    """A fastText model; a missing or broken file is a UserError that ends in `fix`."""
    if not Path(path).is_file():
        raise UserError(f"the model {path} does not exist; {fix}")
    fasttext = import_fasttext()
    try:
        return fasttext.load_model(str(path))
    except (ValueError, RuntimeError, MemoryError) as error:
        raise UserError(f"the model {path} is no fastText model ({error}); {fix}") from error


def sample_text(text: str, characters: int) -> str:
    """One line of the text for a classifier: all of it, or its start and middle."""
    if len(text) > characters:
        middle, half = len(text) // 2, characters // 2
        text = text[:half] + " " + text[middle : middle + half]
    return " ".join(text.split())


def quieten(line: str) -> str:
    """Text in capitals in lower case; other text as it is."""
    upper, lower = sum(map(str.isupper, line)), sum(map(str.islower, line))
    return line.lower() if upper > SHOUTED_SHARE * (upper + lower) else line


class LanguageIdentifier:
    """(language, score in 0..1) of texts; the model is loaded at the first call, in the process that calls."""

    def __init__(self, model: str = "", sample_characters: int = 2_000):
        self.path = Path(model).expanduser() if model else default_model_path()
        self.sample_characters = sample_characters

    @cached_property
    def model(self):
        return load_fasttext(self.path, "run: python -m data_processing.language_identification_model")

    def identify(self, text: str) -> tuple[str, float]:
        """ISO 639 code and score; ("und", 0.0) for a text without letters."""
        line = sample_text(text, self.sample_characters)
        if not any(map(str.isalpha, line)):
            return UNKNOWN, 0.0
        labels, scores = self.model.predict(
            [quieten(line)]
        )  # a list: predict on a string breaks under NumPy 2 in some versions
        return labels[0][0].removeprefix(LABEL), min(max(float(scores[0][0]), 0.0), 1.0)


class LanguageIdentification(StatelessStage):
    """Writes meta.language and meta.language_score, and drops what is not in the wanted languages."""

    name = "language_identification"

    def __init__(self, config: LanguageIdentificationConfig):
        self.config = config
        self.identifier = LanguageIdentifier(config.model, config.sample_characters)
        self.counts: Counter = Counter()

    def judge(self, document: Document) -> tuple[str, str]:
        language, score = self.identifier.identify(document.text)
        document.meta["language"], document.meta["language_score"] = language, round(score, 4)
        self.counts[f"language_{language}"] += 1
        wanted = self.config.languages
        if not wanted:
            return "", ""
        if language not in wanted:
            return "other_language", f"{language} {score:.2f}, wanted {', '.join(wanted)}"
        if score < self.config.min_score:
            return "unsure_language", f"{language} {score:.2f} < min_score={self.config.min_score}"
        return "", ""

    def take_counts(self) -> Counter:
        taken, self.counts = self.counts, Counter()
        return taken
