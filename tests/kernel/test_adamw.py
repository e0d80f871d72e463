"""AdamW in one launch against the update in float64: odd sizes, mixed dtypes, the clip factor, moved gradients."""

import pytest
import torch

from configs.errors import UserError
from kernel.adamw import BLOCK, AdamWRates, FusedAdamW, adamw_reference
from tests.kernel.fused_reference import DEVICE, INTERPRETED, relative_error
from tests.tolerances import BF16_ROUNDING, OPTIMIZER_STEPS, PEER_ERROR

SIZES = [(7,), (13,), (1,), (BLOCK + 5,), (3, 100), (BLOCK,)]
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def make(dtype: torch.dtype, gradient_dtype: torch.dtype, sizes=SIZES):
    params = [torch.randn(size, device=DEVICE).to(dtype) for size in sizes]
    moments = [[torch.zeros(size, device=DEVICE) for size in sizes] for _ in range(2)]
    return params, moments, lambda: [torch.randn(size, device=DEVICE).to(gradient_dtype) for size in sizes]


def rates(step: int) -> AdamWRates:
    return AdamWRates(1e-2 / step, 0.9, 0.95, 1e-8, 0.1, step)


def check_steps(dtype, gradient_dtype, scale, steps=4, sizes=SIZES):
    """Ours and the reference in the same precision, each against float64 that sees the same parameters each step."""
    params, moments, draw = make(dtype, gradient_dtype, sizes)
    optimizer = FusedAdamW()
    for step in range(1, steps + 1):
        gradients = draw()
        rows = list(zip(params, gradients, *moments, strict=True))
        exact = [[x.double() for x in row] for row in rows]
        peer = [[x.clone() for x in row] for row in rows]
        optimizer.update(params, gradients, tuple(moments), rates(step), scale)
        for row, wide, plain in zip(rows, exact, peer, strict=True):
            adamw_reference(wide, rates(step), None if scale is None else scale.double())
            adamw_reference(plain, rates(step), scale)
            for index in (0, 2, 3):
                # Against the size of what was added up: a moment that crosses zero has no digits of its own to lose.
                size = wide[index].abs() + (wide[1].abs() if index == 2 else 0)
                errors = [((x[index].double() - wide[index]).norm() / size.norm()).item() for x in (row, plain)]
                assert errors[0] <= PEER_ERROR * max(errors[1], OPTIMIZER_STEPS / 4), (step, row[0].shape, index)


@pytest.mark.skipif(not INTERPRETED, reason="the GPU grid below covers it")
@pytest.mark.parametrize(("dtype", "gradient_dtype"), [(FP32, FP32), (FP16, FP16), (FP16, FP32)])
def test_interpreted_update_matches_float64(dtype, gradient_dtype):
    check_steps(dtype, gradient_dtype, torch.tensor(0.37))
    check_steps(dtype, gradient_dtype, None, steps=2)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "gradient_dtype"), [(FP32, FP32), (BF16, BF16), (BF16, FP32), (FP16, FP16)])
def test_update_matches_float64(dtype, gradient_dtype):
    sizes = [*SIZES, (1000, 333), (5, 7, 11)]
    check_steps(dtype, gradient_dtype, torch.tensor(0.37, device=DEVICE), sizes=sizes)
    check_steps(dtype, gradient_dtype, None, sizes=sizes)


def test_views_at_odd_addresses_and_gradients_that_move():
    """Parameters cut out of one buffer begin at addresses that are no multiples of 16 bytes."""
    flat = [torch.zeros(7 + BLOCK + 13, device=DEVICE) for _ in range(4)]
    flat[0].normal_()
    expected = [x.double() for x in flat]
    optimizer = FusedAdamW()
    for step in (1, 2, 3):
        flat[1] = torch.randn_like(flat[1])  # elsewhere in memory than the last, which is still alive
        expected[1] = flat[1].double()
        pieces = [x.split([7, BLOCK, 13]) for x in flat]
        optimizer.update(pieces[0], pieces[1], (pieces[2], pieces[3]), rates(step))
        adamw_reference(expected, rates(step))
    assert relative_error(flat[0], expected[0]) < OPTIMIZER_STEPS
    assert len(optimizer.tables) == 1


def test_tables_do_not_pile_up_where_tensors_move():
    optimizer = FusedAdamW()
    kept = []
    for _ in range(70):
        params, moments, draw = make(FP32, FP32, [(3,)])
        kept.append((params, moments))
        optimizer.update(params, draw(), tuple(moments), rates(1))
    assert len(optimizer.tables) <= 64


def test_a_bfloat16_weight_is_rounded_once():
    """The update is made in float32 and rounded into the weight: at most half a unit in its last place away."""
    dtype = FP16 if INTERPRETED else BF16
    params, moments, draw = make(dtype, dtype, [(500,)])
    gradients = draw()
    exact = [x[0].double() for x in (params, gradients, *moments)]
    FusedAdamW().update(params, gradients, tuple(moments), rates(1))
    adamw_reference(exact, rates(1))
    error = ((params[0].double() - exact[0]).abs() / exact[0].abs()).max().item()
    assert error <= BF16_ROUNDING / 2 * (1 + 1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p, g, m, v: (p, g[:1], m, v), "must be as many"),
        (lambda p, g, m, v: ([], [], [], []), "at least one"),
        (lambda p, g, m, v: (p, [g[0][:2], g[1]], m, v), "must have one shape"),
        (lambda p, g, m, v: (p, [g[0].half(), g[1]], m, v), "beside .torch.float32, torch.float16"),
        (lambda p, g, m, v: (p, g, [x.half() for x in m], v), "must be float32"),
        (lambda p, g, m, v: ([x.long() for x in p], g, m, v), "param of torch.int64"),
        (lambda p, g, m, v: ([p[0].T, p[1]], [g[0].T, g[1]], [m[0].T, m[1]], [v[0].T, v[1]]), "must be contiguous"),
    ],
)
def test_bad_input_is_one_line_before_the_launch(change, message):
    params, gradients, m, v = change(*[[torch.ones(3, 4, device=DEVICE), torch.ones(5, device=DEVICE)]] * 4)
    with pytest.raises(UserError, match=message) as error:
        FusedAdamW().update(params, gradients, (m, v), rates(1))
    assert "\n" not in str(error.value)


def test_a_scale_of_nan_updates_nothing():
    params, moments, draw = make(FP32, FP32)
    before = [x.clone() for x in (*params, *moments[0], *moments[1])]
    gradients = draw()
    gradients[3][5] = float("inf")
    FusedAdamW().update(params, gradients, tuple(moments), rates(1), torch.full((), float("nan"), device=DEVICE))
    after = (*params, *moments[0], *moments[1])
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
