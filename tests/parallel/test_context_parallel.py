"""Ring attention, gathered keys and Ulysses beside dense attention on one device, in float64: out, lse, dq, dk, dv."""

import math
from dataclasses import replace

import pytest
import torch

from parallel.context_parallel import Ring, empty_results, ring_attention
from parallel.context_parallel_blocks import DifferentiableBlock, Joined
from parallel.context_parallel_layout import (
    BlockMask,
    local_intervals,
    ring_blocks,
    sequence_order,
    zigzag_columns,
)
from parallel.mesh_degrees import Degrees
from tests.kernel.attention_reference import causal_mask, dense_attention
from tests.parallel.pool import pool_of
from tests.tolerances import FP32_GRADIENT, FP64

B, T, H, K, D = 2, 24, 4, 2, 8
DOCUMENTS = [[5, 1, 9, 9], [24]]  # tokens of each document of each row; borders lie inside and between ranks


def inputs(scale: float = 1.0) -> list[torch.Tensor]:
    """q, k, v and dout of the whole sequence, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(B, T, H, D), (B, T, K, D), (B, T, K, D), (B, T, H, D)]
    q, k, v, dout = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [q * scale, k, v, dout]


def document_intervals() -> tuple[torch.Tensor, torch.Tensor]:
    """key_lo and key_hi (B, T) of causal attention within DOCUMENTS."""
    rows = []
    for lengths in DOCUMENTS:
        starts = [sum(lengths[:i]) for i, length in enumerate(lengths) for _ in range(length)]
        rows.append(torch.tensor(starts))
    return torch.stack(rows).int(), (torch.arange(T) + 1).expand(B, T).int()


def dense_mask_of(mask: BlockMask) -> torch.Tensor:
    """A block's mask as (B or 1, T, S) bool."""
    if mask.kind == "full":
        return torch.ones(1, mask.num_queries, mask.num_keys, dtype=torch.bool)
    if mask.kind == "causal":
        return causal_mask(mask.num_queries, mask.num_keys, 0)
    low, high = mask.intervals
    keys = torch.arange(mask.num_keys)
    return (keys >= low[..., None]) & (keys < high[..., None])


def expected(masked: str, scale: float) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv on one device."""
    q, k, v, dout = inputs(scale)
    mask = dense_mask_of(BlockMask("causal" if masked == "causal" else "intervals", T, T, intervals_of(masked)))
    tensors = [x.requires_grad_() for x in (q, k, v)]
    out, lse = dense_attention(*tensors, mask)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, tensors, dout)]


def intervals_of(masked: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """causal: none; documents; "hidden": some queries see nothing, among them all of the first quarter."""
    if masked == "causal":
        return None
    low, high = document_intervals()
    if masked == "hidden":
        unseen = torch.arange(T) < T // 4
        low = torch.where(unseen, high, low).cummax(1).values
    return low, high


def run_ring(mesh, masked: str, scale: float) -> list[torch.Tensor]:
    """On a rank: out, lse, dq, dk, dv of its share of the sequence."""
    ranks, rank = mesh.size("cp"), mesh.rank_in("cp")
    columns = zigzag_columns(T, ranks, rank)
    intervals = intervals_of(masked)
    if intervals is not None:
        intervals = tuple(ends[:, columns] for ends in intervals)
    blocks = ring_blocks(T // ranks, ranks, rank, intervals)
    ring = Ring(mesh, blocks, [dense_mask_of(block.mask) for block in blocks], DifferentiableBlock(dense_attention))
    q, k, v, dout = (x[:, columns] for x in inputs(scale))
    tensors = [x.requires_grad_() for x in (q, k, v)]
    out, lse = ring_attention(*tensors, ring)
    return [out.detach(), lse, *torch.autograd.grad(out, tensors, dout)]


def shares_put_together(shares: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """The ranks' results in the order of the sequence."""
    order = sequence_order(T, len(shares))
    whole = [torch.cat(parts, dim=2 if index == 1 else 1) for index, parts in enumerate(zip(*shares, strict=True))]
    return [x[:, :, order] if index == 1 else x[:, order] for index, x in enumerate(whole)]


def assert_same(results: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for name, got, exact in zip(("out", "lse", "dq", "dk", "dv"), results, wanted, strict=True):
        hidden = exact == -math.inf
        assert torch.equal(got == -math.inf, hidden), name
        got, exact = got.masked_fill(hidden, 0.0), exact.masked_fill(hidden, 0.0)
        assert (got - exact).abs().max() <= FP64 * exact.abs().max(), name


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("masked", "scale"), [("causal", 1.0), ("causal", 50.0), ("documents", 1.0), ("hidden", 1.0)])
def test_ring_attention_matches_one_device(ranks, masked, scale):
    shares = pool_of(ranks).run(run_ring, masked, scale, degrees=Degrees(dp=1, cp=ranks))
    assert_same(shares_put_together(shares), expected(masked, scale))


def test_every_pair_of_a_causal_mask_lies_in_one_block():
    for ranks in (1, 2, 3, 4, 6):
        seen = torch.zeros(T, T, dtype=torch.int64)
        computed = []
        for rank in range(ranks):
            columns = zigzag_columns(T, ranks, rank)
            for block in ring_blocks(T // ranks, ranks, rank):
                keys = zigzag_columns(T, ranks, block.source)[block.keys]
                pairs = dense_mask_of(block.mask)[0]
                seen[columns[block.queries, None], keys] += pairs
            computed.append(sum(int(dense_mask_of(b.mask).sum()) for b in ring_blocks(T // ranks, ranks, rank)))
        assert torch.equal(seen, causal_mask(T, T, 0)[0].long())
        assert len(set(computed)) == 1, f"{ranks} ranks with unequal work: {computed}"


def test_intervals_of_a_share_name_the_same_keys():
    low, high = document_intervals()
    for ranks in (2, 3, 4):
        for source in range(ranks):
            keys = zigzag_columns(T, ranks, source)
            own = local_intervals((low, high), T // ranks // 2, ranks, source)
            wanted = (keys >= low[..., None]) & (keys < high[..., None])
            assert torch.equal(dense_mask_of(BlockMask("intervals", T, len(keys), own)), wanted)


def joined_of(shape: tuple[int, int, int, int], blocks: list[tuple[slice, torch.Tensor, torch.Tensor]]) -> Joined:
    """The blocks joined in order, from memory that holds anything."""
    B, T, H, _ = shape
    joined = Joined(torch.full(shape, math.nan), torch.full((B, H, T), math.nan), True)
    for queries, out, lse in blocks:
        joined[queries].add(out, lse)
        joined = replace(joined, empty=False)
    return joined


def test_joining_survives_logits_that_overflow_by_themselves():
    blocks = [(slice(0, 2), torch.tensor([1.0, 0.0]).view(1, 2, 1, 1), torch.tensor([400.0, -math.inf]).view(1, 1, 2))]
    for lse, value in ((400.0, 3.0), (-400.0, 9.0)):
        blocks.append((slice(0, 1), torch.full((1, 1, 1, 1), value), torch.full((1, 1, 1), lse)))
    blocks.append((slice(1, 2), torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1), -math.inf)))  # still nothing to see
    joined = joined_of((1, 2, 1, 1), blocks)
    assert joined.out.flatten().tolist() == pytest.approx([2.0, 0.0], rel=FP32_GRADIENT)
    assert joined.lse.flatten().tolist() == [pytest.approx(400.0 + math.log(2.0)), -math.inf]


def test_joining_sums_16_bit_blocks_in_float32():
    """A zero and 999 ones of equal weight: a bfloat16 mean would stop rising at about 0.95."""
    ones = [
        (slice(0, 1), torch.full((1, 1, 1, 1), value, dtype=torch.bfloat16), torch.zeros(1, 1, 1))
        for value in (0.0, *[1.0] * 999)
    ]
    joined = joined_of((1, 1, 1, 1), ones)
    assert joined.out.item() == pytest.approx(0.999, rel=100 * FP32_GRADIENT)
    assert joined.lse.item() == pytest.approx(math.log(1000), rel=100 * FP32_GRADIENT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_a_rank_keeps_between_blocks_is_float32_or_better(dtype):
    out, lse = empty_results(torch.zeros(2, 6, 4, 8, dtype=dtype))
    assert out.shape == (2, 6, 4, 8) and lse.shape == (2, 4, 6)
    assert out.dtype == lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
