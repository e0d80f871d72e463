"""What the docs' figures are drawn from: a run, its twins, its tokens and its model, each read when it is needed."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from configs.errors import UserError, check_positive
from configs.loader import load_config
from llm.args import ModelConfig
from llm.data_loader import ValidationSet, open_sources
from llm.evaluation import evaluate
from llm.evaluation_load import Loaded, load_for_evaluation
from llm.evaluation_text import Text, validation_texts
from llm.figures_training import Run, Twin
from llm.kv_cache import KVCache
from llm.scaling_laws_points import find_runs, read_config
from llm.token_files import TokenMeta, find_sources, read_meta
from parallel.mesh import choose_device


@dataclass
class FiguresConfig:
    """Everything that `python -m llm.figures` takes."""

    run: str = "runs/figures"  # the run that most figures are of
    twins: list[str] = field(default_factory=lambda: ["runs/figures-kv*"])  # the same model with fewer kv heads
    scaling: list[str] = field(default_factory=lambda: ["runs/scaling-*"])  # runs of several sizes, constant rate
    scaling_min_tokens: int = 1_500_000
    output: str = "docs/images"
    only: list[str] = field(default_factory=list)  # names of figures; empty: all
    prompt: str = "One morning"
    text: str = "The function returns the first of the values that are given, or the value that it was given first."
    shapes: list[str] = field(
        default_factory=lambda: ["llama-3.1-8b", "qwen3-8b", "qwen3-30b-a3b", "llama-3.2-1b", "smollm2-135m"]
    )  # of configs/model, whose caches are compared
    new_tokens: int = 300
    temperature: float = 0.8
    seed: int = 1337
    max_bytes: int = 60_000  # of each source's validation text
    max_tokens: int = 32_768  # of validation windows
    context_targets: int = 256
    device: str = "auto"

    def __post_init__(self) -> None:
        check_positive(
            max_bytes=self.max_bytes, max_tokens=self.max_tokens, context_targets=self.context_targets,
            new_tokens=self.new_tokens, scaling_min_tokens=self.scaling_min_tokens,
        )  # fmt: skip


class Material:
    """Lazy: a figure that cannot be drawn fails alone, with a UserError that says what is missing."""

    def __init__(self, config: FiguresConfig):
        self.config = config
        self.path = Path(config.run)
        if not (self.path / "config.yaml").exists():
            raise UserError(f"run={config.run} is not a run directory; train one (docs/evaluation.md) or name another")

    @cached_property
    def run(self) -> Run:
        return read_run(self.path)

    @cached_property
    def runs(self) -> list[Run]:
        """The run and its twins."""
        return [self.run, *(read_run(path) for path in find_runs(self.config.twins) if path != self.path)]

    @cached_property
    def model_config(self) -> ModelConfig:
        return load_config(ModelConfig, self.run.config["model"])

    @property
    def seq_len(self) -> int:
        """Training's window."""
        return self.run.config["data"]["seq_len"]

    @cached_property
    def loaded(self) -> Loaded:
        return load_for_evaluation(str(self.path), None, choose_device(self.config.device, local_rank=0))

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return self.loaded.autocast_dtype("auto")

    @property
    def tokens(self) -> str:
        return self.run.config["data"]["tokens"]

    @cached_property
    def metas(self) -> dict[str, TokenMeta]:
        return {name: read_meta(path) for name, path in find_sources(self.tokens).items()}

    @cached_property
    def texts(self) -> list[Text]:
        """Validation documents, `max_bytes` of each source."""
        return list(validation_texts(self.tokens, self.loaded.tokenizer, self.config.max_bytes))

    def twins(self) -> list[Twin]:
        """The run and its twins, largest cache first; UserError when they differ in more than their kv heads."""
        twins = []
        for run in self.runs:
            model = load_config(ModelConfig, run.config["model"])
            other = {k: v for k, v in run.config["model"].items() if k != "num_kv_heads"}
            same = {k: v for k, v in self.run.config["model"].items() if k != "num_kv_heads"}
            if other != same:
                raise UserError(f"twins: {run.name} differs from {self.run.name} in more than model.num_kv_heads")
            shape = (1, 16, model.num_kv_heads, model.head_dim)
            cache = KVCache(model.num_layers, shape, torch.float32, torch.device("cpu"))
            twins.append(Twin(run, model, cache.num_bytes // 16))
        return sorted(twins, key=lambda twin: -twin.cache_bytes)

    def loss_by_position(self, seq_len: int) -> list[dict[str, Any]]:
        """PositionLoss fields of validation windows of this length."""
        loaded, masking = self.loaded, self.run.config["data"]["document_masking"]
        sources = list(open_sources(self.tokens, "val", loaded.tokenizer.sha256).values())
        validation = ValidationSet(sources, seq_len, self.config.max_tokens, masking)
        batches = validation.batches(16)
        found = evaluate(loaded.model, batches, seq_len, validation.bytes_per_token, loaded.device, self.autocast_dtype)
        return found.loss_by_position


def read_run(path: Path) -> Run:
    return Run.read(path, read_config(path))
