"""Make a Hugging Face directory of one of our checkpoints, for AutoModelForCausalLM, AutoTokenizer and vLLM.

    python -m llm.hf_export run=runs/quickstart output=exported/quickstart dtype=bfloat16
    python -m llm.hf_export checkpoint=runs/x/checkpoints/step_00001000 output=exported/x max_shard_gb=2

Any checkpoint does, of any layout; tensors are read and written one at a time. See docs/hugging_face.md.
"""

from dataclasses import dataclass
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig

from configs.errors import UserError, check_choice, check_positive
from configs.loader import CONFIG_DIR, run_script, start_script
from llm.hf_directory_write import write_directory
from llm.model_loading import resolve_checkpoint

DTYPES = {"keep": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class HfExportConfig:
    """configs/hf_export.yaml."""

    run: str | None = None  # a run directory: its newest whole checkpoint
    checkpoint: str | None = None  # or one checkpoint's directory
    output: str = "???"  # a directory that does not exist yet
    dtype: str = "keep"  # of the exported weights; keep: as they are stored (training saves float32)
    max_shard_gb: float = 5.0  # a larger model is cut into files of at most so many 10^9 bytes

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, tuple(DTYPES))
        check_positive(max_shard_gb=self.max_shard_gb)


def body(config: HfExportConfig) -> Path:
    """Export, and say what was made."""
    checkpoint = resolve_checkpoint(config.run, config.checkpoint)
    output = Path(config.output)
    if output.exists():
        raise UserError(f"output={output} exists; remove it or name another")
    family = write_directory(checkpoint, output, DTYPES[config.dtype], int(config.max_shard_gb * 1e9))
    print(f"{output}: {family}, from {checkpoint}")
    return output


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="hf_export")
def main(config: DictConfig) -> None:
    run_script(body, HfExportConfig, config)


if __name__ == "__main__":
    start_script(main, HfExportConfig, "hf_export")
