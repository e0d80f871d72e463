"""Sums by completion, in rows of their own and packed, and aggregations that do not depend on how a batch is cut."""

import pytest
import torch

from alignment.grpo_responses import AGGREGATIONS, Responses, aggregate, count_units
from tests.parallel.pool import run_ranks
from tests.tolerances import FP64

LENGTHS = [3, 1, 7, 0, 5, 2, 6, 4]
T, LIMIT = 9, 8


def batch():
    """Eight completions of unequal length behind prompts of unequal length; values everywhere, nan outside."""
    generator = torch.Generator().manual_seed(1)
    values = torch.full((len(LENGTHS), T), torch.nan, dtype=torch.float64)
    mask = torch.zeros(len(LENGTHS), T, dtype=torch.bool)
    for row, length in enumerate(LENGTHS):
        start = (row * 2) % (T - length + 1)
        mask[row, start : start + length] = True
    values[mask] = torch.randn(sum(LENGTHS), dtype=torch.float64, generator=generator)
    return values, mask


def expected_loss(values, mask, aggregation):
    """Each definition, completion by completion."""
    rows = [v[m] for v, m in zip(values, mask, strict=True) if m.any()]
    if aggregation == "token_mean":
        return torch.cat(rows).mean()
    if aggregation == "sequence_mean":
        return torch.stack([row.mean() for row in rows]).mean()
    return torch.stack([row.sum() / LIMIT for row in rows]).mean()


def share(values, mask, aggregation):
    responses = Responses(mask)
    return aggregate(values, responses, aggregation, LIMIT), count_units(responses, aggregation)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_aggregation_matches_its_definition_and_gradient(aggregation):
    values, mask = batch()
    values.requires_grad_()
    total, units = share(values, mask, aggregation)
    torch.testing.assert_close(total / units, expected_loss(values, mask, aggregation), rtol=FP64, atol=FP64)
    (gradient,) = torch.autograd.grad(total / units, values)
    again = values.detach().requires_grad_()
    (wanted,) = torch.autograd.grad(expected_loss(again, mask, aggregation), again)
    torch.testing.assert_close(gradient, wanted, rtol=FP64, atol=FP64)
    assert not gradient[~mask].any()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("cuts", [[8], [2, 2, 2, 2], [1, 5, 2]])
def test_micro_batches_add_up_to_the_whole(aggregation, cuts):
    values, mask = batch()
    total, units = share(values, mask, aggregation)
    parts = [share(v, m, aggregation) for v, m in zip(values.split(cuts), mask.split(cuts), strict=True)]
    torch.testing.assert_close(sum(p[0] for p in parts), total, rtol=FP64, atol=FP64)
    assert sum(p[1] for p in parts) == units


def test_a_mean_of_micro_batch_means_would_have_the_wrong_sign():
    """Why there are sums: one long completion that is good, three short ones that are bad."""
    values = torch.tensor([[1.0] * 8] + [[-1.0] + [0.0] * 7] * 3, dtype=torch.float64)
    mask = torch.tensor([[True] * 8] + [[True] + [False] * 7] * 3)
    total, units = share(values, mask, "token_mean")
    means = [share(v, m, "token_mean") for v, m in zip(values.split(1), mask.split(1), strict=True)]
    assert total / units > 0 > sum(t / n for t, n in means) / 4


def on_rank(mesh, values, mask, aggregation):
    """Two ranks with unequal numbers of tokens: sums and counts are added, then divided."""
    from parallel.collectives import all_reduce_sum

    rows = [range(0, 3), range(3, 8)][mesh.rank]
    total, units = share(values[rows], mask[rows], aggregation)
    both = all_reduce_sum(torch.stack((total, torch.tensor(float(units), dtype=total.dtype))), mesh, "dp")
    return both[0] / both[1]


@pytest.mark.dist
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_two_ranks_match_one(aggregation):
    values, mask = batch()
    for loss in run_ranks(on_rank, 2, values, mask, aggregation):
        torch.testing.assert_close(loss, expected_loss(values, mask, aggregation), rtol=FP64, atol=FP64)


def packed(values, mask, rows):
    """The completions of `rows` side by side, several a row: values, mask and doc_ids."""
    width = max(sum(len(mask[i]) for i in row) for row in rows)
    out = torch.full((len(rows), width), torch.nan, dtype=values.dtype)
    kept = torch.zeros(len(rows), width, dtype=torch.bool)
    docs = torch.zeros(len(rows), width, dtype=torch.int32)
    for r, row in enumerate(rows):
        for place, i in enumerate(row):
            span = slice(place * T, (place + 1) * T)
            out[r, span], kept[r, span], docs[r, span] = values[i], mask[i], place + 1
    return out, Responses(kept, docs)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_packed_completions_count_like_separate_ones(aggregation):
    values, mask = batch()
    total, units = share(values, mask, aggregation)
    packed_values, responses = packed(values, mask, [[4, 0, 7], [3], [2, 1], [5, 6]])
    torch.testing.assert_close(aggregate(packed_values, responses, aggregation, LIMIT), total, rtol=FP64, atol=FP64)
    assert count_units(responses, aggregation) == units == (sum(LENGTHS) if aggregation == "token_mean" else 7)


def test_constant_norm_weighs_tokens_alike_and_sequence_mean_by_length():
    """The length bias of GRPO: its token gradients are 1/len, Dr. GRPO's are equal."""
    values = torch.zeros(2, 6, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True] * 6, [True] * 2 + [False] * 4])
    (by_mean,) = torch.autograd.grad(share(values, mask, "sequence_mean")[0], values)
    (by_constant,) = torch.autograd.grad(share(values, mask, "constant")[0], values)
    torch.testing.assert_close(by_mean[mask], torch.tensor([1 / 6] * 6 + [1 / 2] * 2, dtype=torch.float64))
    torch.testing.assert_close(by_constant[mask], torch.full((8,), 1 / LIMIT, dtype=torch.float64))


def test_a_constant_that_is_missing_is_an_error():
    values, mask = batch()
    with pytest.raises(AssertionError, match="max_response_tokens"):
        aggregate(values, Responses(mask), "constant")
