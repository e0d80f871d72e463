"""Decode on a GPU: every head_dim, dtype, page size and candidate tile, CUDA graphs, torch.compile."""

import pytest
import torch

from configs.errors import UserError
from kernel.flash_attention_triton_decode import (
    DecodeCache,
    DecodeCall,
    DecodeConfig,
    DecodeOptions,
    flash_attention_decode,
    run_decode,
)
from kernel.flash_attention_triton_tuning import CANDIDATES
from tests.kernel.decode_reference import exact_decode, random_cache, relative_error, to_pages
from tests.tolerances import FP32_FORWARD, KERNEL_BF16, KERNEL_FP16, PEER_ERROR

pytestmark = pytest.mark.gpu
S = 1500
LENGTHS = [1500, 0, 1, 63, 64, 65, 1024, 777]
TOLERANCE = {torch.bfloat16: KERNEL_BF16, torch.float16: KERNEL_FP16, torch.float32: FP32_FORWARD}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def cached(heads, T, D, dtype, page_size=0, lengths=LENGTHS):
    """q, the contiguous caches and the cache as decode takes it, all on the GPU."""
    q, k, v, lens = random_cache(lengths, S, heads, T, D)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    tensors = [k, v] if page_size == 0 else to_pages(k, v, lengths, page_size)
    k_cache, v_cache, *table = (x.cuda() for x in tensors)
    return q.cuda(), k.cuda(), v.cuda(), DecodeCache(k_cache, v_cache, lens.cuda(), table[0] if table else None)


def decode(q, cache: DecodeCache, options: DecodeOptions = DecodeOptions()):
    return flash_attention_decode(q, cache.k, cache.v, cache.lens, cache.table, options)


def assert_matches(results, exact, dtype) -> None:
    for x, reference in zip(results, exact, strict=True):
        assert relative_error(x, reference) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("D", [32, 64, 80, 96, 128, 256])
def test_head_dims_and_dtypes_match_float64(D, dtype):
    q, k, v, cache = cached((8, 1), 1, D, dtype, page_size=16)
    assert_matches(decode(q, cache), exact_decode(q, k, v, LENGTHS), dtype)


@pytest.mark.parametrize("page_size", [0, 16, 32, 64, 256])
@pytest.mark.parametrize("heads", [(8, 8), (14, 2), (32, 2)], ids=str)
@pytest.mark.parametrize("T", [1, 5, 16])
def test_groups_pages_and_new_tokens_match_float64(T, heads, page_size):
    q, k, v, cache = cached(heads, T, 64, torch.bfloat16, page_size)
    assert_matches(decode(q, cache), exact_decode(q, k, v, LENGTHS), torch.bfloat16)


@pytest.mark.parametrize("options", [DecodeOptions(window=200), DecodeOptions(softcap=5.0, scale=0.4)], ids=str)
@pytest.mark.parametrize("page_size", [0, 64])
def test_window_and_softcap_match_float64(page_size, options):
    q, k, v, cache = cached((16, 2), 3, 128, torch.bfloat16, page_size)
    assert_matches(decode(q, cache, options), exact_decode(q, k, v, LENGTHS, options), torch.bfloat16)


@pytest.mark.parametrize("page_size", [0, 16, 64])
@pytest.mark.parametrize(
    "D, values", [(D, row) for (kind, D), rows in CANDIDATES.items() if kind == "decode" for row in rows]
)
def test_every_candidate_tile_matches_float64(D, values, page_size):
    q, k, v, cache = cached((8, 1), 1, D, torch.bfloat16, page_size)
    results = run_decode(q, cache, DecodeCall(D**-0.5, 0.0, 0, S), DecodeConfig(*values))
    assert_matches(results, exact_decode(q, k, v, LENGTHS), torch.bfloat16)


def test_more_sequences_than_one_block_of_the_plan():
    lengths = [(37 * i) % 300 for i in range(200)]
    q, k, v, cache = cached((4, 2), 1, 64, torch.bfloat16, 16, lengths)
    assert_matches(decode(q, cache), exact_decode(q, k, v, lengths), torch.bfloat16)


@pytest.mark.parametrize("factor", [1.0, 30.0])
@pytest.mark.parametrize("D", [64, 128])
def test_errors_are_at_most_those_of_torch(D, factor):
    q, k, v, cache = cached((8, 8), 1, D, torch.bfloat16, lengths=[S] * 4)
    q = q * factor
    exact_out, exact_lse = exact_decode(q, k, v, [S] * 4)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    theirs, their_lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*heads_first)
    out, lse = decode(q, cache)
    assert relative_error(out, exact_out) <= PEER_ERROR * relative_error(theirs.transpose(1, 2), exact_out)
    assert relative_error(lse, exact_lse) <= PEER_ERROR * relative_error(their_lse[..., :1], exact_lse)


def test_a_captured_graph_serves_other_lengths_tables_and_contents():
    q, _, _, cache = cached((8, 2), 2, 128, torch.bfloat16, 64)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # compiled before capture
        decode(q, cache)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = decode(q, cache)
    lengths = list(reversed(LENGTHS))
    q2, k2, v2, cache2 = cached((8, 2), 2, 128, torch.bfloat16, 64, lengths)
    q.copy_(q2)
    for old, new in ((cache.k, cache2.k), (cache.v, cache2.v), (cache.lens, cache2.lens), (cache.table, cache2.table)):
        old.copy_(new)
    graph.replay()
    assert_matches(results, exact_decode(q2, k2, v2, lengths), torch.bfloat16)


def test_compiled_calls_keep_one_graph_and_repeat_bit_for_bit():
    q, _, _, cache = cached((8, 2), 1, 128, torch.bfloat16, 16)
    eager = decode(q, cache)
    compiled = torch.compile(lambda q, k, v, lens, table: flash_attention_decode(q, k, v, lens, table), fullgraph=True)
    again = compiled(q, cache.k, cache.v, cache.lens, cache.table)
    assert all(torch.equal(x, y) for x, y in zip(eager, again, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(eager, decode(q, cache), strict=True))


def test_tensors_of_two_devices_are_one_clear_error():
    q, _, _, cache = cached((8, 2), 1, 64, torch.bfloat16)
    with pytest.raises(UserError, match="must be one"):
        flash_attention_decode(q, cache.k, cache.v, cache.lens.cpu())
    with pytest.raises(UserError, match="needs a CUDA device"):
        flash_attention_decode(*(x.cpu() for x in (q, cache.k, cache.v, cache.lens)))
