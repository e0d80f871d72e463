"""What a training checkpoint holds, and its way back into a model and an optimizer under any layout.

The files are parallel/sharded_checkpoint's: written by all ranks together, whole or not there, no pickle. Here are the
names (`model/<parameter>`, `optimizer/<parameter>/<state>`), the tokenizer beside them, and the checks on restoring:
everything is compared by name, shape and kind of optimizer before anything is changed.
"""

import os
import shutil
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from configs.errors import UserError
from llm.checkpoint_pieces import MODEL_PREFIX, OPTIMIZER_PREFIX, Held, model_tensors, state_name
from llm.lora import LoraConfig, is_adapter
from llm.lora_checkpoint import MergingReader
from llm.optimizer import STATE_KEYS
from parallel.collectives import all_reduce_max
from parallel.mesh import Mesh
from parallel.sharded_checkpoint import Save, load_pieces, open_checkpoint, save_pieces
from parallel.sharded_checkpoint_agree import AXIS, SharedFault, rank_of, together
from parallel.sharded_checkpoint_files import CheckpointReader
from parallel.sharded_checkpoint_manifest import damage
from parallel.sharded_checkpoint_pieces import Piece, empty_like

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "ranks.tiktoken")
CHAT_FILES = ("chat_template.jinja", "generation_config.json")  # of an imported model; a fine-tuned one keeps them


def save_checkpoint(
    directory: str | Path,
    step: int,
    pieces: Iterable[Piece],
    state: dict[str, Any],
    tokenizer_dir: str | Path | None = None,
    keep_last: int | None = None,
    mesh: Mesh | None = None,
) -> Path:
    """Write checkpoints/step_<step>/ from the pieces of all ranks and return it; every rank of the mesh calls it.

    Raises UserError, on every rank, when one could not write: the partial directory is removed, the older stay.
    """
    extras = None if tokenizer_dir is None else partial(copy_tokenizer, Path(tokenizer_dir))
    return save_pieces(directory, step, pieces, Save(state, extras, keep_last), mesh)


def load_checkpoint(
    path: str | Path, verify: bool = True, prefix: str = ""
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors whose name begins with `prefix`, on the CPU and in full shape, and state.json; one process alone.

    Raises UserError for a damaged or foreign directory.
    """
    reason = damage(Path(path)) if verify else None
    if reason:
        raise UserError(f"checkpoint {path} is damaged ({reason}); use an older one")
    reader, state = open_checkpoint(path, prefix)
    return {name: reader.full(name) for name in reader.names()}, state


def copy_tokenizer(source: Path, target: Path) -> None:
    for name in (*TOKENIZER_FILES, *CHAT_FILES):
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
            with open(target / name, "rb") as file:
                os.fsync(file.fileno())


@torch.no_grad()
def copy_model_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Fill a model from the "model/<name>" among `tensors`; UserError unless names and shapes are the same."""
    own = model_tensors(model)
    saved = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name.startswith(MODEL_PREFIX)}
    check_model({name: tuple(tensor.shape) for name, tensor in own.items()}, saved, set(own))
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


def restore(held: Held, path: str | Path, mesh: Mesh | None = None) -> dict[str, Any]:
    """Fill what this rank holds from a checkpoint of any layout and return its state.json; every rank calls it.

    Only the bytes that overlap with this rank's pieces are read. Raises UserError, on every rank in the same words,
    that lists what is missing, unexpected or misshapen; nothing is changed then.
    """
    try:
        reader, state = together(mesh, open_checkpoint, path)
        claimed = claimed_by_any(held, reader, mesh)
        together(mesh, check, held, reader, claimed)
        together(mesh, fill, held, reader)
    except SharedFault as error:
        raise UserError(str(error)) from error
    return state


def load_weights(held: Held, path: str | Path, mesh: Mesh | None = None, has_adapters: bool = False) -> None:
    """Fill the model's tensors that this rank holds from a checkpoint of any layout; the optimizer's state stays out.

    A model that has adapters (on whichever rank) keeps their initial values where the checkpoint lacks them; into one
    without, those of the checkpoint are merged. Every rank calls it; raises as `restore`.
    """
    try:
        reader, state = together(mesh, open_checkpoint, path, MODEL_PREFIX)
        lora = LoraConfig(**state["config"].get("lora", {}))
        if lora.rank and not has_adapters:
            reader = MergingReader(reader, lora)
        pieces = [piece for piece in held.model if piece.name in reader.index or not is_adapter(piece.name)]
        claimed = claimed_by_any(replace(held, model=pieces, updated=[]), reader, mesh)
        own, saved = ({piece.name: piece.shape for piece in pieces}, {n: reader.shape(n) for n in reader.names()})
        together(mesh, check_model, own, saved, claimed)
        together(mesh, load_pieces, reader, pieces)
    except SharedFault as error:
        raise UserError(f"init_from={path}: {error}") from error


def claimed_by_any(held: Held, reader: CheckpointReader, mesh: Mesh | None) -> set[str]:
    """The stored tensors that some rank has a place for."""
    names = sorted(reader.names())
    wanted = {piece.name for piece in held.model} | {
        state_name(piece.name, key) for piece in held.updated for key in STATE_KEYS[held.algorithms[piece.name]]
    }
    flags = torch.tensor([name in wanted for name in names], dtype=torch.int32)
    if rank_of(mesh)[1] > 1 and names:
        flags = all_reduce_max(flags, mesh, AXIS)
    return {name for name, flag in zip(names, flags.tolist(), strict=True) if flag}


def check(held: Held, reader: CheckpointReader, claimed: set[str]) -> None:
    """UserError unless the stored names and shapes are those of the model and of the optimizer's algorithms."""
    own = {piece.name: piece.shape for piece in held.model}
    check_model(own, {name: reader.shape(name) for name in reader.names(MODEL_PREFIX)}, claimed)
    wrong = []
    for piece in held.updated:
        algorithm = held.algorithms[piece.name]
        keys = stored_keys(reader, piece.name)
        if keys and keys != STATE_KEYS[algorithm]:
            wrong.append(f"{piece.name} has {sorted(keys)}, {algorithm} needs {sorted(STATE_KEYS[algorithm])}")
        shapes = {key: reader.shape(state_name(piece.name, key)) for key in keys}
        wrong += [f"{piece.name}/{key} is {list(s)}" for key, s in shapes.items() if s not in ((), piece.shape)]
    unclaimed = [name.removeprefix(OPTIMIZER_PREFIX) for name in reader.names(OPTIMIZER_PREFIX) if name not in claimed]
    strays = {name.rpartition("/")[0] for name in unclaimed} - {piece.name for piece in held.updated}
    wrong += [f"{name} is unexpected" for name in strays]
    if wrong:
        raise UserError(
            f"the checkpoint does not fit the optimizer: {some_of(wrong)}; "
            f"use the optimizer.name that the checkpoint was trained with"
        )


def check_model(own: dict[str, tuple[int, ...]], saved: dict[str, tuple[int, ...]], claimed: set[str]) -> None:
    """Compare a model's names and shapes with the stored ones, of which `claimed` belong to some rank."""
    wrong = [f"{name} is missing" for name in own.keys() - saved.keys()]
    wrong += [f"{name} is unexpected" for name in saved.keys() - claimed]
    wrong += [
        f"{name} is {list(saved[name])} instead of {list(shape)}"
        for name, shape in own.items()
        if name in saved and saved[name] != shape
    ]
    if wrong:
        raise UserError(
            f"the checkpoint does not fit the model: {some_of(wrong)}; "
            f"use the model config that the checkpoint was trained with"
        )


def stored_keys(reader: CheckpointReader, name: str) -> set[str]:
    """The kinds of optimizer state that a checkpoint holds of a parameter; none when it was never updated."""
    known = {key for keys in STATE_KEYS.values() for key in keys}
    return {key for key in known if state_name(name, key) in reader.index}


@torch.no_grad()
def fill(held: Held, reader: CheckpointReader) -> None:
    """Read parameters into their memory, and make the optimizer's state of this rank."""
    load_pieces(reader, held.model)
    for piece in held.updated:
        state = {}
        for key in stored_keys(reader, piece.name):
            name = state_name(piece.name, key)
            if reader.shape(name) == () and piece.shape != ():
                state[key] = reader.full(name).clone()  # a step count lives on the host, and outlives the file
            else:
                state[key] = (moment := empty_like(piece, name, reader.dtype(name))).local
                load_pieces(reader, [moment])
        if state:
            held.state[piece.local] = state


def some_of(faults: list[str]) -> str:
    """The first three of them, and how many more."""
    faults = sorted(faults)
    more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
    return ", ".join(faults[:3]) + more
