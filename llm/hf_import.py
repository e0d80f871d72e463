"""Make one of our checkpoints of a Hugging Face directory or of a GGUF file.

    python -m llm.hf_import path=Qwen2.5-0.5B output=runs/qwen
    python -m llm.hf_import path=SmolLM2-135M-Instruct.Q4_1.gguf output=runs/smollm2 dtype=bfloat16

Afterwards run=runs/qwen works for generation, chat and serving, and init_from=runs/qwen for training. Which families
and what is refused: docs/hugging_face.md.
"""

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig

from configs.errors import UserError, check_choice
from configs.loader import CONFIG_DIR, run_script, start_script
from configs.report_numbers import format_quantity
from llm.args import ModelConfig
from llm.hf_checkpoint import write_checkpoint
from llm.hf_directory import open_directory
from llm.hf_gguf import open_gguf
from llm.hf_source import HfSource

DTYPES = {"keep": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class HfImportConfig:
    """configs/hf_import.yaml."""

    path: str = "???"  # a directory with config.json and safetensors, or a .gguf file
    output: str = "???"  # a run directory: its checkpoints/step_00000000 is written
    dtype: str = "keep"  # of the stored weights; keep: as they are, quantised ones as float32

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, tuple(DTYPES))


def open_source(path: str) -> HfSource:
    """The model at a path, whichever format it is in."""
    if Path(path).is_dir():
        return open_directory(path)
    if not Path(path).exists():
        raise UserError(f"path={path} does not exist; give a directory with config.json or a .gguf file")
    return open_gguf(path)


def body(config: HfImportConfig) -> Path:
    """Import, and say what was made."""
    source = open_source(config.path)
    path = write_checkpoint(source, Path(config.output) / "checkpoints", DTYPES[config.dtype])
    count = sum(torch.Size(tensor.shape).numel() for _, tensor in source.tensors)
    size = sum(file.stat().st_size for file in path.iterdir())
    print(f"{path}: {source.family}, {count:,} parameters, {format_quantity(size, 'bytes')}")
    print(f"for llm.training: init_from={config.output} {' '.join(map(shlex.quote, shape_overrides(source.config)))}")
    return path


def shape_overrides(config: ModelConfig) -> list[str]:
    """The command-line overrides that give llm.training this shape."""
    # Of a group whose rope_scaling is null Hydra takes no fields for it, so a shape with scaling begins from one with.
    overrides = ["model=llama-3.2-1b"] if config.rope_scaling is not None else []
    for name, value in asdict(config).items():
        if name == "attention":  # how it is computed, not what the weights are
            continue
        if isinstance(value, dict):
            value = "{" + ",".join(f"{key}:{entry}" for key, entry in value.items()) + "}"
        overrides.append(f"model.{name}={'null' if value is None else value}")
    return overrides


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="hf_import")
def main(config: DictConfig) -> None:
    run_script(body, HfImportConfig, config)


if __name__ == "__main__":
    start_script(main, HfImportConfig, "hf_import")
