"""Decode over contiguous and paged caches against dense attention in float64, a sequence at a time."""

import math

import pytest
import torch

from configs.errors import UserError
from kernel.flash_attention_triton_decode import (
    DecodeCache,
    DecodeCall,
    DecodeConfig,
    DecodeOptions,
    flash_attention_decode,
    flash_attention_decode_op,
    run_decode,
)
from tests.kernel.attention_reference import causal_mask, dense_attention
from tests.tolerances import FP32_FORWARD

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="test_flash_attention_gpu_decode covers it")
LENGTHS = [70, 0, 1, 37, 32]  # of the sequences: many tiles, none, one, and ends inside and at a tile's end
S = 70


def random_cache(lengths: list[int], heads: tuple[int, int], T: int, D: int) -> list[torch.Tensor]:
    """q (B, T, H, D) and caches (B, S, K, D) whose slots behind a sequence's length hold nan, and the lengths."""
    torch.manual_seed(0)
    H, K = heads
    q, k, v = (torch.randn(len(lengths), n, h, D) for n, h in ((T, H), (S, K), (S, K)))
    for row, length in enumerate(lengths):
        k[row, length:] = v[row, length:] = math.nan
    return [q, k, v, torch.tensor(lengths, dtype=torch.int32)]


def paged(k: torch.Tensor, v: torch.Tensor, lengths: list[int], page_size: int) -> list[torch.Tensor]:
    """The same caches cut into shuffled pages; unused pages hold nan, entries of the table past a length 2^30."""
    per_row = -(-S // page_size)
    total = len(lengths) * per_row + 3
    order = torch.randperm(total, generator=torch.Generator().manual_seed(1)).int()
    pages = [torch.full((total, page_size, *x.shape[2:]), math.nan) for x in (k, v)]
    table = torch.full((len(lengths), per_row), 2**30, dtype=torch.int32)
    for row, length in enumerate(lengths):
        for index in range(-(-length // page_size)):
            page = order[row * per_row + index]
            table[row, index] = page
            for x, cache in zip((k, v), pages, strict=True):
                part = x[row, index * page_size : (index + 1) * page_size]
                cache[page, : len(part)] = part
    return [*pages, table]


def expected(q, k, v, lengths: list[int], options: DecodeOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sequence apart, in float64."""
    B, T, H, D = q.shape
    out, lse = torch.zeros(B, T, H, D).double(), torch.full((B, H, T), -math.inf).double()
    for row, length in enumerate(lengths):
        if length:
            keys, values = k[row : row + 1, :length].double(), v[row : row + 1, :length].double()
            mask = causal_mask(T, length, length - T, options.window)
            query = q[row : row + 1].double()
            results = dense_attention(query, keys, values, mask, options.scale, options.softcap)
            out[row], lse[row] = results[0][0], results[1][0]
    return out, lse


def assert_matches(results, exact) -> None:
    for x, reference in zip(results, exact, strict=True):
        finite = reference.isfinite()
        assert torch.equal(x.isfinite(), finite)
        difference = (x.double() - reference)[finite].norm() / reference[finite].norm()
        assert difference < FP32_FORWARD


CASES = {
    "one token": ((4, 2), 1, 32, DecodeOptions()),
    "four tokens": ((4, 2), 4, 32, DecodeOptions()),
    "window": ((4, 2), 3, 32, DecodeOptions(window=21)),
    "softcap and scale": ((2, 2), 1, 64, DecodeOptions(scale=0.3, softcap=2.0)),
    "group of seven, odd head_dim": ((7, 1), 2, 80, DecodeOptions()),
    "more rows than a tile": ((8, 1), 9, 32, DecodeOptions(window=30)),
    "head_dim 256": ((2, 1), 1, 256, DecodeOptions()),
}


@on_cpu
@pytest.mark.parametrize("page_size", [0, 32])
@pytest.mark.parametrize("name", CASES)
def test_decode_matches_float64(name, page_size):
    heads, T, D, options = CASES[name]
    q, k, v, lens = random_cache(LENGTHS, heads, T, D)
    tensors = [k, v] if page_size == 0 else paged(k, v, LENGTHS, page_size)
    results = flash_attention_decode(q, *tensors[:2], lens, *tensors[2:], options=options)
    assert_matches(results, expected(q, k, v, LENGTHS, options))


@on_cpu
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("programs", [1, 40])
def test_the_result_does_not_depend_on_the_cut(programs, page_size):
    """From one chunk a sequence to one tile a chunk, with tiles that span two pages."""
    q, k, v, lens = random_cache(LENGTHS, (4, 2), 2, 32)
    k_cache, v_cache, *table = [k, v] if page_size == 0 else paged(k, v, LENGTHS, page_size)
    cache = DecodeCache(k_cache, v_cache, lens, table[0] if table else None)
    results = run_decode(q, cache, DecodeCall(32**-0.5, 0.0, 0, S), DecodeConfig(32, 4, 1, programs))
    assert_matches(results, expected(q, k, v, LENGTHS, DecodeOptions()))


@on_cpu
def test_strided_caches_and_int64_lengths_match_float64():
    q, k, v, lens = random_cache(LENGTHS, (4, 2), 1, 32)
    both = torch.stack((k, v), dim=3).transpose(1, 2).contiguous().transpose(1, 2)  # (B, S, K, 2, D), heads outside
    q_strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    results = flash_attention_decode(q_strided, both[..., 0, :], both[..., 1, :], lens.long())
    assert_matches(results, expected(q, k, v, LENGTHS, DecodeOptions()))


@on_cpu
def test_lengths_are_cut_to_what_the_cache_holds():
    q, k, v, _ = random_cache([S, 40], (2, 1), 1, 32)
    too_long = torch.tensor([10 * S, -3], dtype=torch.int32)
    assert_matches(flash_attention_decode(q, k, v, too_long), expected(q, k, v, [S, 0], DecodeOptions()))
    limited = flash_attention_decode(q, k, v, too_long, options=DecodeOptions(max_length=48))
    assert_matches(limited, expected(q, k, v, [48, 0], DecodeOptions()))


@on_cpu
def test_operator_equals_the_eager_call_and_knows_its_shapes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, k, v, lens = random_cache(LENGTHS, (4, 2), 3, 32)
    eager = flash_attention_decode(q, k, v, lens)
    operator = flash_attention_decode_op(q, k, v, lens, None, [0, S], [32**-0.5, 0.0])
    assert all(torch.equal(x, y) for x, y in zip(eager, operator, strict=True))
    with FakeTensorMode():
        fakes = [torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v, lens)]
        out, lse = flash_attention_decode(*fakes)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, eager[1].shape, torch.float32)


def bad_inputs():
    q, k, lens = torch.randn(2, 1, 4, 32), torch.randn(2, 64, 2, 32), torch.tensor([3, 4], dtype=torch.int32)
    table = torch.zeros(2, 2, dtype=torch.int32)
    yield "head_dim=48", (torch.randn(2, 1, 4, 48), torch.randn(2, 64, 2, 48), torch.randn(2, 64, 2, 48), lens)
    yield "divide", (q, torch.randn(2, 64, 3, 32), torch.randn(2, 64, 3, 32), lens)
    yield "one 4-d shape", (q, k, k[:, :32], lens)
    yield "strides", (q, k, k.transpose(1, 2).contiguous().transpose(1, 2), lens)
    yield "dtypes", (q, k.half(), k.half(), lens)
    yield "cache_lens", (q, k, k, lens[:1])
    yield "cache_lens", (q, k, k, lens.float())
    yield "rows of q", (q, k[:1], k[:1], lens)
    yield "block_table", (q, k, k, lens, table.long())
    yield "block_table", (q, k, k, lens, table[:1])
    yield "page_size=24", (q, k[:, :24], k[:, :24], lens, table)
    yield "page_size=8", (q, k[:, :8], k[:, :8], lens, table)
    yield "last dimension", (q.transpose(2, 3).contiguous().transpose(2, 3), k, k, lens)
    yield "no dimension", (q[:, :0], k, k, lens)
    yield "no gradient", (q.clone().requires_grad_(), k, k, lens)
    yield "must be one", (q, k.to("meta"), k.to("meta"), lens)
    yield "scale=0", (q, k, k, lens, None, DecodeOptions(scale=0.0))
    yield "softcap=-1", (q, k, k, lens, None, DecodeOptions(softcap=-1.0))
    yield "window=0", (q, k, k, lens, None, DecodeOptions(window=0))
    yield "max_length=0", (q, k, k, lens, None, DecodeOptions(max_length=0))


@on_cpu
@pytest.mark.parametrize("words, arguments", list(bad_inputs()), ids=lambda x: x if isinstance(x, str) else "")
def test_bad_input_is_one_clear_error(words, arguments):
    with pytest.raises(UserError, match=words) as caught:
        flash_attention_decode(*arguments)
    assert "\n" not in str(caught.value)
