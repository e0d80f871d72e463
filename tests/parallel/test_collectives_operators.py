"""Collectives inside compiled functions: one graph without a break, values and gradients as written out, logged."""

import pytest
import torch

from parallel.collectives_operators import along
from parallel.mesh import Mesh
from tests.parallel.pool import run_ranks
from tests.tolerances import FP64

pytestmark = pytest.mark.dist
ROWS, WIDTH = 4, 3


def own_input(rank):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


def weights(rows, rank):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(100 + rank), dtype=torch.float64)


def through(mesh, name, compiled):
    """A function with a collective in its middle: result, gradient of a weighted sum, and what was logged."""
    operator = getattr(along(mesh, "dp"), name)

    def block(x):
        return operator(torch.tanh(x)) * 2

    x = own_input(mesh.rank).requires_grad_()
    if compiled:
        torch._dynamo.reset()
        block = torch.compile(block, backend="aot_eager", fullgraph=True)
    mesh.log.drain(0)
    result = block(x)
    (result * weights(len(result), mesh.rank)).sum().backward()
    return result, x.grad, mesh.log.drain(1)


def expected(name, num_ranks):
    """The same on one process: every rank's inputs at once."""
    inputs = [own_input(rank).requires_grad_() for rank in range(num_ranks)]
    made = [torch.tanh(x) for x in inputs]
    blocks = [m.view(num_ranks, -1, WIDTH) for m in made]
    outputs = {
        "all_gather": [torch.cat(made)] * num_ranks,
        "reduce_scatter": [sum(block[rank] for block in blocks) for rank in range(num_ranks)],
        "all_to_all": [torch.cat([block[rank] for block in blocks]) for rank in range(num_ranks)],
    }[name]
    results = [2 * output for output in outputs]
    sum((result * weights(len(result), rank)).sum() for rank, result in enumerate(results)).backward()
    return results, [x.grad for x in inputs]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_to_all"])
def test_operators_match_one_process_forward_and_backward(name, compiled):
    results, gradients = expected(name, 2)
    for rank, (result, gradient, lines) in enumerate(run_ranks(through, 2, name, compiled)):
        torch.testing.assert_close(result, results[rank].detach(), rtol=FP64, atol=FP64)
        torch.testing.assert_close(gradient, gradients[rank], rtol=FP64, atol=FP64)
        assert sum(line["calls"] for line in lines) == 2  # one forward, one backward


def summed(mesh, compiled):
    data_axis = along(mesh, "dp")

    def block(x):
        return data_axis.all_reduce(x * 3) + 1

    block = torch.compile(block, backend="aot_eager", fullgraph=True) if compiled else block
    x = own_input(mesh.rank)
    return block(x), x


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_all_reduce_returns_a_new_tensor(compiled):
    total = 3 * sum(own_input(rank) for rank in range(2)) + 1
    for rank, (result, x) in enumerate(run_ranks(summed, 2, compiled)):
        torch.testing.assert_close(result, total, rtol=FP64, atol=FP64)
        assert torch.equal(x, own_input(rank))


def test_on_one_rank_an_operator_copies_and_a_lost_mesh_is_an_error():
    mesh = Mesh(0, 0, 1, torch.device("cpu"), "none", {})
    x = own_input(0)
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        result = getattr(along(mesh, "dp"), name)(x)
        assert torch.equal(result, x) and result.data_ptr() != x.data_ptr()
    with pytest.raises(KeyError):
        torch.ops.mew.all_reduce(x, "mesh-gone", "dp")
