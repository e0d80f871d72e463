"""One of our checkpoints as a Hugging Face directory: config.json, safetensors, tokenizer files and chat template.

It is written beside its place and renamed when whole. A model with more bytes than one file may have is cut into
model-00001-of-0000N.safetensors with an index, as `save_pretrained` does.
"""

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.errors import UserError
from configs.loader import load_config
from configs.run_dir import read_json, sync_directory, write_json_atomic
from llm.args import ModelConfig
from llm.bpe_tokenizer import Tokenizer
from llm.checkpoint import CHAT_FILES, TOKENIZER_FILES
from llm.checkpoint_pieces import MODEL_PREFIX
from llm.hf_checkpoint import training_seq_len_of
from llm.hf_config import TRAINING_SEQ_LEN, family_of, write_config
from llm.hf_directory import INDEX, SINGLE
from llm.hf_names import hf_names
from llm.hf_source import our_shapes
from llm.hf_tensors import Named, StoredTensor, file_groups, write_safetensors
from llm.lora import LoraConfig, is_adapter, merge
from parallel.sharded_checkpoint import open_checkpoint
from parallel.sharded_checkpoint_files import CheckpointReader
from parallel.sharded_checkpoint_manifest import damage
from parallel.sharded_checkpoint_pieces import Box

COMPANIONS = tuple(name for name in (*TOKENIZER_FILES, *CHAT_FILES) if name != "ranks.tiktoken")


def write_directory(checkpoint: Path, output: Path, dtype: torch.dtype | None, max_file_bytes: int) -> str:
    """Write `output` and return the family that it has become; `dtype` None keeps the stored one.

    Raises UserError for a damaged checkpoint, a shape that no family has, or a disk that is full.
    """
    reason = damage(checkpoint)
    if reason:
        raise UserError(f"checkpoint {checkpoint} is damaged ({reason}); use an older one")
    reader, state = open_checkpoint(checkpoint, MODEL_PREFIX)
    config = load_config(ModelConfig, state["config"]["model"])
    family = family_of(config)
    plain = plain_tensors(reader, config, load_config(LoraConfig, state["config"].get("lora") or {}))
    tensors = [(name, tensor.as_dtype(dtype)) for name, tensor in foreign_tensors(reader, plain, config, family)]
    half_done = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        half_done.mkdir(parents=True)
        write_model(half_done, tensors, max_file_bytes)
        described = write_config(config, family, tensors[0][1].dtype)
        write_json_atomic(half_done / "config.json", described | ids_of(checkpoint) | training_window(state))
        write_companions(checkpoint, half_done)
        os.rename(half_done, output)
        sync_directory(output.parent)
    except OSError as error:
        raise UserError(f"{output} could not be written ({error}); free disk space or use another output=") from error
    finally:
        shutil.rmtree(half_done, ignore_errors=True)
    return family


def plain_tensors(reader: CheckpointReader, config: ModelConfig, lora: LoraConfig) -> Named:
    """The parameters of the model, adapters merged into the weights that they belong to.

    UserError when the checkpoint holds others than its config describes.
    """
    shapes = our_shapes(config)
    held = {name.removeprefix(MODEL_PREFIX): reader.shape(name) for name in reader.names(MODEL_PREFIX)}
    adapters = {name for name in held if is_adapter(name)} if lora.rank else set()
    wrong = sorted(name for name, shape in shapes.items() if held.get(name) != shape)
    wrong += sorted(held.keys() - shapes.keys() - adapters)
    if wrong:
        raise UserError(
            f"{reader.directory} does not hold what its config describes: {wrong[0]} is {list(held.get(wrong[0], ()))} "
            f"instead of {list(shapes.get(wrong[0], ()))}; use another checkpoint"
        )
    return [(name, stored_parameter(reader, name, lora if adapters else None)) for name in shapes]


def stored_parameter(reader: CheckpointReader, name: str, lora: LoraConfig | None) -> StoredTensor:
    """One parameter of a checkpoint, with its adapters' product where it has them."""
    layer, stored = MODEL_PREFIX + name.rpartition(".")[0], MODEL_PREFIX + name
    names = [stored, f"{layer}.lora_a", f"{layer}.lora_b"]

    def read() -> Tensor:
        if lora is None or not name.endswith(".weight") or names[1] not in reader.index:
            return reader.full(stored)
        return merge({each: reader.full(each) for each in names}, lora)[stored]

    return StoredTensor(reader.shape(stored), reader.dtype(stored), read)


def foreign_tensors(reader: CheckpointReader, plain: Named, config: ModelConfig, family: str) -> Named:
    """The parameters under Hugging Face's names, stacked experts one by one."""
    tensors: Named = []
    for name, tensor in plain:
        names = hf_names(name, family, config.moe.num_experts)
        if len(names) == 1:
            tensors.append((names[0], tensor))
            continue
        for expert, foreign in enumerate(names):
            read = partial(read_expert, reader, MODEL_PREFIX + name, expert)
            tensors.append((foreign, StoredTensor(tensor.shape[1:], tensor.dtype, read)))
    return tensors


def read_expert(reader: CheckpointReader, name: str, expert: int) -> Tensor:
    """One expert's matrix of a stacked parameter, and no byte of the others (experts have no adapters)."""
    shape = reader.shape(name)
    values = torch.empty((1, *shape[1:]), dtype=reader.dtype(name))
    reader.fill(Box(name, shape, (expert, *(0 for _ in shape[1:])), values))
    return values[0]


def write_model(directory: Path, tensors: Named, max_file_bytes: int) -> None:
    groups = file_groups(tensors, max_file_bytes)
    if len(groups) == 1:
        write_safetensors(directory / SINGLE, groups[0])
        return
    weight_map = {}
    for number, group in enumerate(groups, start=1):
        file_name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_safetensors(directory / file_name, group)
        weight_map |= {name: file_name for name, _ in group}
    total = sum(tensor.num_bytes for _, tensor in tensors)
    write_json_atomic(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def training_window(state: dict[str, Any]) -> dict[str, int]:
    """The field of config.json that lets an import of this export be evaluated at the window it was trained with."""
    seq_len = training_seq_len_of(state)
    return {} if seq_len is None else {TRAINING_SEQ_LEN: seq_len}


def ids_of(checkpoint: Path) -> dict[str, Any]:
    """The special ids that config.json repeats from generation_config.json."""
    generation = generation_config(checkpoint)
    return {name: generation.get(name) for name in ("bos_token_id", "eos_token_id") if name in generation}


def generation_config(checkpoint: Path) -> dict[str, Any]:
    """The one beside the checkpoint, else our own rule: a text begins and ends with the end-of-text token."""
    path = checkpoint / "generation_config.json"
    if path.is_file():
        return read_json(path)
    eot_id = Tokenizer.load(checkpoint).eot_id
    return {"bos_token_id": eot_id, "eos_token_id": eot_id}


def write_companions(checkpoint: Path, directory: Path) -> None:
    """The tokenizer's files, the chat template, and what generate() asks for."""
    for name in COMPANIONS:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, directory / name)
    write_json_atomic(directory / "generation_config.json", generation_config(checkpoint))
