"""Data parallelism on gloo ranks against one process that takes the whole batch, in float64; torch's DDP beside it."""

import pytest
import torch
from torch import nn

from configs.errors import UserError
from llm.loss import IGNORE_INDEX, CrossEntropyLoss
from parallel.collectives import all_reduce_sum
from parallel.ddp import DataParallel, DdpSettings, broadcast_parameters, synchronise_gradients
from parallel.ddp_buckets import plan_buckets
from parallel.mesh import Mesh, MeshAxis
from tests.parallel.pool import run_ranks
from tests.tolerances import BF16_ROUNDING, FP64

pytestmark = pytest.mark.dist
VOCAB, WIDTH, TOKENS = 11, 6, 40
TARGETS_PER_RANK = (30, 3)  # a mean of the ranks' means would weigh the three ten times too much
GRADIENT_ELEMENTS = 2 * VOCAB * WIDTH + WIDTH * WIDTH + 2 * WIDTH  # of the parameters that some rank uses


class Toy(nn.Module):
    """Embedding and two matrices, a bias among them; `unused` takes part only where asked, `never` nowhere."""

    def __init__(self, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shapes = {"embedding": (VOCAB, WIDTH), "hidden": (WIDTH, WIDTH), "bias": (WIDTH,), "output": (VOCAB, WIDTH)}
        for name, shape in (shapes | {"unused": (WIDTH,), "never": (3,)}).items():
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            setattr(self, name, nn.Parameter(values))
        self.register_buffer("buffer", torch.full((2,), float(seed), dtype=torch.float64))

    def forward(self, token_ids: torch.Tensor, use_unused: bool) -> torch.Tensor:
        hidden = torch.tanh(self.embedding[token_ids] @ self.hidden.T + self.bias)
        return (hidden + self.unused if use_unused else hidden) @ self.output.T


def batch_of(rank):
    generator = torch.Generator().manual_seed(100 + rank)
    token_ids = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    targets[TARGETS_PER_RANK[rank] :] = IGNORE_INDEX
    return token_ids, targets


def copied_gradients(model):
    return {name: None if param.grad is None else param.grad.clone() for name, param in model.named_parameters()}


def reference_gradients():
    """One process, both ranks' data, torch's own mean over all targets; only rank 1's rows use `unused`."""
    model, losses = Toy(), []
    for rank in range(2):
        token_ids, targets = batch_of(rank)
        logits = model(token_ids, use_unused=rank == 1)
        losses.append(nn.functional.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum"))
    (sum(losses) / sum(TARGETS_PER_RANK)).backward()
    return copied_gradients(model)


def backward_of_step(mesh, model, strategy, micro_batches=2):
    """Forward and backward of this rank's batch in micro-batches; gradients are not finished yet."""
    token_ids, targets = batch_of(mesh.rank)
    num_targets = sum(TARGETS_PER_RANK)
    pieces = list(zip(token_ids.chunk(micro_batches), targets.chunk(micro_batches), strict=True))
    for index, (ids, labels) in enumerate(pieces):
        strategy.begin_micro_batch(last=index == len(pieces) - 1)
        sums = CrossEntropyLoss()(model(ids, use_unused=mesh.rank == 1), labels)
        (sums.loss_sum / num_targets).backward()


def train_rank(mesh, settings):
    model = Toy()
    strategy = DataParallel(model, mesh, settings)
    mesh.log.drain(0)
    results = []
    for step in range(2):  # the second step finds buckets as the first has left them
        backward_of_step(mesh, model, strategy)
        strategy.finish_gradients()
        results.append((copied_gradients(model), mesh.log.drain(step)))
        shared = {param.grad.untyped_storage().data_ptr() for param in strategy.parameters if param.grad is not None}
        model.zero_grad(set_to_none=True)
    return results, len(shared), [bucket.names for bucket in strategy.buckets]


BUCKETED = {
    "one bucket": DdpSettings(),
    "small buckets": DdpSettings(bucket_bytes=500, first_bucket_bytes=40),
    "a bucket a parameter": DdpSettings(bucket_bytes=1, first_bucket_bytes=1),
    "peer": DdpSettings(bucket_bytes=500, first_bucket_bytes=40, transport="peer"),
}


@pytest.mark.parametrize("settings", [*BUCKETED.values(), DdpSettings(mode="naive")], ids=[*BUCKETED, "naive"])
def test_gradients_of_two_ranks_match_one_process(settings):
    reference = reference_gradients()
    (first, num_storages, buckets), (second, _, _) = run_ranks(train_rank, 2, settings)
    for (gradients, log), (others, _) in zip(first, second, strict=True):
        assert gradients["never"] is None and others["never"] is None and reference["never"] is None
        for name, expected in reference.items():
            if expected is not None:
                assert torch.equal(gradients[name], others[name]), name
                torch.testing.assert_close(
                    gradients[name], expected, rtol=FP64, atol=FP64 * expected.abs().max().item()
                )
        assert not torch.equal(gradients["unused"], torch.zeros(WIDTH, dtype=torch.float64))
        sent = [(line["op"], line["dtype"], line["calls"], line["bytes"]) for line in log]
        if settings.mode == "naive":
            assert sent == [("all_reduce_sum", "int32", 1, 24), ("all_reduce_sum", "float64", 5, 8 * GRADIENT_ELEMENTS)]
        else:  # one reduction a bucket; `never` travels as zeros, and each parameter has a number that says it is there
            assert sent == [("all_reduce_sum", "float64", len(buckets), 8 * (GRADIENT_ELEMENTS + 3 + 6))]
    views_of = 1 if settings.transport == "peer" else len(buckets) - (len(buckets) == 6)  # `never` has no gradient
    assert num_storages == (5 if settings.mode == "naive" else views_of)


def test_buckets_are_planned_in_reverse_order_by_bytes_and_kind():
    sizes = [(100, "a"), (30, "a"), (30, "a"), (4, "a"), (4, "a")]
    assert plan_buckets(sizes, first_bytes=8, bucket_bytes=60) == [[4, 3], [2, 1], [0]]
    assert plan_buckets(sizes, first_bytes=5, bucket_bytes=1000) == [[4, 3], [2, 1, 0]]
    assert plan_buckets(sizes, first_bytes=1000, bucket_bytes=1000) == [[4, 3, 2, 1, 0]]
    mixed = [(10, "a"), (10, "b"), (10, "a"), (10, "b")]
    assert plan_buckets(mixed, first_bytes=100, bucket_bytes=100) == [[3, 1], [2, 0]]
    assert plan_buckets([], 1, 1) == []


def sends_during_backward(mesh):
    model = Toy()
    del model.never  # a parameter without a gradient would hold its bucket back until the end
    strategy = DataParallel(model, mesh, DdpSettings(bucket_bytes=1, first_bucket_bytes=1))
    mesh.log.drain(0)
    counts = []
    for param in reversed(strategy.parameters):
        param.register_post_accumulate_grad_hook(lambda _: counts.append(strategy.next_bucket))
    backward_of_step(mesh, model, strategy)
    before = strategy.next_bucket
    strategy.finish_gradients()
    return counts, before, len(strategy.buckets)


def test_buckets_leave_during_the_last_backward_pass_and_in_one_order():
    (first, first_before, _), (second, second_before, buckets) = run_ranks(sends_during_backward, 2)
    # Rank 1 uses every parameter: all buckets are under way when its backward ends, the first while it goes on. Rank 0
    # has no gradient for `unused`, which is the first bucket, so there everything waits for finish_gradients.
    assert second_before == buckets == 5 and first_before == 0
    half = len(second) // 2
    assert max(second[:half]) == 0 and sorted(second[half:]) == second[half:] and 0 < second[half + 1] < second[-1] == 5
    assert max(first) == 0


def accumulated(mesh, micro_batches):
    model = Toy()
    strategy = DataParallel(model, mesh, DdpSettings(bucket_bytes=300, first_bucket_bytes=1))
    mesh.log.drain(0)
    backward_of_step(mesh, model, strategy, micro_batches)
    strategy.finish_gradients()
    (line,) = mesh.log.drain(1)
    with strategy.no_sync():
        backward_of_step(mesh, model, DataParallel(nn.Module(), mesh), 1)
    return copied_gradients(model), line["calls"], mesh.log.drain(2), len(strategy.buckets)


@pytest.mark.parametrize("micro_batches", [1, 4, 5])
def test_accumulation_sends_once_a_step(micro_batches):
    for _, calls, after, buckets in run_ranks(accumulated, 2, micro_batches):
        assert calls == buckets and after == []  # whatever the number of micro-batches, and nothing in no_sync


def reduced_in(mesh, dtype, transport):
    model = Toy()
    strategy = DataParallel(model, mesh, DdpSettings(reduce_dtype=dtype, transport=transport))
    mesh.log.drain(0)
    backward_of_step(mesh, model, strategy)
    strategy.finish_gradients()
    (line,) = mesh.log.drain(1)
    return copied_gradients(model), line["dtype"], line["bytes"]


@pytest.mark.parametrize("transport", ["backend", "peer"])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2.0**-22), (torch.bfloat16, 4 * BF16_ROUNDING)])
def test_gradients_travel_in_the_reduction_dtype_and_keep_their_own(dtype, error, transport):
    reference = reference_gradients()
    for gradients, sent_dtype, sent_bytes in run_ranks(reduced_in, 2, dtype, transport):
        assert sent_dtype == str(dtype).removeprefix("torch.")
        assert sent_bytes == dtype.itemsize * (GRADIENT_ELEMENTS + 3 + 6)
        for name, expected in reference.items():
            if expected is None:
                assert gradients[name] is None
                continue
            assert gradients[name].dtype == torch.float64
            difference = (gradients[name] - expected).abs().max() / expected.abs().max()
            assert 0 < difference <= error, name


def without_any_micro_batch(mesh):
    model = Toy()
    strategy = DataParallel(model, mesh, DdpSettings(bucket_bytes=300, first_bucket_bytes=1))
    if mesh.rank == 1:
        backward_of_step(mesh, model, strategy)
    strategy.finish_gradients()
    return copied_gradients(model)


def test_a_rank_without_a_micro_batch_neither_hangs_nor_changes_the_sum():
    first, second = run_ranks(without_any_micro_batch, 2)
    model = Toy()
    token_ids, targets = batch_of(1)
    (CrossEntropyLoss()(model(token_ids, use_unused=True), targets).loss_sum / sum(TARGETS_PER_RANK)).backward()
    for name, param in model.named_parameters():
        assert (first[name] is None) == (second[name] is None) == (param.grad is None)
        if param.grad is not None:
            assert torch.equal(first[name], second[name])
            torch.testing.assert_close(first[name], param.grad, rtol=FP64, atol=FP64)


def mixed_dtypes(mesh):
    model = nn.ParameterList(
        nn.Parameter(torch.zeros(4, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float32)
    )
    model.append(nn.Parameter(torch.zeros(4), requires_grad=False))
    strategy = DataParallel(model, mesh)
    mesh.log.drain(0)
    for index, param in enumerate(strategy.parameters):
        param.grad = torch.full((4,), float(index + 1 + mesh.rank), dtype=param.dtype)
    strategy.finish_gradients()
    return [param.grad.float() for param in strategy.parameters], mesh.log.drain(0)


def test_each_dtype_has_buckets_of_its_own():
    for gradients, log in run_ranks(mixed_dtypes, 2):
        assert [gradient.tolist() for gradient in gradients] == [[3.0] * 4, [5.0] * 4, [7.0] * 4]
        assert [(line["dtype"], line["calls"], line["bytes"]) for line in log] == [
            ("bfloat16", 1, 2 * (4 + 1)),  # first: its last gradient comes before that of the other bucket
            ("float32", 1, 4 * (8 + 2)),
        ]


def transposed_gradient(mesh, mode):
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(3, 2).t())  # strides (1, 2): its gradient keeps them
    strategy = DataParallel(model, mesh, DdpSettings(mode=mode))
    (model.weight * (torch.arange(6.0).view(2, 3) + mesh.rank)).sum().backward()
    strategy.finish_gradients()
    return model.weight.grad


@pytest.mark.parametrize("mode", ["bucketed", "naive"])
def test_a_gradient_with_other_strides_is_summed(mode):
    for gradient in run_ranks(transposed_gradient, 2, mode):
        assert torch.equal(gradient, 2 * torch.arange(6.0).view(2, 3) + 1)


def changed_after_wrapping(mesh, change):
    model = Toy()
    strategy = DataParallel(model, mesh)
    if change == "added":
        model.register_parameter("late", nn.Parameter(torch.zeros(2)))
    elif change == "replaced":
        model.hidden = nn.Parameter(model.hidden.detach().clone())
    elif change == "frozen":
        model.bias.requires_grad_(False)
    elif change == "cast":
        model.output.data = model.output.data.float()
    try:
        strategy.finish_gradients()
    except UserError as error:
        return str(error)


@pytest.mark.parametrize(
    ("change", "name"), [("added", "late"), ("replaced", "hidden"), ("frozen", "bias"), ("cast", "output")]
)
def test_a_model_changed_after_wrapping_is_an_error(change, name):
    for message in run_ranks(changed_after_wrapping, 2, change):
        assert f"parameter '{name}' was added, removed, replaced" in message


def two_backward_passes(mesh):
    model = Toy()
    strategy = DataParallel(model, mesh)
    del model.never
    strategy = DataParallel(model, mesh)
    token_ids, _ = batch_of(0)
    model(token_ids, True).sum().backward()
    try:
        model(token_ids, True).sum().backward()
    except AssertionError as error:
        return str(error)
    finally:
        strategy.finish_gradients()


def test_a_gradient_after_its_bucket_was_sent_is_an_error():
    assert all("came after it was sent" in message for message in run_ranks(two_backward_passes, 2))


def beside_torch(mesh):
    ours, theirs = Toy(), Toy()
    strategy = DataParallel(ours, mesh, DdpSettings(bucket_bytes=300, first_bucket_bytes=1))
    wrapped = nn.parallel.DistributedDataParallel(theirs, find_unused_parameters=True)
    token_ids, targets = batch_of(mesh.rank)
    for call in (lambda: ours(token_ids, mesh.rank == 1), lambda: wrapped(token_ids, mesh.rank == 1)):
        nn.functional.cross_entropy(call(), targets, ignore_index=IGNORE_INDEX).backward()
    strategy.finish_gradients()
    return copied_gradients(ours), copied_gradients(theirs)


def test_sums_are_the_world_size_times_the_means_of_torchs_ddp():
    for ours, theirs in run_ranks(beside_torch, 2):
        for name, gradient in ours.items():
            assert (gradient is None) == (theirs[name] is None), name
            if gradient is not None:
                torch.testing.assert_close(gradient, 2 * theirs[name], rtol=FP64, atol=FP64)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def compiled_parts(mesh, whole):
    model = nn.Sequential(*(Block() for _ in range(3))).double()
    for index, param in enumerate(model.parameters()):
        nn.init.normal_(param, generator=torch.Generator().manual_seed(index))
    strategy = DataParallel(model, mesh, DdpSettings(bucket_bytes=600, first_bucket_bytes=1))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(mesh.rank), dtype=torch.float64)
    gradients, before = [], []
    for compiled in (False, True):
        if compiled:
            for part in [model] if whole else model:
                part.compile(backend="aot_eager", fullgraph=True)
        model(x).square().sum().backward()
        before.append(strategy.next_bucket)
        strategy.finish_gradients()
        gradients.append(copied_gradients(model))
        model.zero_grad(set_to_none=True)
    return gradients, before, len(strategy.buckets)


@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "model"])
def test_compiled_code_sends_the_same_gradients_before_backward_ends(whole):
    for (eager, compiled), before, buckets in run_ranks(compiled_parts, 2, whole):
        assert before == [buckets, buckets] and buckets > 2
        assert all(torch.allclose(eager[name], compiled[name], rtol=FP64, atol=FP64) for name in eager)


def broadcast_rank(mesh):
    model = Toy(seed=mesh.rank)
    broadcast_parameters(model, mesh)
    return dict(model.state_dict())


def wrapped_rank(mesh):
    model = Toy(seed=mesh.rank)
    DataParallel(model, mesh)
    return dict(model.state_dict())


@pytest.mark.parametrize("function", [broadcast_rank, wrapped_rank])
def test_every_rank_gets_the_first_ones_parameters_and_buffers(function):
    expected = Toy(seed=0).state_dict()
    for state in run_ranks(function, 2):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_one_rank_keeps_its_very_gradients():
    mesh = Mesh(0, 0, 1, torch.device("cpu"), "none", {"dp": MeshAxis(1, 0, None)})
    model = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))])
    strategy = DataParallel(model, mesh)
    model[0].grad = gradient = torch.ones(3)
    version = gradient._version  # a write, even of the same values, would raise it
    strategy.finish_gradients()
    synchronise_gradients(model, mesh)
    assert model[0].grad is gradient and gradient._version == version and model[1].grad is None
    assert mesh.log.drain(0) == [] and strategy.buckets == []


def test_total_of_targets_needs_no_group():
    mesh = Mesh(0, 0, 1, torch.device("cpu"), "none", {})
    assert all_reduce_sum(torch.tensor([3]), mesh, "dp_cp").tolist() == [3]
