"""Adapters against the formula written out, merged weights, layouts, and what a run saves and starts from."""

import pytest
import torch

from configs.errors import UserError
from configs.loader import compose_config
from configs.run_dir import read_jsonl
from llm.args import DataConfig, ModelConfig, ParallelConfig, TrainConfig
from llm.checkpoint import load_checkpoint
from llm.data_loader import Batch
from llm.lora import LoraConfig, apply_lora, is_adapter, merge
from llm.loss import CrossEntropyLoss
from llm.model_loading import load_model
from llm.optimizer import OptimizerConfig
from llm.parallelize import make_forward_loss, parallelize
from llm.training import train
from llm.training_step import TrainingStep, rows_of_rank
from llm.transformer import Transformer
from llm.transformer_init import initialise, initialise_parameter
from parallel.mesh import Mesh, init_mesh
from parallel.sharded_checkpoint_manifest import find_checkpoint
from tests.parallel.pool import pool_of
from tests.tolerances import FP64

SHAPE = ModelConfig(vocab_size=37, max_seq_len=16, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=48)
LORA = LoraConfig(rank=4, alpha=8.0)


def model_with_adapters(shape=SHAPE, config=LORA):
    model = Transformer(shape)
    initialise(model, seed=0)
    apply_lora(model, config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    return model.double()


def test_a_layer_computes_the_formula_and_only_adapters_learn():
    layer = model_with_adapters().blocks["0"].attention.q_proj
    x = torch.randn(3, 32, dtype=torch.float64)
    wanted = x @ (layer.weight + 2.0 * layer.lora_b @ layer.lora_a).T  # alpha / rank = 2
    torch.testing.assert_close(layer(x), wanted, rtol=FP64, atol=FP64)
    layer(x).square().sum().backward()
    assert layer.weight.grad is None and layer.lora_a.grad.any() and layer.lora_b.grad.any()


def test_names_and_numbers_of_parameters():
    model = model_with_adapters(config=LoraConfig(rank=4, targets=["q_proj", "down_proj"]))
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable == {
        f"blocks.{layer}.{module}.{factor}"
        for layer in range(2)
        for module in ("attention.q_proj", "ffn.down_proj")
        for factor in ("lora_a", "lora_b")
    }
    plain = {name for name, _ in Transformer(SHAPE).named_parameters()}
    assert {name for name, _ in model.named_parameters()} - trainable == plain


def test_adapters_at_their_start_change_nothing():
    model, plain = Transformer(SHAPE), Transformer(SHAPE)
    initialise(model, seed=0)
    initialise(plain, seed=0)
    apply_lora(model, LORA)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            initialise_parameter(name, parameter, seed=0, num_layers=2)
    ids = torch.arange(12)[None]
    assert torch.equal(model(ids), plain(ids))
    factor = model.blocks["0"].ffn.down_proj.lora_a
    assert factor.std().item() == pytest.approx((3 * 48) ** -0.5, rel=0.15)


@pytest.mark.parametrize("prefix", ["", "model/"])
def test_merged_weights_give_the_same_logits(prefix):
    model, plain = model_with_adapters(), Transformer(SHAPE).double()
    tensors = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    merged = merge(tensors, LORA)
    plain.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in merged.items()})
    ids = torch.arange(14)[None]
    torch.testing.assert_close(plain(ids), model(ids), rtol=1e-10, atol=FP64)
    assert merge(plain.state_dict(), LoraConfig()).keys() == plain.state_dict().keys()


@pytest.fixture
def overrides(tiny_corpus, tmp_path):
    return [*tiny_corpus.overrides(tmp_path), "max_steps=3", "validate_every=3"]


def configure(overrides, *more):
    return compose_config(TrainConfig, "training", [*overrides, *more])


def test_a_run_with_adapters_starts_from_weights_and_saves_what_merges(overrides, tmp_path):
    train(configure(overrides, "name=base"))
    train(configure(overrides, "name=lora", f"init_from={tmp_path}/base", "lora.rank=4", "seed=5"))
    base, _ = load_checkpoint(find_checkpoint(tmp_path / "base/checkpoints"), prefix="model/")
    tuned, state = load_checkpoint(find_checkpoint(tmp_path / "lora/checkpoints"))
    for name, tensor in base.items():
        assert torch.equal(tuned[name], tensor), f"{name} is frozen"
    updated = {name.split("/")[1] for name in tuned if name.startswith("optimizer/")}
    assert updated and all(is_adapter(name) for name in updated)
    assert state["config"]["lora"]["rank"] == 4
    model, _, _ = load_model(find_checkpoint(tmp_path / "lora/checkpoints"), torch.device("cpu"))
    name = "blocks.0.attention.q_proj"
    update = 8.0 * tuned[f"model/{name}.lora_b"] @ tuned[f"model/{name}.lora_a"]  # 32 / 4
    assert update.any() and not any(is_adapter(name) for name, _ in model.named_parameters())
    torch.testing.assert_close(model.get_parameter(f"{name}.weight").data, base[f"model/{name}.weight"] + update)
    # A run without adapters starts from the merged weights: at a rate of nothing they stay what they are.
    train(configure(overrides, "name=full", f"init_from={tmp_path}/lora", "optimizer.lr=1e-30", "max_steps=1"))
    full, _ = load_checkpoint(find_checkpoint(tmp_path / "full/checkpoints"), prefix="model/")
    assert full.keys() == base.keys()
    for name, tensor in model.named_parameters():
        torch.testing.assert_close(full[f"model/{name}"], tensor.data, rtol=0.0, atol=1e-7)


def test_a_killed_run_with_adapters_continues_bit_for_bit(overrides, tmp_path):
    train(configure(overrides, "name=whole", "lora.rank=4"))
    # A checkpoint after each step; the first run is cut off before its third.
    train(configure(overrides, "name=cut", "lora.rank=4", "checkpoint.every_steps=1", "schedule=constant"))
    losses = [line["loss"] for line in read_jsonl(tmp_path / "cut/metrics.jsonl") if "loss" in line]
    last = find_checkpoint(tmp_path / "cut/checkpoints")
    for path in (last, tmp_path / "cut/metrics.jsonl"):
        path.rename(path.with_name(f"gone_{path.name}"))
    (tmp_path / "cut/metrics.jsonl").write_text("")
    train(configure(overrides, "name=cut", "lora.rank=4", "checkpoint.every_steps=1", "schedule=constant"))
    again = [line["loss"] for line in read_jsonl(tmp_path / "cut/metrics.jsonl") if "loss" in line]
    assert again == losses[2:]
    one, _ = load_checkpoint(find_checkpoint(tmp_path / "cut/checkpoints"))
    other, _ = load_checkpoint(last.with_name(f"gone_{last.name}"), verify=False)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def adapted_after_steps(mesh: Mesh, parallel: ParallelConfig) -> tuple[dict[str, torch.Tensor], list[float]]:
    """On a rank: three SGD steps of adapters in float64; every adapter in full, and the norms of the gradients."""
    # A ring needs a backend with a logsumexp.
    shape = ModelConfig(**{**SHAPE.__dict__, "attention": "eager", "tie_embeddings": True})
    config = TrainConfig(
        name="lora", model=shape, optimizer=OptimizerConfig(name="sgd", lr=3.0, weight_decay=0.0, clip_norm=None),
        data=DataConfig(seq_len=8), parallel=parallel, max_steps=3, global_batch_tokens=32, lora=LORA, dtype="float32",
    )  # fmt: skip
    model = Transformer(shape)
    initialise(model, seed=0)
    parts = parallelize(model.double(), config, mesh)
    step = TrainingStep(
        config, mesh, parts, make_forward_loss(parts.head_model, CrossEntropyLoss(), parts.compile, parts.shards)
    )
    norms = []
    for number in range(3):
        ids = torch.randint(0, 37, (4, 9), generator=torch.Generator().manual_seed(number))
        targets = ids[:, 1:].masked_fill(torch.arange(8) < torch.tensor([6, 0, 3, 5])[:, None], -100)
        rows = rows_of_rank(4, mesh)
        own = [Batch(ids[r : r + 1, :-1], targets[r : r + 1], int((targets[r] >= 0).sum())) for r in rows]
        norms.append(step.run(number, own).gradient_norm)
    full = parts.strategy.full_parameters()  # FSDP gives the frozen ones too
    return {name: value.clone() for name, value in full.items() if is_adapter(name)}, norms


LAYOUTS = {
    "ddp": ParallelConfig(),
    "zero1": ParallelConfig(zero=1),
    "zero2": ParallelConfig(zero=2),
    "zero3": ParallelConfig(zero=3),
    "tp": ParallelConfig(tp=2),
    "tp without sequence parallelism": ParallelConfig(tp=2, sequence_parallel=False),
    "pp": ParallelConfig(pp=2),
    "cp": ParallelConfig(cp=2),
}


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_learn_the_same_under_every_layout(layout):
    wanted, wanted_norms = adapted_after_steps(init_mesh("cpu"), ParallelConfig())
    assert all(is_adapter(name) for name in wanted) and len(wanted) == 2 * 2 * 7
    assert all(value.any() for value in wanted.values())
    parallel = LAYOUTS[layout]
    for parameters, norms in pool_of(2).run(adapted_after_steps, parallel, degrees=parallel.degrees()):
        assert parameters.keys() == wanted.keys() and norms == pytest.approx(wanted_norms, rel=1e-10)
        for name, value in wanted.items():
            torch.testing.assert_close(parameters[name], value, rtol=1e-9, atol=FP64, msg=f"{layout}: {name}")


def test_weights_of_another_shape_are_refused(overrides, tmp_path):
    train(configure(overrides, "name=base"))
    with pytest.raises(UserError, match=r"init_from=.*does not fit the model"):
        train(configure(overrides, "name=other", f"init_from={tmp_path}/base", "model.d_ff=64"))
    with pytest.raises(UserError, match="is not a directory"):
        train(configure(overrides, "name=other", f"init_from={tmp_path}/nothing"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"rank": -1}, "negative"), ({"rank": 4, "alpha": 0.0}, "positive"), ({"rank": 4, "targets": ["wq"]}, "q_proj")],
)
def test_wrong_values_are_refused_with_the_fix(changes, words):
    with pytest.raises(UserError, match=words):
        LoraConfig(**changes)


def test_a_rank_beyond_the_layer_is_refused():
    with pytest.raises(UserError, match=r"lora.rank=20"):
        apply_lora(Transformer(SHAPE), LoraConfig(rank=20))
