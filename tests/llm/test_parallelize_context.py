"""Context parallelism of the model on gloo ranks: logits and gradients of packed documents, labels, bad settings."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from configs.errors import UserError
from llm.args import DataConfig, ModelConfig, ParallelConfig, TrainConfig
from llm.data_loader import Batch, document_layout
from llm.evaluation import evaluate_stages, evaluate_sums
from llm.loss import IGNORE_INDEX
from llm.parallelize import parallelize
from llm.parallelize_context import apply_context, check_context
from llm.transformer import Transformer
from llm.transformer_context import make_context
from llm.transformer_init import initialise
from parallel.collectives import all_reduce_sum
from parallel.mesh_degrees import Degrees
from tests.parallel.pool import pool_of
from tests.tolerances import FP32_GRADIENT, FP64

EOT, VOCAB = 0, 40
MODES = [
    ("ring", "eager"), ("ring", "mock"), ("ring", "sdpa"), ("all_gather", "sdpa"), ("all_gather", "eager"),
    ("ulysses", "sdpa"), ("ulysses", "mock"),
]  # fmt: skip


def config_of(mode: str, backend: str, ranks: int, seq_len: int = 21, **parallel) -> TrainConfig:
    model = ModelConfig(
        vocab_size=VOCAB, max_seq_len=64, d_model=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, d_ff=32,
        attention=backend,
    )  # fmt: skip
    settings = ParallelConfig(cp=ranks, cp_mode=mode, **parallel)
    return TrainConfig(name="context", model=model, data=DataConfig(seq_len=seq_len), parallel=settings)


def packed_batch(seq_len: int, documents: bool) -> Batch:
    """Two rows; documents of 1 to 12 tokens begin at ids 0, so borders lie inside chunks, on them and across ranks."""
    generator = torch.Generator().manual_seed(5)
    token_ids = torch.randint(1, VOCAB, (2, seq_len + 1), generator=generator)
    token_ids[0, [0, 5, 6, 17]] = EOT
    token_ids[1, [0, 12]] = EOT
    targets = token_ids[:, 1:].clone()
    targets[1, -4:] = IGNORE_INDEX
    batch = Batch(token_ids[:, :-1], targets, int((targets != IGNORE_INDEX).sum()))
    if documents:
        doc_ids, positions = document_layout(batch.token_ids.numpy(), EOT)
        batch.doc_ids, batch.token_positions = torch.from_numpy(doc_ids), torch.from_numpy(positions)
    return batch


def make_model(config: TrainConfig) -> Transformer:
    model = Transformer(config.model)
    initialise(model, seed=1)
    return model.double()


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def run_share(mesh, config: TrainConfig, documents: bool) -> dict[str, torch.Tensor]:
    """On a rank: its columns, labels and logits, and gradients summed over the ranks."""
    model = make_model(config)
    shards = apply_context(model, config, mesh)
    batch = shards.shard(packed_batch(config.data.seq_len, documents))
    logits = model(batch.token_ids, shards.make_context(batch.token_ids, batch.token_positions, batch.doc_ids))
    loss_of(logits, batch.targets).backward()
    gradients = {name: all_reduce_sum(param.grad, mesh, "dp_cp") for name, param in model.named_parameters()}
    whole = packed_batch(config.data.seq_len, documents)
    sums = evaluate_sums(model, [whole], config.data.seq_len, mesh.device, shards=shards).tensor
    with torch.no_grad():  # as generation calls it: a context without a share
        alone = model(whole.token_ids, make_context(whole.token_ids))
    columns = shards.columns_of(config.data.seq_len, "cpu")
    return {"columns": columns, "targets": batch.targets, "logits": logits.detach(), "alone": alone,
            "sums": all_reduce_sum(sums, mesh, "dp_cp")} | gradients  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize("documents", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize(("mode", "backend"), MODES)
def test_a_sequence_over_ranks_matches_one_device(mode, backend, documents):
    config = config_of(mode, backend, ranks=2)  # 21 tokens: padded to 24 or 22
    shares = pool_of(2).run(run_share, config, documents, degrees=Degrees(dp=1, cp=2))
    batch, model = packed_batch(21, documents), make_model(config)
    logits = model(batch.token_ids, make_context(batch.token_ids, batch.token_positions, batch.doc_ids))
    loss_of(logits, batch.targets).backward()
    check_near("logits", put_together(shares, "logits"), logits.detach(), FP64)
    for name, param in model.named_parameters():
        check_near(name, shares[0][name], param.grad, FP64)
    sums = evaluate_sums(model, [batch], 21, torch.device("cpu")).tensor
    assert all(torch.allclose(share["sums"], sums, rtol=FP32_GRADIENT) for share in shares)
    with torch.no_grad():
        check_near("generation", shares[1]["alone"], model(batch.token_ids), FP64)


def put_together(shares: list[dict[str, torch.Tensor]], name: str, length: int = 21) -> torch.Tensor:
    """(B, T, ...) from the ranks' columns, padding dropped; every column comes once."""
    columns = torch.cat([share["columns"] for share in shares])
    assert columns.sort().values.tolist() == list(range(len(columns)))
    return torch.cat([share[name] for share in shares], dim=1)[:, columns.argsort()][:, :length]


def check_near(name: str, got: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    difference = (got - expected).abs().max().item()
    assert difference <= bound * expected.abs().max().item(), f"{name} differs by {difference}"


@pytest.mark.dist
def test_labels_are_those_of_the_next_token_of_the_sequence():
    config = config_of("ring", "eager", ranks=3)
    shares = pool_of(3).run(run_share, config, False, degrees=Degrees(dp=1, cp=3))
    assert torch.equal(put_together(shares, "targets"), packed_batch(21, False).targets)


@pytest.mark.dist
def test_a_rank_that_holds_nothing_but_padding():
    config = config_of("ulysses", "sdpa", ranks=4, seq_len=18)
    config.data = replace(config.data, seq_len=5)  # padded to 8: the last rank's two tokens lie beyond it
    shares = pool_of(4).run(run_short, config, degrees=Degrees(dp=1, cp=4))
    assert [share["num_targets"] for share in shares] == [4, 4, 2, 0]
    batch, model = short_batch(), make_model(config)
    loss_of(model(batch.token_ids), batch.targets).backward()
    check_near("embedding", shares[3]["gradient"], model.embedding.weight.grad, FP64)


def short_batch() -> Batch:
    token_ids = torch.arange(1, 13).view(2, 6)
    return Batch(token_ids[:, :-1], token_ids[:, 1:], 10)


def run_short(mesh, config: TrainConfig) -> dict:
    model = make_model(config)
    shards = apply_context(model, config, mesh)
    batch = shards.shard(short_batch())
    logits = model(batch.token_ids, shards.make_context(batch.token_ids, batch.token_positions, batch.doc_ids))
    loss_of(logits, batch.targets).backward()
    return {"num_targets": batch.num_targets, "gradient": all_reduce_sum(model.embedding.weight.grad, mesh, "dp_cp")}


def validate_stages(mesh, config: TrainConfig) -> torch.Tensor:
    parts = parallelize(make_model(config), config, mesh)
    whole = packed_batch(config.data.seq_len, documents=True)
    sums = evaluate_stages(parts.pipeline, [whole, whole], config.data.seq_len, mesh.device, parts.shards).tensor
    return all_reduce_sum(all_reduce_sum(sums, mesh, "dp_cp"), mesh, "pp")


@pytest.mark.dist
def test_validation_through_stages_counts_each_token_once():
    config = config_of("ring", "eager", ranks=2, pp=2)
    results = pool_of(4).run(validate_stages, config, degrees=Degrees(dp=1, cp=2, pp=2))
    batch = packed_batch(21, documents=True)
    wanted = evaluate_sums(make_model(config), [batch, batch], 21, torch.device("cpu")).tensor
    assert all(torch.allclose(sums, wanted, rtol=FP32_GRADIENT) for sums in results)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (config_of("ring", "eager", 2, cp_pad=False), r"data.seq_len=21 must be a multiple of 4 .* use 24"),
        (config_of("ring", "sdpa", 2), "model.attention=sdpa gives no logsumexp.*model.attention=triton"),
        (config_of("ulysses", "sdpa", 3), "parallel.cp=3 with cp_mode=ulysses must divide num_heads"),
        (config_of("ulysses", "sdpa", 4, tp=2), "must divide num_heads / tp = 4 / 2"),
        (replace(config_of("ring", "eager", 2), compile="model"), "compile=model.*use compile=block"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(config, told):
    with pytest.raises(UserError, match=told):
        check_context(config)


def test_an_unknown_mode_is_refused():
    with pytest.raises(UserError, match="cp_mode='spiral' is unknown"):
        ParallelConfig(cp=2, cp_mode="spiral")


def forget_the_share(mesh, config: TrainConfig) -> None:
    model = make_model(config)
    apply_context(model, config, mesh)
    model(packed_batch(21, False).token_ids)


@pytest.mark.dist
def test_training_without_a_share_is_an_error():
    with pytest.raises(RuntimeError, match=r"training under parallel\.cp > 1 needs"):
        pool_of(2).run(forget_the_share, config_of("ring", "eager", 2), degrees=Degrees(dp=1, cp=2))
