"""rms_norm with and without the residual: values, gradients, the operator under torch.compile, and bad input."""

import pytest
import torch

from configs.errors import UserError
from kernel.rms_norm import rms_norm, rms_norm_reference
from tests.kernel.fused_reference import DEVICE, INTERPRETED, check_against_float64, results_and_gradients

EPS = 1e-5
FEW = [(23, 37), (3, 5, 64), (9, 300), (21, 1500)]  # the last: several rows a program of the backward pass
MANY = [(999, 1), (1000, 64), (4, 333, 128), (777, 768), (33, 3000), (64, 4096), (9, 8192), (3, 16384)]


def make(shape: tuple[int, ...], dtype: torch.dtype, stream_dtype: torch.dtype | None):
    """x, weight, residual or none, and the two upstream gradients."""
    shapes = [(shape, dtype), (shape[-1:], torch.float32)] + ([(shape, stream_dtype)] if stream_dtype else [])
    inputs = [torch.randn(size, device=DEVICE).to(kind) for size, kind in shapes]
    return inputs, [torch.randn(shape, device=DEVICE) for _ in range(2)]


def check(shape, dtype, stream_dtype):
    inputs, upstream = make(shape, dtype, stream_dtype)

    def ours(x, weight, residual=None):
        return rms_norm(x, weight, EPS, residual, dtype)

    def reference(x, weight, residual=None):
        normed, stream = rms_norm_reference(x, weight, EPS, residual)
        return normed.to(x.dtype), stream

    check_against_float64(ours, reference, inputs, upstream)


@pytest.mark.skipif(not INTERPRETED, reason="the GPU grid below covers it")
@pytest.mark.parametrize("shape", FEW)
def test_interpreted_norm_matches_float64(shape):
    for dtype, stream_dtype in ((torch.float32, None), (torch.float32, torch.float32), (torch.float16, torch.float32)):
        check(shape, dtype, stream_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", FEW + MANY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_norm_matches_float64(shape, dtype):
    for stream_dtype in {None, dtype, torch.float32}:
        check(shape, dtype, stream_dtype)


def test_strided_rows_and_a_stream_nobody_reads():
    wide = torch.randn(6, 2 * 48, device=DEVICE)
    weight = torch.randn(48, device=DEVICE)

    def ours(x, weight):
        return rms_norm(x[:, :48], weight, EPS)[:1]

    def reference(x, weight):
        return rms_norm_reference(x[:, :48], weight, EPS)[:1]

    check_against_float64(ours, reference, [wide, weight], [torch.randn(6, 48, device=DEVICE)])


def test_only_the_stream_has_a_gradient():
    inputs, upstream = make((4, 20), torch.float32, torch.float32)
    leaves = [x.requires_grad_() for x in inputs]
    _, stream = rms_norm(leaves[0], leaves[1], EPS, leaves[2])
    dx, dresidual = torch.autograd.grad(stream, [leaves[0], leaves[2]], upstream[0])
    assert torch.equal(dx, upstream[0]) and torch.equal(dresidual, upstream[0])


def test_weight_gradient_is_the_same_twice():
    inputs, upstream = make((333, 64), torch.float32, torch.float32)
    twice = [results_and_gradients(lambda *x: rms_norm(x[0], x[1], EPS, x[2]), inputs, upstream) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*twice, strict=True))


@pytest.mark.parametrize("stream_dtype", [None, torch.float32])
def test_operator_matches_the_eager_call(stream_dtype):
    """What torch.compile would see: aot_eager keeps the operators and their fake versions, without code generation."""
    inputs, upstream = make((7, 40), torch.float32, stream_dtype)

    def call(x, weight, residual=None):
        normed, stream = rms_norm(x, weight, EPS, residual, torch.float16)
        return normed, stream * 1.0

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    eager, traced = (results_and_gradients(f, inputs, upstream) for f in (call, compiled))
    for a, b in zip(eager, traced, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w, r: (x.double(), w, r), "x of torch.float64 must be bfloat16"),
        (lambda x, w, r: (x, w[:3], r), r"weight \(3,\) must be"),
        (lambda x, w, r: (x, w, r[:1]), r"residual \(1, 8\) and x \(4, 8\) must have one shape"),
        (lambda x, w, r: (x.T.contiguous().T, w, r), "must be rows of one stride"),
        (lambda x, w, r: (x[:0], w, r), "is empty"),
        (lambda x, w, r: (x, w.to("meta"), r), "must lie on one device"),
        (
            lambda x, w, r: (torch.zeros(1, 20000, device=DEVICE), torch.zeros(20000, device=DEVICE), None),
            "width 20000",
        ),
    ],
)
def test_bad_input_is_one_line_before_the_launch(change, message):
    x, weight, residual = change(*[torch.ones(size, device=DEVICE) for size in ((4, 8), (8,), (4, 8))])
    with pytest.raises(UserError, match=message) as error:
        rms_norm(x, weight, EPS, residual)
    assert "\n" not in str(error.value)
