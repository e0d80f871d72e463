"""The points of a scaling law, read from run directories."""

import glob
from pathlib import Path
from typing import Any

import yaml

from configs.errors import UserError
from configs.loader import load_config
from configs.run_dir import read_jsonl
from llm.args import ModelConfig
from llm.cost_model_counts import count_parameters
from llm.scaling_laws_fit import Point


def expand_runs(patterns: list[str]) -> list[Path]:
    """The run directories that patterns such as "runs/scaling-*" stand for; UserError when there is none."""
    runs = find_runs(patterns)
    if not runs:
        raise UserError(f"runs={patterns} holds no run with config.yaml and metrics.jsonl; train some, or quote a glob")
    return runs


def find_runs(patterns: list[str]) -> list[Path]:
    """The same, perhaps none."""
    found = sorted({Path(name) for pattern in patterns for name in glob.glob(str(Path(pattern).expanduser()))})
    return [path for path in found if (path / "metrics.jsonl").exists() and (path / "config.yaml").exists()]


def read_config(run: Path) -> dict[str, Any]:
    return yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))


def counted_parameters(model: ModelConfig) -> int:
    """N: parameters that a token is multiplied by, so not an input table of its own (docs/scaling_laws.md)."""
    count = count_parameters(model)
    return count.active - (0 if model.tie_embeddings else count.embedding)


def read_points(runs: list[Path], min_tokens: int) -> list[Point]:
    """Every validation from `min_tokens` training tokens on, of runs that were validated on the same windows.

    Raises UserError for runs whose tokens, windows or vocabulary differ: their losses are not comparable.
    """
    points, first = [], None
    for run in runs:
        config = read_config(run)
        data = config["data"]
        seen_by = (data["tokens"], data["tokenizer"], data["seq_len"], config["validation_tokens"])
        if first is not None and seen_by != first[1]:
            raise UserError(
                f"{run} was validated on (tokens, tokenizer, seq_len, validation_tokens) = {seen_by}, {first[0]} on "
                f"{first[1]}; give runs that share them"
            )
        first = first or (run, seen_by)
        parameters = counted_parameters(load_config(ModelConfig, config["model"]))
        for line in read_jsonl(run / "metrics.jsonl"):
            tokens = line["step"] * config["global_batch_tokens"]
            if "val_loss" in line and tokens >= min_tokens:
                points.append(Point(run.name, parameters, tokens, line["val_loss"]))
    return points
