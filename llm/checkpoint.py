"""Checkpoints that are whole or not there: one directory a step, no pickle, loadable under any layout.

`step_00000100/` holds safetensors files, index.json (each tensor's full shape and the pieces it lies in), state.json
(step, config, data position, layout), the tokenizer, and manifest.json (size and sha256 of every other file). It is
written beside its place, synced, and renamed when complete; a kill at any moment leaves the checkpoint before it.
Parameters keep their single-device names and full shapes, each piece says where it lies.
"""

import hashlib
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim import Optimizer

from configs.errors import UserError
from configs.run_dir import read_json, sync_directory, write_json_atomic
from llm.checkpoint_tensors import read_tensors, write_tensors

FORMAT = "mew-checkpoint-1"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "ranks.tiktoken")
HASH_THREADS = 4


def save_checkpoint(
    directory: str | Path,
    step: int,
    tensors: dict[str, Tensor],
    state: dict[str, Any],
    tokenizer_dir: str | Path | None = None,
    keep_last: int | None = None,
) -> Path:
    """Write checkpoints/step_<step>/ and return it; older ones beyond `keep_last` go once it is in place.

    Raises UserError when it cannot be written (a full disk): the partial directory is removed, the older stay.
    """
    directory = Path(directory)
    target = directory / f"step_{step:08d}"
    if target.exists() and not damage(target):
        return target  # the same step of the same run: a resumed run that was stopped before its first step
    partial = directory / f".{target.name}.{os.getpid()}.partial"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(directory)
        partial.mkdir()
        index = write_tensors(partial, tensors)
        write_json_atomic(partial / "index.json", {"format": FORMAT, "tensors": index})
        write_json_atomic(partial / "state.json", {"step": step} | state)
        if tokenizer_dir is not None:
            copy_tokenizer(Path(tokenizer_dir), partial)
        write_json_atomic(partial / "manifest.json", manifest_of(partial))
        remove(target)
        os.rename(partial, target)
        sync_directory(directory)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"checkpoint {target} could not be written ({error}); free disk space or point runs_dir at another disk, "
            f"then run the same command: older checkpoints are kept"
        ) from error
    if keep_last is not None:
        for path in list_checkpoints(directory)[:-keep_last]:
            remove(path)
    return target


def find_checkpoint(directory: str | Path) -> Path | None:
    """The newest whole checkpoint, verified by size and sha256; damaged ones are named on stderr and passed over.

    None when there is no checkpoint at all; UserError when there are some and none is whole.
    """
    found = list_checkpoints(Path(directory))
    for path in reversed(found):
        reason = damage(path)
        if not reason:
            return path
        print(f"warning: checkpoint {path} is damaged ({reason}); trying the one before it", file=sys.stderr)
    if found:
        raise UserError(f"{directory} has {len(found)} checkpoints and none is whole; use resume=none and another name")
    return None


def load_checkpoint(path: str | Path, verify: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All tensors of a checkpoint, on the CPU and in full shape, and its state.json.

    Raises UserError for a damaged or foreign directory.
    """
    path = Path(path)
    reason = damage(path) if verify else None
    if reason:
        raise UserError(f"checkpoint {path} is damaged ({reason}); use an older one")
    index = read_json(path / "index.json")
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise UserError(f"{path}/index.json is not of format {FORMAT!r}; use a checkpoint that llm.training saved")
    return read_tensors(path, index["tensors"]), read_json(path / "state.json")


def list_checkpoints(directory: Path) -> list[Path]:
    """Every step directory, by rising step, whole or not."""
    return sorted(path for path in directory.glob("step_*") if path.is_dir() and path.name[5:].isdecimal())


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint directory by its manifest, or None."""
    try:
        manifest = read_json(path / "manifest.json")
        for name, entry in manifest.items():
            file = path / name
            if Path(name).name != name or not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != entry["bytes"]:
                return f"{name} has {file.stat().st_size} bytes, not {entry['bytes']}"
        hashes = sha256_of_files([path / name for name in manifest])
    except (UserError, OSError, AttributeError, KeyError, TypeError) as error:
        return f"manifest.json: {error}"
    wrong = [name for name, found in zip(manifest, hashes, strict=True) if found != manifest[name]["sha256"]]
    return f"{wrong[0]} has another sha256 than when it was saved" if wrong else None


def manifest_of(directory: Path) -> dict[str, dict[str, Any]]:
    """Size and sha256 of every file."""
    files = sorted(path for path in directory.iterdir() if path.is_file())
    hashes = sha256_of_files(files)
    return {p.name: {"bytes": p.stat().st_size, "sha256": digest} for p, digest in zip(files, hashes, strict=True)}


def sha256_of_files(files: list[Path]) -> list[str]:
    """Hashes on a few threads: hashlib works outside the interpreter's lock."""

    def sha256(path: Path) -> str:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(HASH_THREADS) as pool:
        return list(pool.map(sha256, files))


def copy_tokenizer(source: Path, target: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
            with open(target / name, "rb") as file:
                os.fsync(file.fileno())


def remove(path: Path) -> None:
    """Delete a checkpoint; renamed first, so that a kill in between leaves no half of one under its name."""
    if path.exists():
        doomed = path.with_name(f".{path.name}.{os.getpid()}.removed.partial")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        shutil.rmtree(doomed)


def remove_leftovers(directory: Path) -> None:
    """Delete what killed saves left behind."""
    for path in directory.glob(".step_*.partial"):
        shutil.rmtree(path)


def model_and_optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """ "model/<parameter>" and "optimizer/<parameter>/<state>" of everything to be saved; tied parameters once."""
    tensors = {f"model/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in named_optimizer_parameters(optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer/{name}/{key}"] = value.detach()
    return tensors


def named_optimizer_parameters(optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
    groups = optimizer.param_groups
    return [pair for group in groups for pair in zip(group["param_names"], group["params"], strict=True)]


@torch.no_grad()
def restore_model_and_optimizer(model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    """Copy saved tensors into a model and its optimizer; UserError lists names or shapes that do not fit."""
    parameters = {f"model/{name}": parameter for name, parameter in model.named_parameters()}
    saved = {name: tensor for name, tensor in tensors.items() if name.startswith("model/")}
    wrong = sorted(parameters.keys() ^ saved.keys())
    wrong = wrong or [n for n, parameter in parameters.items() if parameter.shape != saved[n].shape]
    if wrong:
        raise UserError(
            f"the checkpoint does not fit the model in {len(wrong)} parameters, first {', '.join(wrong[:3])}; "
            f"use the config that the checkpoint was trained with"
        )
    for name, parameter in parameters.items():
        parameter.copy_(saved[name])
    states = {name: tensor for name, tensor in tensors.items() if name.startswith("optimizer/")}
    for name, parameter in named_optimizer_parameters(optimizer):
        prefix = f"optimizer/{name}/"
        for full_name in [n for n in states if n.startswith(prefix) and "/" not in n[len(prefix) :]]:
            value = states.pop(full_name)
            # Scalars such as the step count live on the host, the rest beside the parameter.
            device = parameter.device if value.ndim else torch.device("cpu")
            optimizer.state[parameter][full_name.removeprefix(prefix)] = value.to(device)
    if states:
        raise UserError(
            f"the checkpoint holds optimizer state that this optimizer has no parameter for, first "
            f"{', '.join(sorted(states)[:3])}; use the optimizer that the checkpoint was trained with"
        )
