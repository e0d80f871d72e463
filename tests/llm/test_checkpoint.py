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
from safetensors.torch import save_file

from configs.errors import UserError
from llm.checkpoint import (
    find_checkpoint,
    load_checkpoint,
    model_and_optimizer_tensors,
    restore_model_and_optimizer,
    save_checkpoint,
)
from llm.checkpoint_tensors import plan_files, read_tensors
from llm.optimizer import STATE_KEYS, OptimizerConfig, build_optimizer

TENSORS = {
    "model/a": torch.randn(5, 3, generator=torch.Generator().manual_seed(0)),
    "model/b": torch.randn(4, dtype=torch.float64).bfloat16(),
    "optimizer/a/step": torch.tensor(7.0),
    "optimizer/a/exp_avg": torch.randn(3, 5).t(),  # not contiguous
    "optimizer/b/ids": torch.arange(4),
}
STATE = {"tokens_seen": 12, "config": {"name": "x", "learned": "ünicode"}}


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )


def test_a_checkpoint_returns_every_bit(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer" / "secret.key").write_text("not a tokenizer file")
    path = save_checkpoint(tmp_path / "checkpoints", 100, TENSORS, STATE, tokenizer_dir=tmp_path / "tokenizer")
    assert path.name == "step_00000100"
    tensors, state = load_checkpoint(path)
    assert equal(tensors, TENSORS) and state == {"step": 100} | STATE
    names = {file.name for file in path.iterdir()}
    assert {"tokenizer.json", "index.json", "state.json", "manifest.json"} < names and "secret.key" not in names
    assert not [name for name in names if name.endswith((".pt", ".pkl", ".bin"))]


def test_views_of_one_storage_are_saved_apart(tmp_path):
    whole = torch.arange(6.0)
    path = save_checkpoint(tmp_path, 1, {"model/a": whole[:3], "model/b": whole[3:], "model/c": whole}, {})
    tensors, _ = load_checkpoint(path)
    assert tensors["model/b"].tolist() == [3, 4, 5] and tensors["model/c"].tolist() == whole.tolist()


def test_pieces_are_put_together_wherever_they_lie(tmp_path):
    full = torch.randn(4, 6)
    save_file({"top": full[:1].clone(), "left": full[1:, :2].clone()}, tmp_path / "rank_0.safetensors")
    save_file({"right": full[1:, 2:].clone()}, tmp_path / "rank_1.safetensors")
    pieces = [
        {"file": "rank_0.safetensors", "key": "top", "offsets": [0, 0], "shape": [1, 6]},
        {"file": "rank_0.safetensors", "key": "left", "offsets": [1, 0], "shape": [3, 2]},
        {"file": "rank_1.safetensors", "key": "right", "offsets": [1, 2], "shape": [3, 4]},
    ]
    index = {"model/w": {"shape": [4, 6], "dtype": "float32", "pieces": pieces}}
    assert torch.equal(read_tensors(tmp_path, index)["model/w"], full)
    index["model/w"]["pieces"] = pieces[:2]
    with pytest.raises(UserError, match="hold 12 elements of 24 and leave out 12"):
        read_tensors(tmp_path, index)
    twice = {"file": "rank_0.safetensors", "key": "left", "offsets": [1, 0], "shape": [3, 2]}
    index["model/w"]["pieces"] = [*pieces[:2], twice, twice | {"offsets": [1, 2]}]  # 24 elements, some of them twice
    with pytest.raises(UserError, match="leave out 6"):
        read_tensors(tmp_path, index)
    index["model/w"]["pieces"] = [*pieces[:2], pieces[2] | {"offsets": [1, 3]}]
    with pytest.raises(UserError, match="leaves the shape"):
        read_tensors(tmp_path, index)
    index["model/w"]["pieces"] = [pieces[0] | {"file": "../rank_0.safetensors"}]
    with pytest.raises(UserError, match="plain file name"):
        read_tensors(tmp_path, index)


def test_large_tensors_go_to_further_files():
    big = torch.empty(3 << 30, dtype=torch.uint8, device="meta")
    plan = plan_files({"model/a": big, "optimizer/a/m": big, "model/b": big})
    assert plan == [
        ("model_00000.safetensors", ["model/a"]),
        ("optimizer_00000.safetensors", ["optimizer/a/m"]),
        ("model_00001.safetensors", ["model/b"]),
    ]


def test_keep_last_and_leftovers(tmp_path):
    leftover = tmp_path / ".step_00000009.123.partial"
    leftover.mkdir()
    for step in (10, 20, 30):
        save_checkpoint(tmp_path, step, TENSORS, STATE, keep_last=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000020", "step_00000030"]


def test_a_damaged_later_checkpoint_pushes_no_whole_one_out(tmp_path):
    for step in (10, 20, 30):
        path = save_checkpoint(tmp_path, step, TENSORS, STATE)
        if step > 10:
            (path / "state.json").write_text("{}")
    # The run goes on from step 10 and is stopped at 15.
    newest = save_checkpoint(tmp_path, 15, TENSORS, STATE, keep_last=1)
    assert find_checkpoint(tmp_path) == newest
    # When it gets to step 20 again, the damaged one makes room.
    assert find_checkpoint(tmp_path).name == "step_00000015"
    save_checkpoint(tmp_path, 20, TENSORS, STATE, keep_last=1)
    assert find_checkpoint(tmp_path).name == "step_00000020"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000020", "step_00000030"]


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (99_999_999, 100_000_000):
        newest = save_checkpoint(tmp_path, step, TENSORS, STATE)
    assert find_checkpoint(tmp_path) == newest


def test_a_part_is_loaded_by_its_prefix(tmp_path):
    path = save_checkpoint(tmp_path, 1, TENSORS, STATE)
    assert equal(load_checkpoint(path, prefix="model/")[0], {name: TENSORS[name] for name in ("model/a", "model/b")})


HARMS = ["truncate", "flip", "no manifest", "missing file", "manifest is text", "manifest is empty"]


@pytest.mark.parametrize("harm", HARMS)
def test_the_newest_whole_checkpoint_is_found(tmp_path, harm, capsys):
    older, newer = (save_checkpoint(tmp_path, step, TENSORS, STATE) for step in (1, 2))
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
        save_checkpoint(directory, 2, {"model/a": torch.ones(1_000_000)}, {}, keep_last=1)
    except UserError as error:
        told.send(str(error))


def test_a_full_disk_leaves_the_older_checkpoint(tmp_path):
    older = save_checkpoint(tmp_path, 1, TENSORS, STATE)
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
        save_checkpoint(directory, step, tensors, {"tokens_seen": step}, keep_last=2)
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
    newest = save_checkpoint(tmp_path, last + 2, TENSORS, STATE, keep_last=1)
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
    tensors = model_and_optimizer_tensors(model, optimizer)
    assert {n for n in tensors if n.startswith("model/")} == {"model/blocks.0.weight", "model/norm", "model/counter"}
    path = save_checkpoint(tmp_path, 3, tensors, {})
    other, other_optimizer = make(name)
    restore_model_and_optimizer(other, other_optimizer, load_checkpoint(path)[0])
    for seed in range(3, 6):
        step(model, optimizer, seed)
        step(other, other_optimizer, seed)
    assert equal(model_and_optimizer_tensors(model, optimizer), model_and_optimizer_tensors(other, other_optimizer))
    assert not torch.equal(next(other.parameters()), next(make(name)[0].parameters()))
    assert find_checkpoint(tmp_path) == path  # steps after loading write nothing through to the files


@pytest.mark.parametrize("name", ["muon", "sgd"])
def test_the_state_of_another_optimizer_is_refused(name):
    model, optimizer = make("adamw")
    step(model, optimizer, 0)
    tensors = model_and_optimizer_tensors(model, optimizer)
    other, other_optimizer = make(name)
    with pytest.raises(UserError, match=rf"blocks.0.weight has .*exp_avg.*, {name} needs"):
        restore_model_and_optimizer(other, other_optimizer, tensors)
    assert not other_optimizer.state and torch.equal(other.norm, make(name)[0].norm)  # nothing was half restored


def test_a_checkpoint_of_another_shape_is_refused(tmp_path):
    model = torch.nn.Linear(4, 3)
    optimizer = build_optimizer(model.named_parameters(), OptimizerConfig())
    good = {"model/weight": torch.zeros(3, 4), "model/bias": torch.zeros(3)}
    restore_model_and_optimizer(model, optimizer, good)
    wider = {"model/bias": torch.zeros(4)} | {f"optimizer/bias/{k}": torch.zeros(4) for k in STATE_KEYS["adamw"]}
    adamw = {"optimizer/bias/step": torch.tensor(1.0), "optimizer/bias/exp_avg": torch.zeros(3)}
    for bad, message in (
        (good | {"model/weight": torch.zeros(4, 3)}, r"model/weight is \[4, 3\] instead of \[3, 4\]"),
        (good | wider, "does not fit the model"),  # the cause is named, not its consequence
        (good | {"model/other": torch.zeros(1)}, "model/other is unexpected"),
        ({"model/weight": good["model/weight"]}, "model/bias is missing"),
        (good | {"optimizer/gone/exp_avg": torch.zeros(1)}, "gone is unexpected"),
        (good | adamw, r"bias has \['exp_avg', 'step'\], adamw needs"),
        (good | adamw | {"optimizer/bias/exp_avg_sq": torch.zeros(4)}, r"bias/exp_avg_sq is \[4\]"),
    ):
        with pytest.raises(UserError, match=message):
            restore_model_and_optimizer(model, optimizer, bad)


def test_a_foreign_index_is_refused(tmp_path):
    path = save_checkpoint(tmp_path, 1, TENSORS, STATE)
    (path / "index.json").write_text(json.dumps({"format": "other", "tensors": {}}))
    with pytest.raises(UserError, match="not of format"):
        load_checkpoint(path, verify=False)
