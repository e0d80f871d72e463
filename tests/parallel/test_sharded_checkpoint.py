"""Checkpoints of several gloo ranks: any layout loads any other's, and no fault of one rank leaves another waiting."""

import json
import math
import os
import re
import resource

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from configs.errors import UserError
from llm.checkpoint import load_checkpoint
from parallel.sharded_checkpoint import Save, load_pieces, open_checkpoint, save_pieces
from parallel.sharded_checkpoint_agree import SharedFault, together
from parallel.sharded_checkpoint_files import CheckpointReader, check_cover, merge_indexes, plan_files, runs_of
from parallel.sharded_checkpoint_manifest import damage, find_checkpoint, share_of_files
from parallel.sharded_checkpoint_pieces import Box, Piece, boxes_of, pieces_to_write, scalar, whole
from tests.parallel.pool import run_ranks

SHAPES = {"a": (5, 3), "b": (7,), "c": (), "d": (2, 3, 4), "e": (1,)}
LAYOUTS = ("replicated", "rows", "flat", "hybrid")


def full_tensors(shift=0.0):
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) + shift for name, shape in SHAPES.items()}


def pieces_of_rank(layout, rank, ranks, tensors):
    """What a rank holds of SHAPES: all, padded rows, flat slices of one bucket, or flat slices kept twice."""
    if layout == "replicated":
        return [whole(f"model/{name}", value.clone(), ranks, rank) for name, value in tensors.items()]
    copies = 2 if layout == "hybrid" and ranks % 2 == 0 else 1
    shards, shard, replica = ranks // copies, rank % (ranks // copies), rank // (ranks // copies)
    pieces, begin = [], 0
    per_rank = -(-sum(value.numel() for value in tensors.values()) // shards)
    for name, value in tensors.items():
        if layout == "rows":
            row = math.prod(value.shape[1:])
            rows = -(-(value.shape[0] if value.ndim else 1) // shards)
            padded = torch.full((rows * shards * row,), float("nan"))
            padded[: value.numel()] = value.reshape(-1)
            start, local = shard * rows * row, padded.view(shards, rows * row)[shard].clone()
        else:
            start = min(max(shard * per_rank - begin, 0), value.numel())
            stop = min(max((shard + 1) * per_rank - begin, 0), value.numel())
            local = value.reshape(-1)[start:stop].clone()
            begin += value.numel()
        pieces.append(Piece(f"model/{name}", tuple(value.shape), start, local, copies, replica))
    return pieces


def save_in(mesh, directory, layout):
    pieces = pieces_of_rank(layout, mesh.rank, mesh.world_size, full_tensors())
    save_pieces(directory, 1, pieces, Save({"tokens_seen": 5}), mesh)
    assert find_checkpoint(directory, mesh) == directory / "step_00000001"


def load_in(mesh, path, layout):
    pieces = pieces_of_rank(layout, mesh.rank, mesh.world_size, full_tensors(shift=100.0))
    reader, state = together(mesh, open_checkpoint, path)
    load_pieces(reader, pieces)
    expected = pieces_of_rank(layout, mesh.rank, mesh.world_size, full_tensors())
    same = all(torch.equal(p.local[: p.numel], e.local[: e.numel]) if p.local.ndim else torch.equal(p.local, e.local)
               for p, e in zip(pieces, expected, strict=True))  # fmt: skip
    held = sum(piece.numel for piece in pieces) * 4
    return same, state, reader.bytes_read, held


def pairs():
    for number, layout in enumerate(LAYOUTS):
        other = LAYOUTS[(number + 1) % len(LAYOUTS)]
        yield (layout, 2), (other, 3)
        yield (layout, 3), (other, 2)
        yield (layout, 4), (layout, 1)
        yield (layout, 1), (other, 4)


@pytest.mark.dist
@pytest.mark.parametrize(("saved", "loaded"), list(pairs()))
def test_any_layout_loads_any_other(tmp_path, saved, loaded):
    run_ranks(save_in, saved[1], tmp_path, saved[0])
    path = tmp_path / "step_00000001"
    tensors, state = load_checkpoint(path)
    assert state == {"step": 1, "tokens_seen": 5}
    assert all(torch.equal(tensors[f"model/{name}"], value) for name, value in full_tensors().items())
    for same, state, bytes_read, held in run_ranks(load_in, loaded[1], path, loaded[0]):
        assert same and state["tokens_seen"] == 5
        assert bytes_read == held  # a rank reads what it holds and not a byte more


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
    assert torch.equal(CheckpointReader(tmp_path, index).full("model/w"), full)
    index["model/w"]["pieces"] = pieces[:2]
    with pytest.raises(UserError, match="pieces of model/w hold 12 elements of 24 and leave out 12"):
        CheckpointReader(tmp_path, index)
    twice = {"file": "rank_0.safetensors", "key": "left", "offsets": [1, 0], "shape": [3, 2]}
    index["model/w"]["pieces"] = [*pieces[:2], twice, twice | {"offsets": [1, 2]}]  # 24 elements, some of them twice
    with pytest.raises(UserError, match="leave out 6"):
        CheckpointReader(tmp_path, index)
    index["model/w"]["pieces"] = [*pieces[:2], pieces[2] | {"offsets": [1, 3]}]
    with pytest.raises(UserError, match="leaves the shape"):
        CheckpointReader(tmp_path, index)
    index["model/w"]["pieces"] = [pieces[0] | {"file": "../rank_0.safetensors"}]
    with pytest.raises(UserError, match="plain file name"):
        CheckpointReader(tmp_path, index)


def test_large_tensors_go_to_further_files():
    big = torch.empty(3 << 30, dtype=torch.uint8, device="meta")
    boxes = [Box(name, tuple(big.shape), (0,), big) for name in ("model/a", "optimizer/a/m", "model/b")]
    plan = [(file, [box.name for box in content]) for file, content in plan_files(boxes, rank=2)]
    assert plan == [
        ("model_00002.safetensors", ["model/a"]),
        ("model_00002_1.safetensors", ["model/b"]),
        ("optimizer_00002.safetensors", ["optimizer/a/m"]),
    ]


def test_a_run_of_elements_is_few_boxes_that_hold_exactly_it():
    generator = torch.Generator().manual_seed(0)

    def draw(high):
        return int(torch.randint(0, high + 1, (), generator=generator))

    for _ in range(300):
        shape = tuple(1 + draw(4) for _ in range(draw(4)))
        full = torch.arange(math.prod(shape)).view(shape)
        start = draw(full.numel())
        count = draw(full.numel() - start)
        boxes = boxes_of(Piece("x", shape, start, full.reshape(-1)[start : start + count].clone()))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        seen = torch.full(shape, -1)
        for box in boxes:
            seen[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.values.shape, strict=True))] = box.values
        expected = torch.full((full.numel(),), -1)
        expected[start : start + count] = full.reshape(-1)[start : start + count]
        assert torch.equal(seen.reshape(-1), expected)


def test_runs_of_a_box_are_its_elements():
    full = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    for offsets, size in (((0, 0, 0, 0), (2, 3, 4, 5)), ((1, 1, 0, 0), (1, 2, 4, 5)), ((0, 1, 2, 1), (2, 1, 2, 3)),
                          ((0, 0, 1, 0), (2, 3, 2, 5)), ((1, 0, 0, 4), (1, 3, 4, 1))):  # fmt: skip
        starts, length = runs_of(full.shape, offsets, size)
        found = (starts[:, None] + np.arange(length)).reshape(-1)
        box = full[tuple(slice(o, o + n) for o, n in zip(offsets, size, strict=True))]
        assert sorted(found.tolist()) == sorted(box.reshape(-1).tolist())


def test_replicated_pieces_are_written_once_and_shared_out_by_bytes():
    sizes = [9, 5, 4, 3, 1, 1]
    chosen = []
    for replica in range(3):
        pieces = [whole(f"model/{n}", torch.zeros(size), 3, replica) for n, size in enumerate(sizes)]
        chosen.append([piece.name for piece in pieces_to_write(pieces)])
    assert sorted(name for names in chosen for name in names) == [f"model/{n}" for n in range(len(sizes))]
    loads = [sum(sizes[int(name[6:])] for name in names) for names in chosen]
    assert max(loads) == 9


def test_a_step_count_is_saved_by_the_rank_with_the_first_element():
    step, first, second = torch.tensor(4.0), torch.zeros(3), torch.zeros(2)
    assert scalar("optimizer/w/step", step, Piece("w", (5,), 0, first)).numel == 1
    assert scalar("optimizer/w/step", step, Piece("w", (5,), 3, second)) is None
    assert scalar("optimizer/w/step", step, Piece("w", (5,), 0, torch.zeros(0))) is None
    left, right = (Piece("w", (4, 6), 0, torch.zeros(4, 3), box=((0, column), (4, 3))) for column in (0, 3))
    assert scalar("optimizer/w/step", step, left).numel == 1 and scalar("optimizer/w/step", step, right) is None


def test_runs_of_a_part_of_the_columns_are_boxes_of_the_whole():
    full = torch.arange(24.0).view(4, 6)
    part = full[:, 2:5].contiguous()
    seen = torch.full_like(full, -1)
    for start, stop in ((0, 5), (5, 12)):
        for box in boxes_of(Piece("w", (4, 6), start, part.view(-1)[start:stop], box=((0, 2), (4, 3)))):
            seen[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.values.shape, strict=True))] = box.values
    assert torch.equal(seen[:, 2:5], part) and (seen[:, :2] == -1).all() and (seen[:, 5] == -1).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": [1, 0]}, "leave out 4; each must be held once"),  # two over the same elements
        ({"offsets": [3, 0]}, "leaves the shape"),
        ({"offsets": [-1, 0]}, "leaves the shape"),
        ({"offsets": [2]}, "leaves the shape"),
        ({"shape": [1, 4]}, "hold 12 elements of 16 and leave out 4"),
    ],
)
def test_pieces_that_do_not_make_up_the_tensor_are_refused(change, message):
    top = {"file": "f", "key": "x", "offsets": [0, 0], "shape": [2, 4]}
    entry = {"shape": [4, 4], "dtype": "float32", "pieces": [top, top | {"offsets": [2, 0]}]}
    check_cover("x", entry)
    with pytest.raises(ValueError, match=message):
        check_cover("x", entry | {"pieces": [top, top | {"offsets": [2, 0]} | change]})


def test_ranks_that_disagree_about_a_tensor_are_refused():
    piece = {"file": "f", "key": "x", "offsets": [0], "shape": [2]}
    own, other = ({"x": {"shape": [4], "dtype": kind, "pieces": [piece | {"offsets": [o]}]}}
                  for kind, o in (("float32", 0), ("bfloat16", 2)))  # fmt: skip
    with pytest.raises(ValueError, match="x has dtype float32 on one rank and bfloat16 on another"):
        merge_indexes([own, other])
    with pytest.raises(ValueError, match="x hold 4 elements of 4 and leave out 2"):
        merge_indexes([own, {"x": own["x"]}])


def load_with_faults(path, name, shape):
    reader, _ = open_checkpoint(path)
    load_pieces(reader, [whole(name, torch.zeros(shape))])


def test_a_missing_or_misshapen_tensor_is_named(tmp_path):
    path = save_pieces(tmp_path, 1, [whole("model/w", torch.ones(4, 3))], Save({}))
    with pytest.raises(UserError, match="holds no tensor model/v"):
        load_with_faults(path, "model/v", (4, 3))
    with pytest.raises(UserError, match=r"holds model/w of shape \[4, 3\], the model has \[3, 4\]"):
        load_with_faults(path, "model/w", (3, 4))
    save_file({"model/w": torch.ones(4, 4)}, path / "model_00000.safetensors")
    with pytest.raises(UserError, match=r"\[4, 4\], the index says float32 \[4, 3\]"):
        load_with_faults(path, "model/w", (4, 3))
    (path / "model_00000.safetensors").unlink()
    with pytest.raises(UserError, match="do not fit together"):
        load_with_faults(path, "model/w", (4, 3))
    index = json.loads((path / "index.json").read_text())
    index["tensors"]["model/w"]["dtype"] = "float31"
    (path / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="KeyError 'float31'"):
        load_with_faults(path, "model/w", (4, 3))


def fail_on_one_rank(mesh, directory, failing, kind):
    """Save once whole, then once with a fault on one rank: what every rank is told, and what is left on the disk."""
    save_in(mesh, directory, "rows")
    pieces = pieces_of_rank("rows", mesh.rank, mesh.world_size, full_tensors())
    if mesh.rank == failing and kind == "extra":
        pieces.append(whole("model/a", torch.ones(5, 3)))  # held already by the others
    if mesh.rank == failing and kind == "shape":
        pieces[0] = Piece("model/a", (3, 5), pieces[0].start, pieces[0].local)
    extras = write_nothing if kind == "extras" else None
    if mesh.rank == failing and kind == "disk":
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))  # an OSError half way, as a full disk gives
    try:
        save_pieces(directory, 2, pieces, Save({}, extras), mesh)
        message = None
    except UserError as error:
        message = str(error)
    finally:
        if mesh.rank == failing and kind == "disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return message, find_checkpoint(directory, mesh).name


def write_nothing(directory):
    raise OSError("No space left on device")


@pytest.mark.dist
@pytest.mark.parametrize(("failing", "kind", "reason"), [
    (1, "disk", "rank 1: .*File too large"),
    (0, "disk", "rank 0: .*File too large"),
    (0, "extras", "rank 0: No space left on device"),
    (2, "extra", "rank 0: .*each must be held once"),
    (2, "shape", r"rank 0: .*model/a has shape \[5, 3\] on one rank and \[3, 5\] on another"),
])  # fmt: skip
def test_a_fault_of_one_rank_is_told_to_all_and_leaves_the_older_checkpoint(tmp_path, failing, kind, reason):
    results = run_ranks(fail_on_one_rank, 3, tmp_path, failing, kind)
    assert len({message for message, _ in results}) == 1 and {name for _, name in results} == {"step_00000001"}
    assert results[0][0] is not None and re.search(reason, results[0][0]), results[0][0]
    assert os.listdir(tmp_path) == ["step_00000001"]


def harm_and_look(mesh, directory, victim):
    """Save, flip one bit of a file, and look for damage; also the names of the files that each rank hashes."""
    save_in(mesh, directory, "rows")
    path = directory / "step_00000001"
    share = share_of_files(json.loads((path / "manifest.json").read_text()), mesh.rank, mesh.world_size)
    together(mesh, flip if mesh.rank == 0 else list, *((path / victim,) if mesh.rank == 0 else ()))
    return share, damage(path, mesh)


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.dist
@pytest.mark.parametrize("victim", ["model_00000.safetensors", "model_00002.safetensors", "index.json"])
def test_each_file_is_hashed_by_one_rank_and_all_learn_what_it_found(tmp_path, victim):
    results = run_ranks(harm_and_look, 3, tmp_path, victim)
    hashed = [name for share, _ in results for name in share]
    written = set(os.listdir(tmp_path / "step_00000001")) - {"manifest.json"}
    assert sorted(hashed) == sorted(written)
    (reason,) = {reason for _, reason in results}
    assert f"{victim} has another sha256" in reason


def misuse(mesh):
    """A fault that is neither the input's nor the disk's keeps its type where it arose, and stops the others."""
    try:
        together(mesh, (lambda: 1 // 0) if mesh.rank == 1 else int)
    except (SharedFault, ZeroDivisionError) as error:
        return type(error).__name__, str(error)


@pytest.mark.dist
def test_a_programming_error_stops_all_ranks_with_its_name():
    first, second = run_ranks(misuse, 2)
    assert first[0] == "SharedFault" and "rank 1: ZeroDivisionError" in first[1]
    assert second[0] == "ZeroDivisionError"
