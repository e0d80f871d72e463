"""What the places of a pipeline's graphs hold: predicted against what the captured functions allocate on gloo ranks."""

import gc
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from llm.args import DataConfig, KernelsConfig, ModelConfig, ParallelConfig, TrainConfig
from llm.data_loader import Batch
from llm.metrics_memory import LiveTensorBytes, PeakMemory, graph_bytes
from llm.parallelize import make_forward_loss, parallelize
from llm.plan_memory_graphs import cast_bytes
from llm.plan_memory_layouts import layout_memory
from llm.plan_rank import rank_share
from llm.plan_shapes import meta_params
from llm.training_step import TrainingStep
from llm.transformer import Transformer
from llm.transformer_init import initialise
from llm.transformer_kernels import make_loss
from parallel.pipeline_parallel_graph import RunAgain
from tests.parallel.pool import pool_of
from tests.tolerances import MEMORY_RATIO, PLACES_RATIO

T, ROWS, MICRO_BATCHES = 16, 16, 4
MODEL = ModelConfig(
    vocab_size=1024, max_seq_len=T, d_model=96, num_layers=4, num_heads=4, num_kv_heads=2, d_ff=256, attention="eager"
)
SCHEDULES = [
    {"pp_schedule": "1f1b"},
    {"pp_schedule": "gpipe"},
    {"pp_schedule": "interleaved", "pp_chunks": 2},
    {"pp_schedule": "zero_bubble"},
    {"pp_schedule": "zero_bubble_h2"},
]


class PoolBytes(LiveTensorBytes):
    """Counts what is made while it is active; what was there before lies outside, and its end changes nothing."""

    def __init__(self) -> None:
        super().__init__(found for found in gc.get_objects() if isinstance(found, Tensor))
        self.outside = set(self.alive)
        self.bytes = self.peak_bytes = 0

    def change(self, key: int, nbytes: int) -> None:
        if key in getattr(self, "outside", ()):
            self.outside.discard(key)
        else:
            super().change(key, nbytes)


class CountedPools(RunAgain):
    """Runs what would be captured and counts what it allocates: a pool holds the most that its captures had at once."""

    def __init__(self) -> None:
        self.pools: list[PoolBytes] = []

    def warm_up(self, function) -> None:
        function()

    def pool(self) -> PoolBytes:
        self.pools.append(PoolBytes())
        return self.pools[-1]

    def __call__(self, function, pool: PoolBytes):
        with pool:
            function()
        return function


def config_of(dtype: str, fused_loss: bool = False, **parallel) -> TrainConfig:
    return TrainConfig(
        name="memory", model=MODEL, data=DataConfig(seq_len=T), dtype=dtype, micro_batch_size=ROWS,
        parallel=ParallelConfig(dp=1, pp=2, **parallel), global_batch_tokens=T * ROWS * MICRO_BATCHES,
        kernels=KernelsConfig(cuda_graph=True, loss=fused_loss),
    )  # fmt: skip


def bytes_of_places(mesh, config: TrainConfig) -> tuple[int, int]:
    """Of this rank, after two steps, the second of which makes its places; and of the matrices' casts."""
    model, pools = Transformer(config.model), CountedPools()
    initialise(model, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llm.parallelize_pipeline.check_pipeline_graph", lambda *_: None)
        patch.setattr("llm.parallelize_pipeline_graph.CudaCapture", lambda: pools)
        parts = parallelize(model, config, mesh)
    forward_loss = make_forward_loss(parts.head_model, make_loss(config.kernels, 0.0), "none", parts.shards)
    step = TrainingStep(config, mesh, parts, forward_loss)
    ids = torch.randint(0, 1024, (MICRO_BATCHES, ROWS, T), generator=torch.Generator().manual_seed(0))
    batches = [Batch(own, own.roll(-1, 1), num_targets=own.numel()) for own in ids]
    for number in range(2):
        step.run(number, batches)
    graphs = parts.pipeline.runner.graphs
    places = [place for of_stage in graphs.places.values() for place in of_stage]
    fixed = [tensor for place in places for tensor in (place.x, place.gradient) if tensor is not None]
    assert len(pools.pools) == len(places)
    held = sum(pool.peak_bytes for pool in pools.pools) + sum(tensor.nbytes for tensor in fixed)
    return held, sum(cast.nbytes for cast in graphs.deferred.casts.values())


@pytest.mark.dist
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule["pp_schedule"])
def test_places_hold_what_is_predicted(schedule):
    check(config_of("float32", **schedule))


@pytest.mark.dist
def test_casts_of_weights_lie_outside_the_places():
    check(config_of("bfloat16", pp_schedule="zero_bubble_h2"))


@pytest.mark.dist
def test_a_fused_loss_leaves_gradients_in_the_last_stages_places():
    check(config_of("float32", fused_loss=True))


def peak_of_replays(mesh, config: TrainConfig) -> int:
    """Bytes at most in a step that replays graphs on this rank's GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(mesh.device) + graph_bytes(mesh.device)
    model = Transformer(config.model)
    initialise(model, 0)
    parts = parallelize(model.to(mesh.device), config, mesh)
    forward_loss = make_forward_loss(parts.head_model, make_loss(config.kernels, 0.0), "none", parts.shards)
    step = TrainingStep(config, mesh, parts, forward_loss)
    shape = (MICRO_BATCHES, config.micro_batch_size, config.data.seq_len)
    ids = torch.randint(0, config.model.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    batches = [Batch(own, own.roll(-1, 1), num_targets=own.numel()).to(mesh.device) for own in ids]
    for number in range(3):
        with PeakMemory(mesh.device) as memory:
            step.run(number, batches)
    return memory.peak_bytes + graph_bytes(mesh.device) - before


@pytest.mark.gpu
@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["1f1b", "zero_bubble_h2"])
def test_replayed_graphs_need_what_is_predicted(name):
    """Tensors of 16 to 64 MB, so that what the allocator rounds up is little."""
    model = ModelConfig(
        vocab_size=16384, max_seq_len=2048, d_model=1024, num_layers=8, num_heads=16, d_ff=4096, attention="triton"
    )
    config = replace(
        config_of("bfloat16", pp_schedule=name), model=model, data=DataConfig(seq_len=2048), micro_batch_size=4,
        global_batch_tokens=2048 * 4 * MICRO_BATCHES, kernels=KernelsConfig(fused=True, cuda_graph=True),
    )  # fmt: skip
    measured = pool_of(2, "cuda").run(peak_of_replays, config, degrees=config.parallel.degrees().resolve(2))
    for rank, peak in enumerate(measured):
        predicted = layout_memory(config, meta_params(model), "cuda", 2, rank)
        assert peak == pytest.approx(predicted.peak_bytes, rel=MEMORY_RATIO), (rank, predicted.phases_bytes)


def check(config: TrainConfig) -> None:
    measured = pool_of(2).run(bytes_of_places, config, degrees=config.parallel.degrees().resolve(2))
    for rank, (held, casts) in enumerate(measured):
        share = rank_share(config, meta_params(MODEL), "cpu", 2, rank)
        predicted = layout_memory(config, meta_params(MODEL), "cpu", 2, rank)
        assert held == pytest.approx(predicted.activations_bytes, rel=PLACES_RATIO), rank
        assert casts == cast_bytes(share.work)
