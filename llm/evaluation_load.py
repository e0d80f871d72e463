"""What every evaluation script needs of a checkpoint: the model, its tokenizer, and how it was trained."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from configs.errors import UserError
from llm.bpe_tokenizer import Tokenizer
from llm.model_loading import choose_dtype, load_model, resolve_checkpoint
from llm.transformer import Transformer


@dataclass
class Loaded:
    """A checkpoint ready to be evaluated; `run_dir` is None for one that does not lie in a run."""

    path: Path
    run_dir: Path | None
    model: Transformer
    tokenizer: Tokenizer
    state: dict[str, Any]
    device: torch.device

    def check_seq_len(self, seq_len: int | None) -> int:
        """The window to evaluate with: training's, or the given one if the model can hold it."""
        seq_len = seq_len or self.state["config"]["data"]["seq_len"]
        if seq_len > self.model.config.max_seq_len:
            raise UserError(
                f"seq_len={seq_len} must not exceed the model's max_seq_len={self.model.config.max_seq_len}"
            )
        return seq_len

    def autocast_dtype(self, dtype: str) -> torch.dtype | None:
        """What products run in: weights are float32, as in training's own validation."""
        chosen = choose_dtype(dtype, self.device)
        return chosen if chosen == torch.bfloat16 else None


def load_for_evaluation(
    run: str | None, checkpoint: str | None, device: torch.device, dtype: torch.dtype = torch.float32
) -> Loaded:
    """A run's newest checkpoint or the one named; UserError when there is none or it is damaged."""
    path = resolve_checkpoint(run, checkpoint)
    model, tokenizer, state = load_model(path, device, dtype)
    run_dir = Path(run) if run is not None else path.resolve().parent.parent
    return Loaded(path, run_dir if (run_dir / "config.yaml").exists() else None, model, tokenizer, state, device)


def load_named(where: str, device: torch.device) -> Loaded:
    """The same for a directory that may be a run or a checkpoint."""
    is_run = (Path(where) / "checkpoints").is_dir()
    return load_for_evaluation(where if is_run else None, None if is_run else where, device)
