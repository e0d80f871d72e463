"""A checkpoint is whole or not there, holds every bit, and refuses what does not fit."""

import json
import signal
import subprocess
import sys
import textwrap
import time

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
from llm.optimizer import OptimizerConfig, build_optimizer
from tests.conftest import ROOT

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
    with pytest.raises(UserError, match="cover 12 of 24"):
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


@pytest.mark.parametrize("harm", ["truncate", "flip", "no manifest", "missing file", "manifest is text"])
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
        (newer / "manifest.json").write_text('["x"]')
    assert find_checkpoint(tmp_path) == older
    assert "step_00000002 is damaged" in capsys.readouterr().err
    with pytest.raises(UserError, match="damaged"):
        load_checkpoint(newer)
    (older / "state.json").write_text("{}")
    with pytest.raises(UserError, match="none is whole"):
        find_checkpoint(tmp_path)


def test_no_checkpoint_is_not_an_error(tmp_path):
    assert find_checkpoint(tmp_path / "nowhere") is None


def run_python(code: str, *arguments: str, **options) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE, **options)


def test_a_full_disk_leaves_the_older_checkpoint(tmp_path):
    older = save_checkpoint(tmp_path, 1, TENSORS, STATE)
    # A limit on the size of a file stops the writer as a full disk would: with an OSError half way.
    code = """
        import resource, sys, torch
        from configs.errors import UserError
        from llm.checkpoint import save_checkpoint
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            save_checkpoint(sys.argv[1], 2, {"model/a": torch.ones(1_000_000)}, {}, keep_last=1)
        except UserError as error:
            sys.exit(f"error: {error}")
    """
    process = run_python(code, str(tmp_path))
    _, message = process.communicate(timeout=60)
    assert process.returncode == 1 and "could not be written" in message and "free disk space" in message
    assert [path.name for path in tmp_path.iterdir()] == [older.name]
    assert find_checkpoint(tmp_path) == older


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    code = """
        import sys, torch
        from llm.checkpoint import save_checkpoint
        tensors = {f"model/{i}": torch.full((200_000,), float(i)) for i in range(8)}
        for step in range(1, 10_000):
            save_checkpoint(sys.argv[1], step, tensors, {"tokens_seen": step}, keep_last=2)
            print(step, flush=True)
    """
    for delay_s in (0.0, 0.013, 0.031, 0.05):
        process = run_python(code, str(tmp_path), stdout=subprocess.PIPE)
        for _ in range(2):
            assert process.stdout.readline()
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        path = find_checkpoint(tmp_path)
        tensors, state = load_checkpoint(path)
        assert state["tokens_seen"] == int(path.name[5:]) and tensors["model/7"].unique().tolist() == [7.0]


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_training_state_survives_save_and_restore(tmp_path, name):
    def make():
        torch.manual_seed(0)
        model = torch.nn.Module()
        model.blocks = torch.nn.ModuleDict({"0": torch.nn.Linear(6, 6, bias=False)})
        model.norm = torch.nn.Parameter(torch.ones(6))
        config = OptimizerConfig(name=name, weight_decay=0.0)
        return model, build_optimizer(model.named_parameters(), config)

    def step(model, optimizer, seed):
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()

    model, optimizer = make()
    for seed in range(3):
        step(model, optimizer, seed)
    path = save_checkpoint(tmp_path, 3, model_and_optimizer_tensors(model, optimizer), {})
    other, other_optimizer = make()
    restore_model_and_optimizer(other, other_optimizer, load_checkpoint(path)[0])
    for seed in range(3, 6):
        step(model, optimizer, seed)
        step(other, other_optimizer, seed)
    assert equal(model_and_optimizer_tensors(model, optimizer), model_and_optimizer_tensors(other, other_optimizer))
    assert not torch.equal(next(other.parameters()), next(make()[0].parameters()))


def test_a_checkpoint_of_another_shape_is_refused(tmp_path):
    model = torch.nn.Linear(4, 3)
    optimizer = build_optimizer(model.named_parameters(), OptimizerConfig())
    good = {"model/weight": torch.zeros(3, 4), "model/bias": torch.zeros(3)}
    restore_model_and_optimizer(model, optimizer, good)
    for bad in (
        good | {"model/weight": torch.zeros(4, 3)},
        good | {"model/other": torch.zeros(1)},
        {"model/weight": good["model/weight"]},
        good | {"optimizer/gone/exp_avg": torch.zeros(1)},
    ):
        with pytest.raises(UserError, match="checkpoint"):
            restore_model_and_optimizer(model, optimizer, bad)


def test_a_foreign_index_is_refused(tmp_path):
    path = save_checkpoint(tmp_path, 1, TENSORS, STATE)
    (path / "index.json").write_text(json.dumps({"format": "other", "tensors": {}}))
    with pytest.raises(UserError, match="not of format"):
        load_checkpoint(path, verify=False)
