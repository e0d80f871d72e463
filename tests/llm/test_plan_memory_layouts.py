"""Peak memory under tensor, context and pipeline parallelism: predicted against live tensor bytes of gloo ranks."""

from dataclasses import replace

import pytest
import torch

from llm.args import DataConfig, ModelConfig, ParallelConfig, TrainConfig
from llm.data_loader import Batch
from llm.loss import CrossEntropyLoss
from llm.metrics_memory import PeakMemory, held_tensors
from llm.parallelize import make_forward_loss, parallelize
from llm.plan_memory_layouts import layout_memory
from llm.plan_shapes import meta_params
from llm.training_step import TrainingStep
from llm.transformer import Transformer
from llm.transformer_init import initialise
from tests.parallel.pool import pool_of
from tests.tolerances import MEMORY_RATIO

pytestmark = pytest.mark.dist
T = 16
MODEL = ModelConfig(
    vocab_size=1024, max_seq_len=T, d_model=96, num_layers=4, num_heads=4, num_kv_heads=2, d_ff=256, attention="eager"
)


def config_of(
    rows: int, micro_batches: int, tie: bool = False, layers: int = 4, dtype: str = "float32", **parallel
) -> TrainConfig:
    settings = ParallelConfig(**{"bucket_mb": 0.2, "first_bucket_mb": 0.002, "dp": 1} | parallel)
    return TrainConfig(
        name="memory", model=replace(MODEL, tie_embeddings=tie, num_layers=layers), data=DataConfig(seq_len=T),
        dtype=dtype, micro_batch_size=rows, parallel=settings,
        global_batch_tokens=T * rows * micro_batches * settings.dp,
    )  # fmt: skip


def peak_of_a_step(mesh, config):
    """Live tensor bytes of a rank at most, in its second step."""
    model = Transformer(config.model)
    initialise(model, 0)
    parts = parallelize(model, config, mesh)
    forward_loss = make_forward_loss(parts.head_model, CrossEntropyLoss(), "none", parts.shards)
    step = TrainingStep(config, mesh, parts, forward_loss)
    count = config.grad_accum_steps(mesh.size("dp"))
    ids = torch.randint(0, 1024, (count, config.micro_batch_size, T), generator=torch.Generator().manual_seed(0))
    batches = [Batch(own, own.roll(-1, 1), num_targets=own.numel()) for own in ids]
    step.run(0, batches)
    held = [*held_tensors(model, parts.optimizer), *(t for batch in batches for t in (batch.token_ids, batch.targets))]
    tied = getattr(parts.strategy, "tied", None)
    if tied is not None and tied.copy is not None:
        held.append(tied.copy)
    with PeakMemory(torch.device("cpu"), held) as memory:
        step.run(1, batches)
    return memory.peak_bytes


CASES = {
    "tp": config_of(32, 1, tp=2),
    "tp without sequence parallelism": config_of(16, 2, tp=2, sequence_parallel=False),
    "tp with zero 3": config_of(16, 1, dp=2, tp=2, zero=3),
    "tp recomputed": config_of(32, 1, tp=2, activation_checkpointing="full"),
    "tp in bfloat16": config_of(64, 1, dtype="bfloat16", tp=2),
    "tp in bfloat16, in chunks": config_of(64, 1, dtype="bfloat16", tp=2, tp_chunks=2),
    "tp in bfloat16 without sequence parallelism": config_of(64, 1, dtype="bfloat16", tp=2, sequence_parallel=False),
    "ring": config_of(4, 2, cp=2),
    "gathered keys": config_of(32, 1, cp=2, cp_mode="all_gather"),
    "traded heads": config_of(32, 1, cp=2, cp_mode="ulysses"),
    "gpipe": config_of(16, 4, pp=2, pp_schedule="gpipe"),
    "1f1b": config_of(16, 6, pp=4),
    "1f1b, tied": config_of(2, 2, tie=True, pp=2),
    "1f1b recomputed": config_of(16, 4, pp=2, activation_checkpointing="full"),
    "interleaved": config_of(16, 4, pp=2, pp_schedule="interleaved", pp_chunks=2),
    "zero-bubble": config_of(16, 4, pp=2, pp_schedule="zero_bubble"),
    "pp with zero 1": config_of(16, 4, pp=2, dp=2, zero=1),
    "pp with zero 2": config_of(8, 6, layers=8, pp=2, dp=2, zero=2),
    "pp with zero 3, tied": config_of(2, 3, layers=8, tie=True, pp=2, dp=2, zero=3),
    "gpipe with zero 3": config_of(2, 4, layers=8, pp=2, dp=2, zero=3, pp_schedule="gpipe"),
    "zero 3 reduced once, recomputed": config_of(
        8, 4, layers=8, pp=2, dp=2, zero=3, reduce_each_micro_batch=False, activation_checkpointing="full"
    ),
    "interleaved with zero 2": config_of(4, 4, pp=2, dp=2, zero=2, pp_schedule="interleaved", pp_chunks=2),
    "zero-bubble with zero 3": config_of(4, 4, layers=8, pp=2, dp=2, zero=3, pp_schedule="zero_bubble"),
    "tp and pp": config_of(16, 4, tp=2, pp=2),
    "tp and zero-bubble": config_of(16, 4, tp=2, pp=2, pp_schedule="zero_bubble"),
}


@pytest.mark.parametrize("name", CASES)
def test_peak_memory_of_every_rank_matches_live_tensors(name):
    config = CASES[name]
    parallel = config.parallel
    world_size = parallel.dp * parallel.tp * parallel.cp * parallel.pp
    degrees = parallel.degrees().resolve(world_size)
    measured = pool_of(world_size).run(peak_of_a_step, config, degrees=degrees)
    params = meta_params(config.model)
    for rank, peak in enumerate(measured):
        predicted = layout_memory(config, params, "cpu", world_size, rank)
        assert peak == pytest.approx(predicted.peak_bytes, rel=MEMORY_RATIO), (rank, predicted.phases_bytes)


def test_a_pipeline_needs_less_the_more_of_it_is_sharded():
    """On paper, of the first rank in bfloat16, where parameters outweigh activations: blocks of 3M."""
    model = replace(MODEL, d_model=512, d_ff=1408, num_layers=48, num_kv_heads=4)
    params, found = meta_params(model), {}
    for zero in (1, 2, 3):
        config = config_of(1, 8, pp=2, dp=4, zero=zero)
        found[zero] = layout_memory(replace(config, model=model, dtype="bfloat16"), params, "cuda", 8)
    block = sum(param.numel for param in params if param.in_block) // 48
    blocks = len(found[2].state.gathered_blocks)
    assert found[3].state.weights == found[2].state.weights < 0.3 * found[1].state.weights
    # ZeRO-2 keeps all blocks and full sums, ZeRO-3 two blocks, a message and shards of the sums.
    between = found[2].peak_bytes - found[3].peak_bytes
    assert between == pytest.approx(2 * block * (blocks - 3) + 4 * block * (blocks - 1) * 3 // 4, rel=0.1)
    # ZeRO-1 has weights in float32, and autocast's copy of them for each of two micro-batches under way; ZeRO-2 has a
    # quarter of them and all in bfloat16.
    between = found[1].peak_bytes - found[2].peak_bytes
    assert between == pytest.approx((4 * 3 / 4 - 2 + 2 * 2) * block * blocks, rel=0.1)
