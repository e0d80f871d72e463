"""What the benchmark of context parallelism predicts, where it must come to a plain number."""

import pytest

from bench_mark.bench_mark_cp_predictions import Rates, calibrated, simulated_s, way_time
from kernel.cost_model import AttentionShape, Peaks, attention_backward, attention_forward
from parallel.cost_model import Cluster, Link

SHAPE = AttentionShape(1, 65536, 65536, 16, 8, 128)
PEAKS = Peaks(1e15, 1e18, 5e12)
RATES = Rates(PEAKS, 6e14, 5e14)


def seconds_of_products() -> float:
    pairs = SHAPE.T * SHAPE.S / 2
    forward, backward = attention_forward(SHAPE, pairs), attention_backward(SHAPE, pairs)
    return forward.flops / RATES.forward_flops + backward.flops / RATES.backward_flops


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_blocks_of_all_ranks_are_the_whole_kernels_products_and_the_passes_beside_them(ranks):
    passes = sum(simulated_s(SHAPE, ranks, RATES)) - seconds_of_products()
    width, kv_width, delta = 16 * 128, 2 * 8 * 128, 2 * 16 * 128 * (ranks - 1) / ranks
    expected = SHAPE.T * (6 * width + 6 * (width + kv_width) + delta) if ranks > 1 else 0.0
    assert passes * PEAKS.memory_bytes == pytest.approx(expected, rel=1e-6, abs=1e6)


@pytest.mark.parametrize("way", ["ring", "all_gather", "ulysses"])
def test_links_without_cost_leave_a_ranks_share_of_the_products(way):
    free = Cluster(8, Link(1e30, 0.0), None, 0.0)
    found = way_time(way, SHAPE, 4, RATES, free)
    assert found.exposed_s == pytest.approx(0.0, abs=1e-9)
    assert found.seconds == pytest.approx(seconds_of_products() / 4, rel=0.01)  # a ring rounds its sums besides


def test_rates_come_back_from_the_seconds_that_they_give():
    pairs = SHAPE.T * SHAPE.S / 2
    seconds = RATES.forward_s(SHAPE, pairs), RATES.backward_s(SHAPE, pairs)
    assert calibrated(PEAKS, SHAPE, seconds) == Rates(PEAKS, pytest.approx(6e14), pytest.approx(5e14))
