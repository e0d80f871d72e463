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
    chunks_aimed_at,
    flash_attention_decode,
    flash_attention_decode_op,
    run_decode,
)
from tests.kernel.decode_reference import exact_decode, random_cache, relative_error, to_pages
from tests.tolerances import FP32_FORWARD

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="test_flash_attention_gpu_decode covers it")
LENGTHS = [70, 0, 1, 37, 32]  # of the sequences: many tiles, none, one, and ends inside and at a tile's end
S = 70


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def assert_matches(results, exact) -> None:
    for x, reference in zip(results, exact, strict=True):
        assert relative_error(x, reference) < FP32_FORWARD


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
    q, k, v, lens = random_cache(LENGTHS, S, heads, T, D)
    tensors = [k, v] if page_size == 0 else to_pages(k, v, LENGTHS, page_size)
    results = flash_attention_decode(q, *tensors[:2], lens, *tensors[2:], options=options)
    assert_matches(results, exact_decode(q, k, v, LENGTHS, options))


@on_cpu
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("programs", [1, 40])
def test_the_result_does_not_depend_on_the_cut(programs, page_size):
    """From one chunk a sequence to one tile a chunk, with tiles that span two pages."""
    q, k, v, lens = random_cache(LENGTHS, S, (4, 2), 2, 32)
    k_cache, v_cache, *table = [k, v] if page_size == 0 else to_pages(k, v, LENGTHS, page_size)
    cache = DecodeCache(k_cache, v_cache, lens, table[0] if table else None)
    results = run_decode(q, cache, DecodeCall(32**-0.5, 0.0, 0, S), DecodeConfig(32, 4, 1, programs))
    assert_matches(results, exact_decode(q, k, v, LENGTHS))


@on_cpu
@pytest.mark.parametrize("page_size", [0, 16])
def test_many_short_sequences_are_not_cut(page_size, monkeypatch):
    from kernel import flash_attention_triton_decode as decode

    lengths = LENGTHS * 3
    q, k, v, lens = random_cache(lengths, S, (4, 2), 2, 32)
    tensors = [k, v] if page_size == 0 else to_pages(k, v, lengths, page_size)
    options = DecodeOptions(window=33)
    assert decode.runs_whole(q, 2, DecodeCall(1.0, 0.0, 33, S), DecodeConfig(16, 4, 1, 3))
    monkeypatch.delattr(decode, "merge_kernel")  # must not be needed
    results = flash_attention_decode(q, *tensors[:2], lens, *tensors[2:], options=options)
    assert_matches(results, exact_decode(q, k, v, lengths, options))


@on_cpu
def test_with_fixed_chunks_a_row_has_the_same_bits_alone():
    q, k, v, lens = random_cache(LENGTHS, S, (4, 2), 1, 32)
    options = DecodeOptions(split_keys=32)
    together = flash_attention_decode(q, k, v, lens, options=options)
    assert_matches(together, exact_decode(q, k, v, LENGTHS))
    for row in range(len(LENGTHS)):
        one = slice(row, row + 1)
        alone = flash_attention_decode(q[one], k[one], v[one], lens[one], options=options)
        assert all(torch.equal(x, y[one]) for x, y in zip(alone, together, strict=True)), row


@on_cpu
def test_parts_that_would_take_too_much_memory_are_not_made(monkeypatch):
    from kernel import flash_attention_triton_decode as decode

    q, k, v, lens = random_cache(LENGTHS, S, (4, 2), 2, 32)
    assert decode.chunk_counts(q, 2, DecodeCall(1.0, 0.0, 0, S), DecodeConfig(16, 4, 1, 3))[0] > 1
    monkeypatch.setattr(decode, "MOST_PART_BYTES", 1000)
    assert decode.chunk_counts(q, 2, DecodeCall(1.0, 0.0, 0, S), DecodeConfig(16, 4, 1, 3)) == (1, 6)
    assert_matches(flash_attention_decode(q, k, v, lens), exact_decode(q, k, v, LENGTHS))


@on_cpu
def test_strided_caches_and_int64_lengths_match_float64():
    q, k, v, lens = random_cache(LENGTHS, S, (4, 2), 1, 32)
    both = torch.stack((k, v), dim=3).transpose(1, 2).contiguous().transpose(1, 2)  # (B, S, K, 2, D), heads outside
    q_strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    results = flash_attention_decode(q_strided, both[..., 0, :], both[..., 1, :], lens.long())
    assert_matches(results, exact_decode(q, k, v, LENGTHS))


@on_cpu
def test_lengths_are_cut_to_what_the_cache_holds():
    q, k, v, _ = random_cache([S, 40], S, (2, 1), 1, 32)
    too_long = torch.tensor([10 * S, -3], dtype=torch.int32)
    assert_matches(flash_attention_decode(q, k, v, too_long), exact_decode(q, k, v, [S, 0]))
    limited = flash_attention_decode(q, k, v, too_long, options=DecodeOptions(max_length=48))
    assert_matches(limited, exact_decode(q, k, v, [48, 0]))


@on_cpu
def test_operator_equals_the_eager_call_and_knows_its_shapes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, k, v, lens = random_cache(LENGTHS, S, (4, 2), 3, 32)
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


SHAPES = [(64, 4, 128, 396), (64, 8, 128, 396), (1, 8, 2048, 396), (8, 8, 32, 396), (64, 8, 64, 264), (3, 2, 1000, 264)]


@pytest.mark.parametrize("B, heads, tiles, slots", SHAPES)
def test_full_sequences_are_cut_so_that_the_last_wave_is_nearly_full(B, heads, tiles, slots):
    aimed = chunks_aimed_at(B, heads, tiles, slots)
    chunk_tiles = max(1, -(-B * tiles // aimed))  # as plan_chunks has it
    waves = B * -(-tiles // chunk_tiles) * heads / slots
    assert 0.9 < waves / math.ceil(waves) <= 1.0


def test_short_sequences_get_one_tile_a_program_and_long_batches_one_chunk_a_sequence():
    assert chunks_aimed_at(1, 8, 4, 396) >= 4
    assert -(-2000 * 20 // chunks_aimed_at(2000, 8, 20, 396)) >= 20


@on_cpu
def test_compiled_calls_of_other_lengths_keep_one_graph():
    """torch.compile sees one node, and a longer cache does not break the graph."""
    compiled = torch.compile(
        lambda q, k, v, lens: flash_attention_decode(q, k, v, lens), fullgraph=True, backend="aot_eager", dynamic=True
    )
    q, k, v, lens = random_cache([40, 0, 17], S, (2, 1), 2, 32)
    for length in (S, 48):
        arguments = (q, k[:, :length], v[:, :length], lens)
        eager = flash_attention_decode(*arguments)
        assert all(torch.equal(x, y) for x, y in zip(compiled(*arguments), eager, strict=True))
