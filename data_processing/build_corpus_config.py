"""What a corpus build is made of: its settings, its stages in their order, and its identity."""

import hashlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from configs.errors import UserError, check_choice, check_positive
from data_processing.decontaminate import Decontaminate, DecontaminateConfig, files_digest
from data_processing.deduplicate import Deduplicate
from data_processing.deduplicate_lines import DeduplicateUnits, UnitConfig
from data_processing.deduplicate_near import NearConfig
from data_processing.harmful_detect import HarmfulDetect, HarmfulDetectConfig
from data_processing.html_process import HtmlProcess, HtmlProcessConfig
from data_processing.language_identification import (
    LanguageIdentification,
    LanguageIdentificationConfig,
    default_model_path,
)
from data_processing.mask_pii import MaskPii, MaskPiiConfig
from data_processing.mix import MixConfig
from data_processing.normalise import Normalise, NormaliseConfig
from data_processing.pdf_process import PdfProcess, PdfProcessConfig
from data_processing.quality_classifier import QualityClassifier, QualityClassifierConfig
from data_processing.quality_filter import QualityFilter, QualityFilterConfig
from data_processing.sources import Source, SourceConfig
from data_processing.stage import Stage

# Stages that look at a document alone, in order of cost, run in worker processes; then those with a memory, where the
# blocks meet in their order: equal texts are equal only once normalised, and memory is spent on what passed the rest.
ALONE = ("html_process", "pdf_process", "normalise", "quality_filter", "language_identification", "decontaminate")
ALONE += ("mask_pii", "harmful_detect", "quality_classifier")
WITH_MEMORY = ("deduplicate", "deduplicate_paragraphs", "deduplicate_lines")
WHOLE_CORPUS = ("deduplicate_near", "mix")  # these need all documents before the first verdict
STAGES = (*ALONE, *WITH_MEMORY, *WHOLE_CORPUS)
DEFAULT_STAGES = ("html_process", "pdf_process", "normalise", "quality_filter", "deduplicate")
RAW_SOURCES = {"html_process": ("html", "warc"), "pdf_process": ("pdf", "warc")}
ENGINES = ("local", "ray")
SUFFIXES = {"none": "", "gz": ".gz", "zst": ".zst"}


@dataclass
class BuildCorpusConfig(SourceConfig):
    """The whole build; the fields of SourceConfig choose the input."""

    output: str = "data/corpus"
    overwrite: bool = False
    engine: str = "local"
    workers: int = 1  # processes that run the stages; 1 runs them in this one
    stages: list[str] = field(default_factory=lambda: list(DEFAULT_STAGES))
    html_process: HtmlProcessConfig = field(default_factory=HtmlProcessConfig)
    pdf_process: PdfProcessConfig = field(default_factory=PdfProcessConfig)
    normalise: NormaliseConfig = field(default_factory=NormaliseConfig)
    quality_filter: QualityFilterConfig = field(default_factory=QualityFilterConfig)
    language_identification: LanguageIdentificationConfig = field(default_factory=LanguageIdentificationConfig)
    decontaminate: DecontaminateConfig = field(default_factory=DecontaminateConfig)
    mask_pii: MaskPiiConfig = field(default_factory=MaskPiiConfig)
    harmful_detect: HarmfulDetectConfig = field(default_factory=HarmfulDetectConfig)
    quality_classifier: QualityClassifierConfig = field(default_factory=QualityClassifierConfig)
    deduplicate_paragraphs: UnitConfig = field(default_factory=UnitConfig)
    deduplicate_lines: UnitConfig = field(default_factory=UnitConfig)
    deduplicate_near: NearConfig = field(default_factory=NearConfig)
    mix: MixConfig = field(default_factory=MixConfig)
    held_out_share: float = 0.0  # of the documents, by a hash of the text, to output/_held_out
    block_bytes: int = 8_000_000
    compression: str = "none"
    examples_per_reason: int = 3

    def __post_init__(self):
        super().__post_init__()
        for name in self.stages:
            check_choice("stages", name, STAGES)
        check_choice("compression", self.compression, list(SUFFIXES))
        check_choice("engine", self.engine, ENGINES)
        check_positive(block_bytes=self.block_bytes, workers=self.workers)
        if not 0 <= self.held_out_share < 1:
            raise UserError(f"held_out_share={self.held_out_share} is out of range; use a share from 0 to below 1")


def chosen(config: BuildCorpusConfig, names: tuple[str, ...]) -> list[str]:
    """Those of `names` that the config asks for, in order; readers of raw documents only where the source has some."""
    sources = {name: RAW_SOURCES.get(name, (config.source,)) for name in names}
    return [name for name in names if name in config.stages and config.source in sources[name]]


def build_stage(name: str, config: BuildCorpusConfig) -> Stage:
    """The stage of that name, with its settings."""
    if name == "deduplicate":
        return Deduplicate()
    if name in ("deduplicate_paragraphs", "deduplicate_lines"):
        return DeduplicateUnits(name.removeprefix("deduplicate_").removesuffix("s"), getattr(config, name))
    classes = {"html_process": HtmlProcess, "pdf_process": PdfProcess, "normalise": Normalise}
    classes |= {"quality_filter": QualityFilter, "language_identification": LanguageIdentification}
    classes |= {"decontaminate": Decontaminate, "mask_pii": MaskPii, "harmful_detect": HarmfulDetect}
    classes |= {"quality_classifier": QualityClassifier}
    return classes[name](getattr(config, name))


def _file_digest(path: Path) -> str:
    """A hash of a model file's content, "" when there is none (the stage says so when it runs)."""
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() if path.is_file() else ""


def _inputs_of_stages(config: BuildCorpusConfig) -> dict[str, str]:
    """Hashes of the files that stages read: models and evaluation sets."""
    digests = {}
    if "decontaminate" in config.stages:
        digests["decontaminate"] = files_digest(config.decontaminate.files)
    if "language_identification" in config.stages:
        model = config.language_identification.model
        digests["language_identification"] = _file_digest(Path(model).expanduser() if model else default_model_path())
    if "quality_classifier" in config.stages:
        digests["quality_classifier"] = _file_digest(Path(config.quality_classifier.model).expanduser() / "model.bin")
    if "harmful_detect" in config.stages:
        for name, path in config.harmful_detect.models.items():
            digests[f"harmful_detect.{name}"] = _file_digest(Path(path).expanduser() / "model.bin")
    return digests


def identity_of(config: BuildCorpusConfig, source: Source) -> dict[str, Any]:
    """What decides the output's bytes: the settings but for where, how and by how many it is made, and the input."""
    settings = asdict(config)
    for name in ("output", "overwrite", "examples_per_reason", "engine", "workers"):
        del settings[name]
    identity = {"config": settings, "input": source.identity()}
    read = _inputs_of_stages(config)
    return identity | {"stage_inputs": read} if read else identity
