"""A Hugging Face directory (config.json, safetensors in one file or several, tokenizer files) as an HfSource."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from configs.errors import UserError
from configs.run_dir import is_plain_file_name, read_json
from llm.hf_config import read_config, read_training_seq_len
from llm.hf_names import hf_names
from llm.hf_source import HfSource, match_tensors
from llm.hf_tensors import DTYPES, StoredTensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
IGNORED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")  # tables that old files carry


def open_directory(path: str | Path) -> HfSource:
    """Describe a model without reading its weights; UserError for what is missing, unknown or not computed by us."""
    path = Path(path)
    value, where = read_json(path / "config.json"), str(path / "config.json")
    config, family = read_config(value, where)
    stored = {name: tensor for name, tensor in open_tensors(path).items() if not name.endswith(IGNORED)}
    if config.tie_embeddings:
        drop_tied_copy(stored, path)
    names_of = partial(hf_names, family=family, num_experts=config.moe.num_experts)
    tensors = match_tensors(str(path), config, stored, names_of)
    seq_len = read_training_seq_len(value, config, where)
    return HfSource(str(path), family, config, tensors, read_files(path), seq_len)


def open_tensors(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of the directory's files by name, nothing read but the headers."""
    files = [SINGLE] if (path / SINGLE).exists() else sorted(set(weight_map(path).values()))
    stored: dict[str, StoredTensor] = {}
    for file_name in files:
        for name, tensor in open_file(path / file_name).items():
            if name in stored:
                raise UserError(f"{path} holds {name} in two files; fetch it again")
            stored[name] = tensor
    if SINGLE not in files:
        listed = weight_map(path)
        absent = sorted(listed.keys() - stored.keys())
        if absent:
            raise UserError(f"{path}/{INDEX} lists {absent[0]}, which no file holds; fetch it again")
    return stored


def weight_map(path: Path) -> dict[str, str]:
    """Tensor name -> file name of a sharded directory."""
    if not (path / INDEX).exists():
        pickled = " (its .bin files are pickles, which are not read)" if list(path.glob("*.bin")) else ""
        raise UserError(f"{path} has neither {SINGLE} nor {INDEX}{pickled}; use a directory of safetensors")
    index = read_json(path / INDEX)
    listed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise UserError(f"{path}/{INDEX} has no weight_map; fetch it again")
    foreign = [name for name in listed.values() if not is_plain_file_name(name)]
    if foreign:
        raise UserError(f"{path}/{INDEX} names the file {foreign[0]!r}, which lies elsewhere; fetch it again")
    return listed


def open_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, mapped: reading one takes that one's bytes."""
    try:
        file = safe_open(path, framework="pt")
        described = {name: file.get_slice(name) for name in file.keys()}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is no readable safetensors file ({error}); fetch it again") from error
    stored = {}
    for name, tensor in described.items():
        if tensor.get_dtype() not in DTYPES:
            raise UserError(
                f"{path}: {name} is of type {tensor.get_dtype()}; only {', '.join(DTYPES)} are read (no quantised ones)"
            )
        shape = tuple(tensor.get_shape())
        stored[name] = StoredTensor(shape, DTYPES[tensor.get_dtype()], partial(file.get_tensor, name))
    return stored


def drop_tied_copy(stored: dict[str, StoredTensor], path: Path) -> None:
    """A tied model may carry its table twice; the second must be a copy, since the model has one."""
    head, table = stored.get("lm_head.weight"), stored.get("model.embed_tokens.weight")
    if head is None or table is None:
        return
    if head.shape != table.shape or not torch.equal(head.read(), table.read()):
        raise UserError(
            f"{path} has tie_word_embeddings=true, but lm_head.weight differs from model.embed_tokens.weight; "
            f"set tie_word_embeddings to false in its config.json if the output layer is meant to be its own"
        )
    del stored["lm_head.weight"]


def read_files(path: Path) -> dict[str, bytes]:
    """The tokenizer's files that are there; UserError when tokenizer.json is not."""
    if not (path / "tokenizer.json").exists():
        raise UserError(
            f"{path} has no tokenizer.json; save one beside it with transformers: "
            f"AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    files = {name: (path / name).read_bytes() for name in COMPANIONS if (path / name).is_file()}
    return move_template_out(files, path)


def move_template_out(files: dict[str, bytes], path: Path) -> dict[str, bytes]:
    """A chat template inside tokenizer_config.json (transformers 4) as the file of its own that version 5 writes."""
    if "tokenizer_config.json" not in files:
        return files
    value: Any = read_json(path / "tokenizer_config.json")
    if not isinstance(value, dict):
        raise UserError(f"{path}/tokenizer_config.json is no object; fetch it again")
    template = value.pop("chat_template", None)
    if isinstance(template, list):  # several by name
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    if not isinstance(template, str) or "chat_template.jinja" in files:
        return files
    text = json.dumps(value, ensure_ascii=False, indent=2) + "\n"
    return files | {"chat_template.jinja": template.encode("utf-8"), "tokenizer_config.json": text.encode("utf-8")}
