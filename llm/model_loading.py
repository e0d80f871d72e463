"""From a checkpoint directory to a model and its tokenizer, ready to generate or to be evaluated.

The checkpoint alone is enough: state.json holds the resolved config, the tokenizer's files lie beside it.
"""

from pathlib import Path
from typing import Any

import torch

from configs.errors import UserError
from configs.loader import load_config
from llm.args import ModelConfig
from llm.bpe_tokenizer import Tokenizer
from llm.checkpoint import copy_model_tensors, load_checkpoint
from llm.checkpoint_pieces import MODEL_PREFIX
from llm.lora import LoraConfig, merge
from llm.transformer import Transformer
from llm.transformer_init import transformer_on_meta
from parallel.sharded_checkpoint_manifest import find_checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """ "auto" is bfloat16 on a GPU and float32 on a CPU, where bfloat16 is slower."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return DTYPES[name]


def resolve_checkpoint(run: str | None, checkpoint: str | None) -> Path:
    """The checkpoint directory that a script's `run=` or `checkpoint=` names; for a run its newest whole one."""
    if (run is None) == (checkpoint is None):
        raise UserError(f"run={run} and checkpoint={checkpoint}: give exactly one, such as run=runs/quickstart")
    if checkpoint is not None:
        path = Path(checkpoint)
        if not path.is_dir():
            raise UserError(f"checkpoint={checkpoint} is not a directory; give one such as checkpoints/step_00001000")
        return path
    if not Path(run).is_dir():
        raise UserError(f"run={run} is not a directory; give a run such as runs/quickstart (ls runs)")
    found = find_checkpoint(Path(run) / "checkpoints")
    if found is None:
        raise UserError(f"run={run} has no checkpoint yet; train it first or wait for its first save")
    return found


def load_model(
    path: str | Path, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Transformer, Tokenizer, dict[str, Any]]:
    """The model in `dtype` on `device`, in evaluation mode, its tokenizer, and the checkpoint's state.

    Only the model's tensors are read; adapters are merged into the weights. Raises UserError when the checkpoint is
    damaged or does not fit its config.
    """
    path = Path(path)
    tensors, state = load_checkpoint(path, prefix=MODEL_PREFIX)
    tensors = merge(tensors, load_config(LoraConfig, state["config"].get("lora") or {}))
    model = empty_model(load_config(ModelConfig, state["config"]["model"]), device, dtype)
    copy_model_tensors(model, tensors)
    return model.eval(), Tokenizer.load(path), state


def empty_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Transformer:
    """Parameters where they will be used and in their dtype, unwritten: no float32 copy of a large one on the host."""
    model = transformer_on_meta(config).to(dtype)
    rope, model.rope = model.rope, None  # its table is numbers already, which to_empty would drop
    model.to_empty(device=device)
    model.rope = rope.to(device)
    if config.tie_embeddings:
        model.output.weight = model.embedding.weight
    return model
