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
from configs.run_dir import is_plain_file_name, read_json, sync_directory, write_json_atomic
from llm.checkpoint_tensors import read_tensors, write_tensors
from llm.optimizer import STATE_KEYS

FORMAT = "mew-checkpoint-1"
MODEL_PREFIX, OPTIMIZER_PREFIX = "model/", "optimizer/"
REQUIRED_FILES = ("index.json", "state.json")
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
        remove_older(directory, step, keep_last)
    return target


def remove_older(directory: Path, step: int, keep_last: int) -> None:
    """Delete all but the last `keep_last` checkpoints up to `step`, which is whole.

    A checkpoint of a later step is a damaged one that the run was resumed before: it does not count, else it could push
    out the whole ones. It is replaced when the run gets there.
    """
    for path in [path for path in list_checkpoints(directory) if step_of(path) <= step][:-keep_last]:
        remove(path)


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


def load_checkpoint(
    path: str | Path, verify: bool = True, prefix: str = ""
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors whose name begins with `prefix`, on the CPU and in full shape, and state.json.

    Raises UserError for a damaged or foreign directory.
    """
    path = Path(path)
    reason = damage(path) if verify else None
    if reason:
        raise UserError(f"checkpoint {path} is damaged ({reason}); use an older one")
    index = read_json(path / "index.json")
    if not isinstance(index, dict) or index.get("format") != FORMAT or not isinstance(index.get("tensors"), dict):
        raise UserError(f"{path}/index.json is not of format {FORMAT!r}; use a checkpoint that llm.training saved")
    wanted = {name: entry for name, entry in index["tensors"].items() if name.startswith(prefix)}
    return read_tensors(path, wanted), read_json(path / "state.json")


def list_checkpoints(directory: Path) -> list[Path]:
    """Every step directory, by rising step, whole or not."""
    found = [path for path in directory.glob("step_*") if path.is_dir() and path.name[5:].isdecimal()]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint directory by its manifest, or None."""
    try:
        manifest = read_json(path / "manifest.json")
        absent = [name for name in REQUIRED_FILES if name not in manifest]
        if absent:
            return f"manifest.json does not name {absent[0]}"
        for name, entry in manifest.items():
            file = path / name
            if not is_plain_file_name(name) or not file.is_file():
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


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and persistent buffer, named "model/<name>"; tied ones once, under their first name."""
    named = dict(model.named_parameters())
    persistent = model.state_dict(keep_vars=True).keys()
    named |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {MODEL_PREFIX + name: tensor.detach() for name, tensor in named.items()}


def model_and_optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Everything to be saved: `model_tensors` and "optimizer/<parameter>/<state>"."""
    tensors = model_tensors(model)
    for name, parameter, _ in named_optimizer_parameters(optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{OPTIMIZER_PREFIX}{name}/{key}"] = value.detach()
    return tensors


def named_optimizer_parameters(optimizer: Optimizer) -> list[tuple[str, nn.Parameter, str]]:
    """(name, parameter, algorithm) of everything that the optimizer updates."""
    groups = optimizer.param_groups
    return [
        (name, parameter, group["algorithm"])
        for group in groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    ]


@torch.no_grad()
def copy_model_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Fill a model from the "model/<name>" among `tensors`; UserError unless names and shapes are the same."""
    check_model_tensors(model, tensors)
    for name, tensor in model_tensors(model).items():
        tensor.copy_(tensors[name])


def check_model_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    own = model_tensors(model)
    saved = {name: tensor for name, tensor in tensors.items() if name.startswith(MODEL_PREFIX)}
    wrong = [f"{name} is missing" for name in own.keys() - saved.keys()]
    wrong += [f"{name} is unexpected" for name in saved.keys() - own.keys()]
    wrong += [
        f"{name} is {list(saved[name].shape)} instead of {list(tensor.shape)}"
        for name, tensor in own.items()
        if name in saved and saved[name].shape != tensor.shape
    ]
    if wrong:
        raise UserError(
            f"the checkpoint does not fit the model: {some_of(wrong)}; "
            f"use the model config that the checkpoint was trained with"
        )


def restore_model_and_optimizer(model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    """Copy saved tensors into a model and its optimizer; UserError lists what is missing, unexpected or misshapen."""
    check_model_tensors(model, tensors)
    state = optimizer_state(optimizer, tensors)  # both are checked before anything is changed
    copy_model_tensors(model, tensors)
    optimizer.state.update(state)


def optimizer_state(optimizer: Optimizer, tensors: dict[str, Tensor]) -> dict[nn.Parameter, dict[str, Tensor]]:
    """The "optimizer/<parameter>/<state>" among `tensors`, by parameter; one that was never updated has none."""
    saved: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        if full_name.startswith(OPTIMIZER_PREFIX):
            name, _, key = full_name.removeprefix(OPTIMIZER_PREFIX).rpartition("/")
            saved.setdefault(name, {})[key] = tensor
    state, wrong = {}, []
    for name, parameter, algorithm in named_optimizer_parameters(optimizer):
        values = saved.pop(name, {})
        if values and values.keys() != STATE_KEYS[algorithm]:
            wrong.append(f"{name} has {sorted(values)}, {algorithm} needs {sorted(STATE_KEYS[algorithm])}")
        wrong += [f"{name}/{k} is {list(v.shape)}" for k, v in values.items() if v.ndim and v.shape != parameter.shape]
        # Scalars such as the step count live on the host, the rest beside the parameter. Copied, since a loaded tensor
        # is a view of a mapped file, which `keep_last` will delete.
        if values:
            places = {key: parameter.device if value.ndim else "cpu" for key, value in values.items()}
            state[parameter] = {key: value.to(places[key], copy=True) for key, value in values.items()}
    wrong += [f"{name} is unexpected" for name in saved]
    if wrong:
        raise UserError(
            f"the checkpoint does not fit the optimizer: {some_of(wrong)}; "
            f"use the optimizer.name that the checkpoint was trained with"
        )
    return state


def some_of(faults: list[str]) -> str:
    """The first three of them, and how many more."""
    faults = sorted(faults)
    more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
    return ", ".join(faults[:3]) + more
