"""rope on queries and keys: values, gradients, strides, partial heads, the operator under torch.compile, bad input."""

import pytest
import torch

from configs.errors import UserError
from kernel.rope import rope, rope_reference
from tests.kernel.fused_reference import DEVICE, INTERPRETED, check_against_float64, results_and_gradients

# B, T, H, K, D, R (dims that turn), rows of the tables
FEW = [(2, 3, 4, 2, 64, 64, 1), (2, 3, 3, 1, 80, 80, 2), (1, 5, 2, 2, 96, 32, 1), (2, 3, 5, 2, 10, 6, 2)]
MANY = [(4, 333, 32, 8, 64, 64, 1), (2, 100, 12, 12, 64, 64, 2), (2, 77, 40, 8, 128, 128, 1), (1, 9, 70, 3, 256, 64, 1)]


def make(case, dtype: torch.dtype):
    """A packed projection (B, T, (H + K) D), the tables, the upstream gradients, and how to cut q and k out."""
    B, T, H, K, D, R, rows = case
    packed = torch.randn(B, T, (H + K) * D, device=DEVICE).to(dtype)
    angles = 10 * torch.randn(rows, T, 1, R // 2, device=DEVICE).repeat(1, 1, 1, 2)
    upstream = [torch.randn(B, T, heads, D, device=DEVICE) for heads in (H, K)]

    def cut(x):
        return x[..., : H * D].view(B, T, H, D), x[..., H * D :].view(B, T, K, D)

    return packed, (angles.cos(), angles.sin()), upstream, cut


def check(case, dtype):
    packed, tables, upstream, cut = make(case, dtype)
    check_against_float64(
        lambda x: rope(*cut(x), tables), lambda x: rope_reference(*cut(x), tables), [packed], upstream
    )


@pytest.mark.skipif(not INTERPRETED, reason="the GPU grid below covers it")
@pytest.mark.parametrize("case", FEW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_interpreted_rope_matches_float64(case, dtype):
    check(case, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("case", FEW + MANY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rope_matches_float64(case, dtype):
    check(case, dtype)


def test_operator_matches_the_eager_call():
    packed, tables, upstream, cut = make(FEW[0], torch.float32)
    compiled = torch.compile(lambda x: rope(*cut(x), tables), backend="aot_eager", fullgraph=True)
    eager, traced = (results_and_gradients(f, [packed], upstream) for f in (lambda x: rope(*cut(x), tables), compiled))
    assert all(torch.equal(a, b) for a, b in zip(eager, traced, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, t: (q[0], k[0], t), r"must be \(B, T, H, D\)"),
        (lambda q, k, t: (q, k[:, :1], t), r"must be \(B, T, H, D\)"),
        (lambda q, k, t: (q.double(), k, t), "q of torch.float64"),
        (lambda q, k, t: (q.transpose(2, 3), k.transpose(2, 3), t), "must end in 1"),
        (lambda q, k, t: (q[:, :0], k[:, :0], t), "may not be empty"),
        (lambda q, k, t: (q, k, [x[:, :2] for x in t]), r"tables \(1, 2, 1, 8\)"),
        (lambda q, k, t: (q, k, [x[..., :3] for x in t]), "R even"),
        (lambda q, k, t: (q, k, [x.half() for x in t]), "must be float32"),
    ],
)
def test_bad_input_is_one_line_before_the_launch(change, message):
    q, k, tables = torch.ones(2, 3, 4, 8), torch.ones(2, 3, 4, 8), [torch.ones(1, 3, 1, 8)] * 2
    q, k, tables = change(q.to(DEVICE), k.to(DEVICE), [x.to(DEVICE) for x in tables])
    with pytest.raises(UserError, match=message) as error:
        rope(q, k, tables)
    assert "\n" not in str(error.value)
