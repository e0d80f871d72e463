"""swiglu: values, gradients, strided halves of a packed projection, the operator under torch.compile, bad input."""

import pytest
import torch

from configs.errors import UserError
from kernel.swiglu import swiglu, swiglu_reference
from tests.kernel.fused_reference import DEVICE, INTERPRETED, check_against_float64, results_and_gradients

FEW = [(61, 7), (2, 5, 300), (1, 4000)]
MANY = [(1000, 2048), (333, 5504), (7, 13, 8192), (70_000, 3)]


def check(shape, dtype, packed):
    def cut(x):
        halves = x.chunk(2, dim=-1)
        return halves if packed else [half.contiguous() for half in halves]

    x = 3 * torch.randn(*shape[:-1], 2 * shape[-1], device=DEVICE).to(dtype)
    upstream = [torch.randn(shape, device=DEVICE)]
    check_against_float64(lambda x: (swiglu(*cut(x)),), lambda x: (swiglu_reference(*cut(x)),), [x], upstream)


@pytest.mark.skipif(not INTERPRETED, reason="the GPU grid below covers it")
@pytest.mark.parametrize("shape", FEW)
@pytest.mark.parametrize("packed", [False, True])
def test_interpreted_swiglu_matches_float64(shape, packed):
    for dtype in (torch.float32, torch.float16):
        check(shape, dtype, packed)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", FEW + MANY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
def test_swiglu_matches_float64(shape, dtype, packed):
    check(shape, dtype, packed)


def test_large_gates_neither_overflow_nor_vanish():
    gate = torch.tensor([-200.0, -90.0, 0.0, 90.0, 200.0], device=DEVICE)[None].requires_grad_()
    out = swiglu(gate, torch.ones_like(gate))
    (gradient,) = torch.autograd.grad(out.sum(), gate)
    torch.testing.assert_close(out[0], torch.tensor([0.0, 0.0, 0.0, 90.0, 200.0], device=DEVICE))
    torch.testing.assert_close(gradient[0], torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0], device=DEVICE))


def test_operator_matches_the_eager_call():
    inputs, upstream = [torch.randn(5, 33, device=DEVICE) for _ in range(2)], [torch.randn(5, 33, device=DEVICE)]
    compiled = torch.compile(lambda *x: (swiglu(*x),), backend="aot_eager", fullgraph=True)
    eager, traced = (results_and_gradients(f, inputs, upstream) for f in (lambda *x: (swiglu(*x),), compiled))
    assert all(torch.equal(a, b) for a, b in zip(eager, traced, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda gate, up: (gate, up[:, :2]), "must have one shape and dtype"),
        (lambda gate, up: (gate, up.half()), "must have one shape and dtype"),
        (lambda gate, up: (gate.long(), up.long()), "gate of torch.int64"),
        (lambda gate, up: (gate.T, up.T), "must be rows of one stride"),
        (lambda gate, up: (gate[:0], up[:0]), "is empty"),
    ],
)
def test_bad_input_is_one_line_before_the_launch(change, message):
    gate, up = change(torch.ones(3, 4, device=DEVICE), torch.ones(3, 4, device=DEVICE))
    with pytest.raises(UserError, match=message) as error:
        swiglu(gate, up)
    assert "\n" not in str(error.value)


def test_gradients_of_halves_are_halves():
    """So that one product over both follows; and the same numbers as of tensors apart."""
    packed = torch.randn(5, 80, device=DEVICE).requires_grad_()
    gate, up = packed.chunk(2, dim=-1)
    dout = torch.randn(5, 40, device=DEVICE)
    dgate, dup = torch.autograd.grad(swiglu(gate, up), (gate, up), dout)
    apart = [x.detach().contiguous().requires_grad_() for x in (gate, up)]
    expected = torch.autograd.grad(swiglu(*apart), apart, dout)
    assert torch.equal(dgate, expected[0]) and torch.equal(dup, expected[1])
    assert dup.data_ptr() - dgate.data_ptr() == 40 * 4 and dgate.stride() == (80, 1)
