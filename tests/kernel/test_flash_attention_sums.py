"""Attention over keys that come in several calls: out, lse, dq, dk, dv beside float64 over all keys at once."""

import math

import pytest
import torch

from kernel.flash_attention_ranges import ranges_from_keys
from kernel.flash_attention_triton_launch import CAUSAL, NO_MASK, RANGES, Attention
from kernel.flash_attention_triton_launch_sums import backward_rows, backward_sums, forward_sums
from tests.kernel.attention_reference import dense_attention
from tests.kernel.decode_reference import relative_error
from tests.tolerances import FP32_GRADIENT, KERNEL_BF16_GRADIENT

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU tests below cover it")
NAMES = ("out", "lse", "dq", "dk", "dv")


def dense_mask(call: Attention, rows: slice, keys: slice, shape: tuple[int, int, int]) -> torch.Tensor:
    """(B, T, S) of what a call over some rows and keys sees among all."""
    mask = torch.zeros(shape, dtype=torch.bool)
    T, S = rows.stop - rows.start, keys.stop - keys.start
    columns = torch.arange(S)
    if call.bounds == RANGES:
        low, high = (ends.cpu() for ends in call.ranges[:2])
        part = (columns >= low[..., None]) & (columns < high[..., None])
    else:
        part = torch.ones(1, T, S, dtype=torch.bool)
        if call.bounds == CAUSAL:
            part = columns <= torch.arange(T)[:, None] + call.q_offset
    mask[:, rows, keys] = part
    return mask


def make_calls(T: int, S: int, D: int, deterministic: bool, device: str) -> list[tuple[Attention, slice, slice]]:
    """Intervals, some empty, causal, some rows alone without a mask; the last half sees nothing at first."""
    scale, third, half = D**-0.5, S // 3, T // 2
    high = torch.arange(T, dtype=torch.int32, device=device)[None].clamp_max(third).repeat(2, 1)
    high[1, : T // 4] = 0
    low = (high - 9).clamp_min(0)
    low[:, half:] = high[:, half:]  # empty, and both ends still sorted
    ranges = ranges_from_keys(low, high, third)
    arrays = (ranges.key_lo, ranges.key_hi, ranges.query_lo, ranges.query_hi)
    return [
        (Attention(arrays, RANGES, 0, scale, 0.0, deterministic), slice(0, T), slice(0, third)),
        (Attention((), CAUSAL, -5, scale, 0.0, deterministic), slice(0, T), slice(third, S)),
        (Attention((), NO_MASK, 0, scale, 0.0, deterministic), slice(half, T - 3), slice(third, 2 * third)),
        (Attention((), NO_MASK, 0, scale, 0.0, deterministic), slice(half, half + 1), slice(0, S)),
    ]


def results_of(inputs: list[torch.Tensor], calls: list[tuple[Attention, slice, slice]]) -> list[torch.Tensor]:
    """[out, lse, dq, dk, dv] of the calls one after the other; buffers begin as garbage, as memory may."""
    q, k, v, dout = inputs
    out, dq = (torch.full(q.shape, math.nan, dtype=torch.float32, device=q.device) for _ in range(2))
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), math.nan, device=q.device)
    dkv = torch.zeros(2, *k.shape, dtype=torch.float32, device=q.device)
    for index, (call, rows, keys) in enumerate(calls):
        forward_sums((q[:, rows], k[:, keys], v[:, keys]), out[:, rows], lse[:, :, rows], index == 0, call)
    result = out.to(q.dtype)
    for index, (call, rows, keys) in enumerate(calls):
        prepared = backward_rows(result[:, rows], lse[:, :, rows], dout[:, rows])
        part = dkv[:, :, keys]
        if index == 0:
            part.fill_(math.nan)
        arrive = lambda part=part, first=index == 0: (*part, first)  # noqa: E731
        backward_sums((q[:, rows], k[:, keys], v[:, keys]), prepared, dq[:, rows], index == 0, arrive, call)
    return [out, lse, dq, *dkv]


def several_softmaxes(q, k, v, calls):
    """Dense attention where a key counts once for each call that has it."""
    shape = (q.shape[0], q.shape[1], k.shape[1])
    masks = [dense_mask(*call, shape).to(q.device) for call in calls]
    return dense_attention(q, k.repeat(1, len(calls), 1, 1), v.repeat(1, len(calls), 1, 1), torch.cat(masks, 2))


def errors(dtype, device: str, D: int, deterministic: bool, sizes=(45, 70), scale: float = 1.0) -> dict[str, float]:
    (T, S), torch_dtype = sizes, dtype
    shapes = [(2, T, 4, D), (2, S, 2, D), (2, S, 2, D), (2, T, 4, D)]
    inputs = [torch.randn(shape, device=device).to(torch_dtype) for shape in shapes]
    inputs[0] = inputs[0] * scale
    calls = make_calls(T, S, D, deterministic, device)
    ours = results_of(inputs, calls)
    exact = [x.double().requires_grad_() for x in inputs[:3]]
    out, lse = several_softmaxes(*exact, calls)
    gradients = torch.autograd.grad(out, exact, inputs[3].double())
    hidden = lse == -math.inf
    assert hidden.any() and torch.equal(ours[1] == -math.inf, hidden)
    assert (ours[0].transpose(1, 2)[hidden] == 0).all() and (ours[2].transpose(1, 2)[hidden] == 0).all()
    ours[1], lse = ours[1].masked_fill(hidden, 0.0), lse.masked_fill(hidden, 0.0)
    wanted = [out.detach(), lse.detach(), *gradients]
    return {name: relative_error(x, y) for name, x, y in zip(NAMES, ours, wanted, strict=True)}


@on_cpu
@pytest.mark.parametrize(("deterministic", "scale"), [(False, 1.0), (True, 1.0), (True, 50.0)])
def test_calls_that_go_on_match_one_softmax(deterministic, scale):
    bound = FP32_GRADIENT * max(1.0, scale)  # scores of 50 times the size carry 50 times the rounding
    assert max(errors(torch.float32, "cpu", 32, deterministic, scale=scale).values()) < bound


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 80, 128])
@pytest.mark.parametrize("sizes", [(977, 1400), (2048, 1536)])
def test_gpu_calls_that_go_on_match_one_softmax(D, sizes):
    for name, error in errors(torch.bfloat16, "cuda", D, False, sizes).items():
        assert error < KERNEL_BF16_GRADIENT, name
