"""Pipeline operations over fixed places: the same training as operation by operation, and as on one device.

Two gloo ranks run the functions that a GPU captures; on two GPUs the graphs themselves are replayed.
"""

import pytest
import torch

from configs.errors import UserError
from llm.args import DataConfig, KernelsConfig, ModelConfig, ParallelConfig, TrainConfig
from llm.data_loader import Batch
from llm.loss import IGNORE_INDEX, CrossEntropyLoss
from llm.optimizer import OptimizerConfig
from llm.parallelize import make_forward_loss, parallelize
from llm.parallelize_pipeline_graph import check_pipeline_graph
from llm.schedule import ScheduleConfig
from llm.training_step import TrainingStep, rows_of_rank
from llm.transformer import Transformer
from llm.transformer_init import initialise
from parallel.mesh_degrees import Degrees
from parallel.pipeline_parallel_graph import RunAgain, assign_places
from parallel.pipeline_schedules import FORWARD, WEIGHT, build_schedule
from parallel.pipeline_schedules_simulation import simulate
from tests import tolerances
from tests.parallel.pool import pool_of

ROWS, T, VOCAB, STEPS = 16, 8, 53, 4
LAYOUTS = [
    {"pp": 2},
    {"pp": 2, "pp_schedule": "gpipe"},
    {"pp": 2, "pp_schedule": "interleaved", "pp_chunks": 2},
    {"pp": 2, "pp_schedule": "zero_bubble"},
    {"pp": 2, "pp_schedule": "zero_bubble_h2"},
]


def config_of(graphed=False, **parallel) -> TrainConfig:
    model = ModelConfig(
        vocab_size=VOCAB, max_seq_len=T, d_model=16, num_layers=4, num_heads=4, num_kv_heads=2, d_ff=24, qkv_bias=True,
        tie_embeddings=True,
    )  # fmt: skip
    return TrainConfig(
        name="graph", model=model, optimizer=OptimizerConfig(name="adamw", lr=0.01, clip_norm=0.3),
        data=DataConfig(seq_len=T), max_steps=STEPS, schedule=ScheduleConfig(name="constant", warmup_steps=0),
        parallel=ParallelConfig(**parallel), dtype="float32", micro_batch_size=2, global_batch_tokens=ROWS * T,
        kernels=KernelsConfig(cuda_graph=graphed),
    )  # fmt: skip


def batches_of(step: int, mesh, packed: bool) -> list[Batch]:
    """Micro-batches of two rows, the later ones with fewer targets; packed ones hold two documents a row."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCAB, (ROWS, T), generator=generator)
    targets = torch.randint(0, VOCAB, (ROWS, T), generator=generator)
    targets[torch.arange(T) >= T - torch.arange(ROWS)[:, None] // 2] = IGNORE_INDEX
    rows = rows_of_rank(ROWS, mesh)
    docs = (torch.arange(T) >= 1 + torch.arange(ROWS)[:, None] % (T - 1)).int()  # (ROWS, T)
    parts = (whole[rows.start : rows.stop].split(2) for whole in (ids, targets, docs))
    return [
        Batch(own_ids, own, int((own != IGNORE_INDEX).sum()), own_docs if packed else None)
        for own_ids, own, own_docs in zip(*parts, strict=True)
    ]


def train(mesh, how: str, parallel: dict, packed: bool = False):
    """Losses, norms and parameters after STEPS steps: `how` is "eager", "again" or "graph"."""
    config = config_of(how == "graph", **parallel)
    if how == "again":
        config.kernels.cuda_graph = True  # weight gradients wait as they do for graphs
        config.parallel.pp_schedule = parallel.get("pp_schedule", "1f1b")
    model = Transformer(config.model)
    initialise(model, seed=3)
    dtype = torch.float64 if mesh.device.type == "cpu" else torch.float32
    parts = build(model.to(mesh.device, dtype), config, mesh, how)
    step = TrainingStep(config, mesh, parts, make_forward_loss(parts.head_model, CrossEntropyLoss(), "none"))
    losses, norms = [], []
    for number in range(STEPS):
        taken = step.run(number, batches_of(number, mesh, packed))
        losses.append(taken.mean_losses(mesh)[0])
        norms.append(taken.gradient_norm)
    step.settle()
    replayed = (
        0 if parts.pipeline is None or how == "eager" else sum(map(len, parts.pipeline.runner.graphs.places.values()))
    )
    parameters = {name: value.cpu() for name, value in parts.strategy.full_parameters().items()}
    return losses, norms, parameters, replayed


def build(model, config, mesh, how):
    """Parallelized; where the functions of the graphs are run again, they stand in for the graphs."""
    if how != "again":
        return parallelize(model, config, mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llm.parallelize_pipeline.check_pipeline_graph", lambda *_: None)
        patch.setattr("llm.parallelize_pipeline_graph.CudaCapture", RunAgain)
        return parallelize(model, config, mesh)


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.get("pp_schedule", "1f1b"))
def test_operations_over_fixed_places_train_as_one_device_does(layout):
    alone = pool_of(1).run(train, "eager", {}, degrees=Degrees())[0]
    found = pool_of(2).run(train, "again", layout, degrees=Degrees(pp=2))
    for losses, norms, parameters, replayed in found:
        assert replayed >= 1
        torch.testing.assert_close(losses, alone[0], rtol=tolerances.FP64, atol=0)
        torch.testing.assert_close(norms, alone[1], rtol=tolerances.FP64, atol=0)
        for name, value in parameters.items():
            torch.testing.assert_close(value, alone[2][name], rtol=0, atol=tolerances.FP64_ADAMW, msg=name)


@pytest.mark.dist
def test_documents_of_each_micro_batch_are_filled_in():
    alone = pool_of(1).run(train, "eager", {}, True, degrees=Degrees())[0]
    unpacked = pool_of(1).run(train, "eager", {}, degrees=Degrees())[0]
    assert alone[0] != unpacked[0]
    for losses, _, _, replayed in pool_of(2).run(train, "again", LAYOUTS[0], True, degrees=Degrees(pp=2)):
        assert replayed >= 1
        torch.testing.assert_close(losses, alone[0], rtol=tolerances.FP64, atol=0)


@pytest.mark.dist
@pytest.mark.parametrize("layout", [{"zero": 0}, {"zero": 1}], ids=["ddp", "zero1"])
def test_data_ranks_sum_what_the_places_left(layout):
    alone = pool_of(1).run(train, "eager", {}, degrees=Degrees())[0]
    pipeline = {"pp": 2, "dp": 2, "pp_schedule": "zero_bubble", **layout}
    for _, norms, parameters, _ in pool_of(4).run(train, "again", pipeline, degrees=Degrees(pp=2, dp=2)):
        torch.testing.assert_close(norms, alone[1], rtol=tolerances.FP64, atol=0)
        for name, value in parameters.items():
            torch.testing.assert_close(value, alone[2][name], rtol=0, atol=tolerances.FP64_ADAMW, msg=name)


@pytest.mark.gpu
@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.get("pp_schedule", "1f1b"))
def test_replayed_graphs_train_as_operation_by_operation(layout):
    eager = pool_of(2, "cuda").run(train, "eager", layout, degrees=Degrees(pp=2))
    graphs = pool_of(2, "cuda").run(train, "graph", layout, degrees=Degrees(pp=2))
    for ours, other in zip(graphs, eager, strict=True):
        assert ours[3] >= 1
        torch.testing.assert_close(ours[0], other[0], rtol=tolerances.FP32_GRADIENT, atol=0)
        torch.testing.assert_close(ours[1], other[1], rtol=10 * tolerances.FP32_GRADIENT, atol=0)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble", "zero_bubble_h2"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_places_are_as_many_as_are_held_and_never_shared(name, ranks):
    schedule = build_schedule(name, ranks, 3 * ranks)
    held = simulate(schedule).peak
    for rank, row in enumerate(schedule.table):
        places, counts = assign_places(row)
        assert counts == {rank: held[rank]}
        taken = {}
        for op in row:
            place = places[op.stage, op.micro_batch]
            if op.kind == FORWARD:
                assert place not in taken
                taken[place] = op.micro_batch
            assert taken[place] == op.micro_batch
            if op.kind == WEIGHT or (op.kind == "B"):
                del taken[place]


@pytest.mark.parametrize(
    ("parallel", "device", "message"),
    [
        ({"pp": 2}, "cpu", "cannot hold device=cpu; use kernels.cuda_graph=false"),
        ({"pp": 2, "tp": 2}, "cuda", "cannot hold parallel.tp=2"),
        ({"pp": 2, "activation_checkpointing": "full"}, "cuda", "activation_checkpointing=full"),
    ],
)
def test_what_graphs_cannot_hold_is_refused(parallel, device, message):
    with pytest.raises(UserError, match=message):
        check_pipeline_graph(config_of(True, **parallel), device)
