"""A checkpoint is whole or not there, holds every bit, and refuses what does not fit."""

import json
import multiprocessing
import random
import resource
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from configs.errors import UserError
from llm.checkpoint import load_checkpoint, restore, save_checkpoint
from llm.checkpoint_pieces import held_pieces
from llm.optimizer import STATE_KEYS, OptimizerConfig, build_optimizer
from parallel.sharded_checkpoint_manifest import find_checkpoint
from parallel.sharded_checkpoint_pieces import whole

TENSORS = {
    "model/a": torch.randn(5, 3, generator=torch.Generator().manual_seed(0)),
    "model/b": torch.randn(4, dtype=torch.float64).bfloat16(),
    "optimizer/a/step": torch.tensor(7.0),
    "optimizer/a/exp_avg": torch.randn(3, 5).t(),  # not contiguous
    "optimizer/b/ids": torch.arange(4),
}
STATE = {"tokens_seen": 12, "config": {"name": "x", "learned": "ünicode"}}


def save(directory, step, tensors, state, **options):
    return save_checkpoint(directory, step, [whole(name, value) for name, value in tensors.items()], state, **options)


def saved_tensors(model, optimizer):
    return {piece.name: piece.local.clone() for piece in held_pieces(model, optimizer).pieces()}


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )


def test_a_checkpoint_returns_every_bit(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer" / "secret.key").write_text("not a tokenizer file")
    path = save(tmp_path / "checkpoints", 100, TENSORS, STATE, tokenizer_dir=tmp_path / "tokenizer")
    assert path.name == "step_00000100"
    tensors, state = load_checkpoint(path)
    assert equal(tensors, TENSORS) and state == {"step": 100} | STATE
    names = {file.name for file in path.iterdir()}
    assert {"tokenizer.json", "index.json", "state.json", "manifest.json"} < names and "secret.key" not in names
    assert not [name for name in names if name.endswith((".pt", ".pkl", ".bin"))]


def test_views_of_one_storage_are_saved_apart(tmp_path):
    whole = torch.arange(6.0)
    path = save(tmp_path, 1, {"model/a": whole[:3], "model/b": whole[3:], "model/c": whole}, {})
    tensors, _ = load_checkpoint(path)
    assert tensors["model/b"].tolist() == [3, 4, 5] and tensors["model/c"].tolist() == whole.tolist()


def test_keep_last_and_leftovers(tmp_path):
    leftover = tmp_path / ".step_00000009.123.partial"
    leftover.mkdir()
    for step in (10, 20, 30):
        save(tmp_path, step, TENSORS, STATE, keep_last=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000020", "step_00000030"]


def test_a_damaged_later_checkpoint_pushes_no_whole_one_out(tmp_path):
    for step in (10, 20, 30):
        path = save(tmp_path, step, TENSORS, STATE)
        if step > 10:
            (path / "state.json").write_text("{}")
    # The run goes on from step 10 and is stopped at 15.
    newest = save(tmp_path, 15, TENSORS, STATE, keep_last=1)
    assert find_checkpoint(tmp_path) == newest
    # When it gets to step 20 again, the damaged one makes room.
    assert find_checkpoint(tmp_path).name == "step_00000015"
    save(tmp_path, 20, TENSORS, STATE, keep_last=1)
    assert find_checkpoint(tmp_path).name == "step_00000020"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000020", "step_00000030"]


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (99_999_999, 100_000_000):
        newest = save(tmp_path, step, TENSORS, STATE)
    assert find_checkpoint(tmp_path) == newest


def test_a_part_is_loaded_by_its_prefix(tmp_path):
    path = save(tmp_path, 1, TENSORS, STATE)
    assert equal(load_checkpoint(path, prefix="model/")[0], {name: TENSORS[name] for name in ("model/a", "model/b")})


HARMS = ["truncate", "flip", "no manifest", "missing file", "manifest is text", "manifest is empty"]


@pytest.mark.parametrize("harm", HARMS)
def test_the_newest_whole_checkpoint_is_found(tmp_path, harm, capsys):
    older, newer = (save(tmp_path, step, TENSORS, STATE) for step in (1, 2))
    assert find_checkpoint(tmp_path) == newer
    victim = newer / "model_00000.safetensors"
    content = bytearray(victim.read_bytes())
    if harm == "truncate":
        victim.write_bytes(content[:-1])
    elif harm == "flip":
        content[-3] ^= 1
        victim.write_bytes(content)
    elif harm == "no manifest":
        (newer / "manifest.json").unlink()
    elif harm == "missing file":
        victim.unlink()
    else:
        (newer / "manifest.json").write_text('["x"]' if harm == "manifest is text" else "{}")
    assert find_checkpoint(tmp_path) == older
    warning = capsys.readouterr().err
    assert "step_00000002 is damaged" in warning and (harm != "truncate" or "bytes, not" in warning)
    with pytest.raises(UserError, match="damaged"):
        load_checkpoint(newer)
    (older / "state.json").write_text("{}")
    with pytest.raises(UserError, match="none is whole"):
        find_checkpoint(tmp_path)


def test_no_checkpoint_is_not_an_error(tmp_path):
    assert find_checkpoint(tmp_path / "nowhere") is None


def start(body: Callable, *arguments) -> multiprocessing.Process:
    """Run `body` in a forked child: a fresh interpreter would spend seconds on importing torch."""
    process = multiprocessing.get_context("fork").Process(target=body, args=arguments)
    process.start()
    return process


def save_under_a_size_limit(directory: Path, told: Connection) -> None:
    torch.set_num_threads(1)
    # A limit on the size of a file stops the writer as a full disk would: with an OSError half way.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        save(directory, 2, {"model/a": torch.ones(1_000_000)}, {}, keep_last=1)
    except UserError as error:
        told.send(str(error))


def test_a_full_disk_leaves_the_older_checkpoint(tmp_path):
    older = save(tmp_path, 1, TENSORS, STATE)
    here, there = multiprocessing.Pipe(duplex=False)
    process = start(save_under_a_size_limit, tmp_path, there)
    assert here.poll(timeout=30)
    message = here.recv()
    process.join()
    assert "step_00000002 could not be written" in message and "free disk space" in message
    assert [path.name for path in tmp_path.iterdir()] == [older.name]
    assert find_checkpoint(tmp_path) == older


def save_for_ever(directory: Path, told: Connection) -> None:
    torch.set_num_threads(1)
    newest = find_checkpoint(directory)
    first = 1 + (int(newest.name[5:]) if newest else 0)
    for step in range(first, first + 10_000):
        tensors = {f"model/{i}": torch.full((100_000,), float(step)) for i in range(8)}
        save(directory, step, tensors, {"tokens_seen": step}, keep_last=2)
        told.send(step)


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    rng, leftovers, last = random.Random(0), 0, 0
    for _ in range(12):
        here, there = multiprocessing.Pipe(duplex=False)
        process = start(save_for_ever, tmp_path, there)
        assert here.poll(timeout=30)
        last = here.recv()
        time.sleep(rng.uniform(0, 0.06))
        process.kill()
        process.join()
        while here.poll():
            last = here.recv()
        path = find_checkpoint(tmp_path)
        tensors, state = load_checkpoint(path)
        step = int(path.name[5:])
        assert step in (last, last + 1)  # the last one told, or one in place whose telling was cut off
        assert state["tokens_seen"] == step and tensors["model/7"].unique().tolist() == [step]
        leftovers += any(tmp_path.glob(".step_*"))
    assert leftovers, "no kill fell into a save"
    newest = save(tmp_path, last + 2, TENSORS, STATE, keep_last=1)
    assert list(tmp_path.iterdir()) == [newest]


def make(name):
    """A small model with tied weights and buffers, and its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleDict({"0": torch.nn.Linear(6, 6, bias=False)})
    model.norm = torch.nn.Parameter(torch.ones(6))
    model.tied = model.norm
    model.register_buffer("counter", torch.tensor(5))
    model.register_buffer("table", torch.ones(3), persistent=False)
    config = OptimizerConfig(name=name, weight_decay=0.0)
    return model, build_optimizer(model.named_parameters(), config)


def step(model, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    model.counter += 1


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_training_state_survives_save_and_restore(tmp_path, name):
    model, optimizer = make(name)
    for seed in range(3):
        step(model, optimizer, seed)
    tensors = saved_tensors(model, optimizer)
    assert {n for n in tensors if n.startswith("model/")} == {"model/blocks.0.weight", "model/norm", "model/counter"}
    path = save(tmp_path, 3, tensors, {})
    other, other_optimizer = make(name)
    restore(held_pieces(other, other_optimizer), path)
    for seed in range(3, 6):
        step(model, optimizer, seed)
        step(other, other_optimizer, seed)
    assert equal(saved_tensors(model, optimizer), saved_tensors(other, other_optimizer))
    assert not torch.equal(next(other.parameters()), next(make(name)[0].parameters()))
    assert find_checkpoint(tmp_path) == path  # steps after loading write nothing through to the files


@pytest.mark.parametrize("name", ["muon", "sgd"])
def test_the_state_of_another_optimizer_is_refused(tmp_path, name):
    model, optimizer = make("adamw")
    step(model, optimizer, 0)
    tensors = saved_tensors(model, optimizer)
    path = save(tmp_path, 1, tensors, {})
    other, other_optimizer = make(name)
    with pytest.raises(UserError, match=rf"blocks.0.weight has .*exp_avg.*, {name} needs"):
        restore(held_pieces(other, other_optimizer), path)
    assert not other_optimizer.state and torch.equal(other.norm, make(name)[0].norm)  # nothing was half restored


def test_a_checkpoint_of_another_shape_is_refused(tmp_path):
    model = torch.nn.Linear(4, 3)
    optimizer = build_optimizer(model.named_parameters(), OptimizerConfig())
    good = {"model/weight": torch.zeros(3, 4), "model/bias": torch.zeros(3)}
    restore(held_pieces(model, optimizer), save(tmp_path, 0, good, {}))
    wider = {"model/bias": torch.zeros(4)} | {f"optimizer/bias/{k}": torch.zeros(4) for k in STATE_KEYS["adamw"]}
    adamw = {"optimizer/bias/step": torch.tensor(1.0), "optimizer/bias/exp_avg": torch.zeros(3)}
    faults = (
        (good | {"model/weight": torch.zeros(4, 3)}, r"model/weight is \[4, 3\] instead of \[3, 4\]"),
        (good | wider, "does not fit the model"),  # the cause is named, not its consequence
        (good | {"model/other": torch.zeros(1)}, "model/other is unexpected"),
        ({"model/weight": good["model/weight"]}, "model/bias is missing"),
        (good | {"optimizer/gone/exp_avg": torch.zeros(1)}, "gone is unexpected"),
        (good | adamw, r"bias has \['exp_avg', 'step'\], adamw needs"),
        (good | adamw | {"optimizer/bias/exp_avg_sq": torch.zeros(4)}, r"bias/exp_avg_sq is \[4\]"),
    )
    for number, (bad, message) in enumerate(faults, start=1):
        with pytest.raises(UserError, match=message):
            restore(held_pieces(model, optimizer), save(tmp_path, number, bad, {}))


def test_a_foreign_index_is_refused(tmp_path):
    path = save(tmp_path, 1, TENSORS, STATE)
    (path / "index.json").write_text(json.dumps({"format": "other", "tensors": {}}))
    with pytest.raises(UserError, match="not of format"):
        load_checkpoint(path, verify=False)
