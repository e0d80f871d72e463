"""Plain data parallelism on two ranks against one process that takes the whole batch, in float64."""

import pytest
import torch
from torch import nn

from llm.loss import IGNORE_INDEX, CrossEntropyLoss
from parallel.collectives import all_reduce_sum
from parallel.ddp import broadcast_parameters, synchronise_gradients
from parallel.mesh import Mesh, MeshAxis
from tests.parallel.pool import run_ranks
from tests.tolerances import FP64

pytestmark = pytest.mark.dist
VOCAB, WIDTH, TOKENS = 11, 6, 40
TARGETS_PER_RANK = (30, 3)  # a mean of the ranks' means would weigh the three ten times too much


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


def gradients_of(model):
    return {name: param.grad for name, param in model.named_parameters()}


def reference_gradients():
    """One process, both ranks' data, torch's own mean over all targets; only rank 1's rows use `unused`."""
    model, losses = Toy(), []
    for rank in range(2):
        token_ids, targets = batch_of(rank)
        logits = model(token_ids, use_unused=rank == 1)
        losses.append(nn.functional.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum"))
    (sum(losses) / sum(TARGETS_PER_RANK)).backward()
    return gradients_of(model)


def train_rank(mesh, mode):
    model = Toy()
    token_ids, targets = batch_of(mesh.rank)
    num_targets = all_reduce_sum((targets != IGNORE_INDEX).sum(), mesh)
    mesh.log.drain(0)
    for half in (slice(0, 10), slice(10, None)):  # two micro-batches, so that gradients are summed before they are sent
        sums = CrossEntropyLoss()(model(token_ids[half], use_unused=mesh.rank == 1), targets[half])
        (sums.loss_sum / num_targets).backward()
    missing_before = model.unused.grad is None
    synchronise_gradients(model.parameters(), mesh, mode=mode)
    return gradients_of(model), missing_before, mesh.log.drain(1)


@pytest.mark.parametrize("mode", ["flat", "per_parameter"])
def test_gradients_of_two_ranks_match_one_process(mode):
    reference = reference_gradients()
    (first, first_missing, log), (second, second_missing, _) = run_ranks(train_rank, 2, mode)
    assert (first_missing, second_missing) == (True, False)  # `unused` had no gradient on rank 0
    assert first["never"] is None and second["never"] is None and reference["never"] is None
    for name, expected in reference.items():
        if expected is not None:
            assert torch.equal(first[name], second[name]), name
            torch.testing.assert_close(first[name], expected, rtol=FP64, atol=FP64 * expected.abs().max().item())
    assert not torch.equal(first["unused"], torch.zeros(WIDTH, dtype=torch.float64))
    gradient_bytes = 8 * (2 * VOCAB * WIDTH + WIDTH * WIDTH + WIDTH + WIDTH)
    expected_log = [("int32", 1, 4 * 6), ("float64", 1 if mode == "flat" else 5, gradient_bytes)]
    assert [(line["dtype"], line["calls"], line["bytes"]) for line in log] == expected_log
    assert all((line["op"], line["axis"], line["ranks"]) == ("all_reduce_sum", "dp", 2) for line in log)


def mixed_dtypes(mesh):
    params = [nn.Parameter(torch.zeros(4, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float32)]
    frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
    for index, param in enumerate(params):
        param.grad = torch.full((4,), float(index + 1 + mesh.rank), dtype=param.dtype)
    synchronise_gradients([*params, frozen], mesh)
    return [param.grad.float() for param in params], mesh.log.drain(0)


def test_each_dtype_has_one_flat_reduction():
    for gradients, log in run_ranks(mixed_dtypes, 2):
        assert [gradient.tolist() for gradient in gradients] == [[3.0] * 4, [5.0] * 4, [7.0] * 4]
        assert [(line["dtype"], line["calls"], line["bytes"]) for line in log] == [
            ("int32", 1, 12),
            ("float32", 1, 32),
            ("bfloat16", 1, 8),
        ]


def transposed_gradient(mesh, mode):
    weight = nn.Parameter(torch.zeros(3, 2).t())  # strides (1, 2): its gradient keeps them
    (weight * (torch.arange(6.0).view(2, 3) + mesh.rank)).sum().backward()
    assert not weight.grad.is_contiguous()
    synchronise_gradients([weight], mesh, mode=mode)
    return weight.grad


@pytest.mark.parametrize("mode", ["flat", "per_parameter"])
def test_a_gradient_with_other_strides_is_summed(mode):
    for gradient in run_ranks(transposed_gradient, 2, mode):
        assert torch.equal(gradient, 2 * torch.arange(6.0).view(2, 3) + 1)


def broadcast_rank(mesh):
    model = Toy(seed=mesh.rank)
    broadcast_parameters(model, mesh)
    return dict(model.state_dict())


def test_broadcast_gives_every_rank_the_first_ones_parameters_and_buffers():
    expected = Toy(seed=0).state_dict()
    for state in run_ranks(broadcast_rank, 2):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_one_rank_keeps_its_very_gradients():
    mesh = Mesh(0, 0, 1, torch.device("cpu"), "none", {"dp": MeshAxis(1, 0, None)})
    param, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    param.grad = gradient = torch.ones(3)
    version = gradient._version  # a write, even of the same values, would raise it
    synchronise_gradients([param, other], mesh)
    assert param.grad is gradient and gradient._version == version and other.grad is None and mesh.log.drain(0) == []
