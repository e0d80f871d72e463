"""A foreign model written as one of our checkpoints, one tensor in memory at a time.

The result is what training saves (docs/checkpoint.md), at step 0 and without optimizer state: whole or not there,
hashed, with the tokenizer's files and the chat template beside the weights.
"""

import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from configs.errors import UserError
from llm.args import DataConfig
from llm.bpe_tokenizer import Tokenizer
from llm.bpe_tokenizer_files import tiktoken_ranks
from llm.checkpoint_pieces import MODEL_PREFIX
from llm.hf_source import HfSource
from llm.hf_tensors import Named, file_groups, write_safetensors
from parallel.sharded_checkpoint import Save, make_partial, publish
from parallel.sharded_checkpoint_files import MAX_FILE_BYTES, Index
from parallel.sharded_checkpoint_manifest import manifest_of, step_path

UNKNOWN_SEQ_LEN = 1024  # evaluated at so many positions, or at all of a model that has fewer


def write_checkpoint(source: HfSource, directory: str | Path, dtype: torch.dtype | None = None) -> Path:
    """Write `directory`/step_00000000 and return it; `dtype` None keeps each tensor's own.

    Raises UserError when there is a checkpoint already, the tokenizer does not fit, or the disk is full: nothing of
    the new one is left then.
    """
    directory = Path(directory)
    target, partial = step_path(directory, 0), directory / ".step_00000000.partial"
    if target.exists():
        raise UserError(f"{target} exists; remove it or use another output=")
    extras = check_tokenizer(source)
    make_partial(partial)
    try:
        tensors = [(MODEL_PREFIX + name, tensor.as_dtype(dtype)) for name, tensor in source.tensors]
        index = write_tensors(partial, tensors)
        manifest = manifest_of(sorted(partial.iterdir()))
        save = Save(state_of(source), lambda path: write_files(path, extras))
        publish(partial, target, (index, manifest), 1, save)
    except OSError as error:
        raise UserError(f"{target} could not be written ({error}); free disk space or use another output=") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def check_tokenizer(source: HfSource) -> dict[str, bytes]:
    """The tokenizer's files, tiktoken's added; UserError for a tokenizer that ours cannot be or that is too large."""
    where = f"{source.where}: tokenizer.json"
    tokenizer = Tokenizer(source.files["tokenizer.json"], where=where)
    source.config.with_vocab_of(tokenizer.vocab_size)
    return source.files | {"ranks.tiktoken": tiktoken_ranks(tokenizer.model)}


def state_of(source: HfSource) -> dict[str, Any]:
    """state.json: the config that loading needs, and what evaluation would take from a run's own data section.

    Where the training window is not known, data.seq_len is a guess, and `imported` keeps that it was not known.
    """
    seq_len = source.training_seq_len or min(source.config.max_seq_len, UNKNOWN_SEQ_LEN)
    data = asdict(DataConfig("", "", seq_len=seq_len))
    return {
        "step": 0,
        "tokens_seen": 0,
        "config": {"model": asdict(source.config), "data": data},
        "imported": {
            "from": source.where,
            "family": source.family,
            "training_seq_len": source.training_seq_len,
        },
    }


def training_seq_len_of(state: dict[str, Any]) -> int | None:
    """The window that a checkpoint was trained with; None for an import that does not know it. `state`: state.json."""
    if "imported" in state:
        return state["imported"].get("training_seq_len")
    return state["config"].get("data", {}).get("seq_len")


def write_tensors(directory: Path, tensors: Named) -> Index:
    """The model's files, of at most 4 GiB, and their part of index.json."""
    index: Index = {}
    for number, group in enumerate(file_groups(tensors, MAX_FILE_BYTES)):
        file_name = f"model_00000{f'_{number}' if number else ''}.safetensors"
        write_safetensors(directory / file_name, group)
        for name, tensor in group:
            shape, dtype = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            piece = {"file": file_name, "key": name, "offsets": [0] * len(shape), "shape": shape}
            index[name] = {"shape": shape, "dtype": dtype, "pieces": [piece]}
    return index


def write_files(directory: Path, files: dict[str, bytes]) -> None:
    """Small files, each synced."""
    for name, content in files.items():
        with open(directory / name, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
