"""Which parameter belongs to which unit, and models that are built without ever being whole."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from configs.errors import UserError
from llm.args import ModelConfig
from llm.metrics_memory import LiveTensorBytes
from llm.transformer import Transformer
from llm.transformer_init import BLOCK_ELEMENTS, initialise, initialise_range, transformer_on_meta
from parallel.fsdp import FsdpSettings
from parallel.fsdp_init import apply_fsdp, assign
from parallel.mesh import Mesh
from parallel.mesh_degrees import Degrees
from tests.parallel.pool import pool_of

MODEL = ModelConfig(
    vocab_size=61, max_seq_len=32, d_model=24, num_layers=3, num_heads=3, num_kv_heads=1, d_ff=40, tie_embeddings=True
)


def run(world_size: int, function) -> list:
    return pool_of(world_size).run(function, degrees=Degrees(dp_shard=None))


def test_a_parameter_of_two_units_belongs_to_the_root():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    second.weight = first.weight
    model = nn.ModuleDict({"first": first, "second": second, "last": nn.Linear(2, 2)})
    root, one, two = assign(model, [first, second])
    assert [name for name, _ in root] == ["first.weight", "last.weight", "last.bias"]
    assert [name for name, _ in one] == ["first.bias"] and two == []
    with pytest.raises(AssertionError, match="no part of the model"):
        assign(model, [nn.Linear(2, 2)])


def build_on_meta(mesh):
    model = transformer_on_meta(MODEL)
    fill = partial(initialise_range, seed=1, num_layers=MODEL.num_layers)
    strategy = apply_fsdp(model, mesh, FsdpSettings(), model.blocks.values(), fill)
    tied = model.output.weight is model.embedding.weight
    return strategy.full_parameters(), tied, mesh.log.drain(0)


@pytest.mark.dist
def test_initialisation_on_meta_matches_the_whole_model():
    model = Transformer(MODEL)
    initialise(model, seed=1)
    for sharded, tied, log in run(3, build_on_meta):
        assert tied and not any(line["op"] == "broadcast" for line in log)
        for name, param in model.named_parameters():
            assert torch.equal(sharded[name], param), name


class ShrinkingBytes(LiveTensorBytes):
    """Looks at every storage again after each operation: a unit's memory is made in full and then freed."""

    def watch(self, tensor: torch.Tensor) -> None:
        super().watch(tensor)
        storage = tensor.untyped_storage()
        self.elastic.setdefault(id(storage), storage.nbytes())


def bytes_to_build(mesh):
    config = replace(MODEL, num_layers=8)
    model = transformer_on_meta(config)
    fill = partial(initialise_range, seed=1, num_layers=8)
    with ShrinkingBytes() as memory:
        strategy = apply_fsdp(model, mesh, FsdpSettings(), model.blocks.values(), fill)
    full = sum(param.numel() * param.element_size() for param in model.parameters())
    return memory.peak_bytes / full, sum(unit.master.nbytes for unit in strategy.all_units) / full


@pytest.mark.dist
def test_building_on_meta_never_takes_the_memory_of_the_full_model():
    for peak, shards in run(3, bytes_to_build):
        assert shards < 0.36  # a third, and padding
        assert peak < shards + 0.25  # one unit at a time besides


def test_a_model_on_meta_needs_its_weights():
    model, mesh = transformer_on_meta(MODEL), Mesh(0, 0, 1, torch.device("cpu"), "none", {})
    with pytest.raises(UserError, match="fill"):
        apply_fsdp(model, mesh, FsdpSettings(), model.blocks.values())
    model.rope.to("meta")
    with pytest.raises(UserError, match="frequency_bits"):
        apply_fsdp(model, mesh, FsdpSettings(), model.blocks.values())


def test_any_range_of_a_parameter_is_drawn_as_in_the_whole():
    shape = (5, BLOCK_ELEMENTS // 3)
    whole = torch.empty(shape).view(-1)
    initialise_range("blocks.0.ffn.up_proj.weight", shape, 0, whole, seed=3, num_layers=2)
    assert whole.std().item() == pytest.approx(0.02, rel=0.01)
    for start, length in ((0, 7), (BLOCK_ELEMENTS - 3, 6), (BLOCK_ELEMENTS + 1, 1000), (whole.numel() - 5, 5)):
        part = torch.empty(length)
        initialise_range("blocks.0.ffn.up_proj.weight", shape, start, part, seed=3, num_layers=2)
        assert torch.equal(part, whole[start : start + length])
