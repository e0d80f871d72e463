"""The tiles in plain PyTorch and the key intervals, against dense attention in float64 and a brute-force mask."""

import pytest
import torch
from torch.testing import assert_close

from kernel.flash_attention_mock import flash_attention_mock
from kernel.flash_attention_ranges import cu_seqlens_ranges, document_ranges, offset_ranges
from tests.kernel.attention_reference import causal_mask, dense_attention, outputs_and_gradients, packed_mask
from tests.tolerances import FP64

LENGTHS = [10, 1, 19, 7]  # of documents, 37 tokens


def document_ids(lengths: list[int]) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].int()


def cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


CASES = {
    "causal": (offset_ranges((1, 37, 37), 0, True, None, "cpu"), causal_mask(37, 37, 0)),
    "more keys": (offset_ranges((1, 37, 50), 13, True, None, "cpu"), causal_mask(37, 50, 13)),
    "rows without keys": (offset_ranges((1, 37, 50), -5, True, None, "cpu"), causal_mask(37, 50, -5)),
    "ring block seen whole": (offset_ranges((1, 37, 20), 37, True, None, "cpu"), causal_mask(37, 20, 37)),
    "window": (offset_ranges((1, 37, 50), 13, True, 9, "cpu"), causal_mask(37, 50, 13, 9)),
    "two-sided window": (offset_ranges((1, 37, 50), 3, False, 9, "cpu"), causal_mask(37, 50, 3, 9, causal=False)),
    "no mask": (offset_ranges((1, 37, 50), 0, False, None, "cpu"), causal_mask(37, 50, 0, causal=False)),
    "documents": (document_ranges(document_ids(LENGTHS)), packed_mask(LENGTHS)),
    "documents both ways": (document_ranges(document_ids(LENGTHS), causal=False), packed_mask(LENGTHS, causal=False)),
    "windowed documents": (
        document_ranges(document_ids(LENGTHS), window=4),
        packed_mask(LENGTHS) & causal_mask(37, 37, 0, 4),
    ),
    "sequences": (
        cu_seqlens_ranges(cumulative([5, 0, 32]), cumulative([9, 11, 30]), 37, 50),
        packed_mask([5, 0, 32], [9, 11, 30]),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_ranges_match_the_mask_from_both_sides(name):
    ranges, mask = CASES[name]
    queries, keys = torch.arange(mask.shape[1]), torch.arange(mask.shape[2])
    seen = (keys >= ranges.key_lo[..., None]) & (keys < ranges.key_hi[..., None])
    seen_by = (queries >= ranges.query_lo[..., None]) & (queries < ranges.query_hi[..., None])
    assert torch.equal(seen, mask)
    assert torch.equal(seen_by.transpose(1, 2), mask)
    assert (ranges.key_lo.diff() >= 0).all() and (ranges.key_hi.diff() >= 0).all()


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("name", CASES)
def test_mock_matches_dense_attention(name, softcap):
    ranges, mask = CASES[name]
    torch.manual_seed(0)
    T, S = mask.shape[1:]
    q, dout = torch.randn(2, 1, T, 4, 8, dtype=torch.float64)
    k, v = torch.randn(2, 1, S, 2, 8, dtype=torch.float64)
    dlse = torch.randn(1, 4, T, dtype=torch.float64)
    ours = outputs_and_gradients(
        lambda q, k, v: flash_attention_mock(q, k, v, ranges=ranges, softcap=softcap), q, k, v, dout, dlse
    )
    theirs = outputs_and_gradients(lambda q, k, v: dense_attention(q, k, v, mask, softcap=softcap), q, k, v, dout, dlse)
    for actual, expected in zip(ours, theirs, strict=True):
        assert_close(actual, expected, atol=FP64, rtol=FP64)


def test_mock_is_causal_without_ranges_and_keeps_batch_rows_apart():
    torch.manual_seed(1)
    q, k, v = torch.randn(3, 3, 21, 2, 8, dtype=torch.float64)
    out, lse = flash_attention_mock(q, k, v, block=(8, 4))
    expected, expected_lse = dense_attention(q, k, v, causal_mask(21, 21, 0))
    assert_close(out, expected, atol=FP64, rtol=FP64)
    assert_close(lse, expected_lse, atol=FP64, rtol=FP64)


def test_parts_merge_through_lse():
    """Two halves of the keys, joined by their lse as ring attention does, give the whole, and so do the gradients."""
    torch.manual_seed(2)
    q, k, v, dout = torch.randn(4, 1, 24, 2, 8, dtype=torch.float64)
    dlse = torch.randn(1, 2, 24, dtype=torch.float64)

    def merged(q, k, v):
        near = offset_ranges((1, 24, 12), -12, True, None, "cpu")  # the later keys: half of the queries see none
        far = offset_ranges((1, 24, 12), 0, True, None, "cpu")
        parts = [
            flash_attention_mock(q, k[:, :12], v[:, :12], ranges=far),
            flash_attention_mock(q, k[:, 12:], v[:, 12:], ranges=near),
        ]
        lse = torch.logaddexp(parts[0][1], parts[1][1])
        weights = [torch.exp(part_lse - lse).transpose(1, 2)[..., None] for _, part_lse in parts]
        return sum(weight * part for weight, (part, _) in zip(weights, parts, strict=True)), lse

    ours = outputs_and_gradients(merged, q, k, v, dout, dlse)
    theirs = outputs_and_gradients(
        lambda q, k, v: dense_attention(q, k, v, causal_mask(24, 24, 0)), q, k, v, dout, dlse
    )
    for actual, expected in zip(ours, theirs, strict=True):
        assert_close(actual, expected, atol=FP64, rtol=FP64)
