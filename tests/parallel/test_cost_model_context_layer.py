"""Traffic of a ring's sums beside a count over its blocks; memory of a layer beside live tensors of ranks."""

import pytest

from parallel.context_parallel_layout import ring_blocks
from parallel.cost_model_context_layer import backward_traffic, forward_traffic


def length(part: slice) -> int:
    return part.stop - part.start


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_traffic_of_sums_matches_a_count_over_the_blocks_of_all_ranks(ranks):
    rows, width, kv_width = 24, 4, 2
    forward = backward = delta = 0
    for rank in range(ranks):
        seen_rows, seen_chunks = 0, set()
        for block in ring_blocks(rows, ranks, rank):
            queries, keys = length(block.queries), length(block.keys)
            forward += 4 * width * (2 * queries if seen_rows else queries)
            backward += 4 * width * (2 * queries if seen_rows else queries) + 2 * 4 * kv_width * 2 * keys
            seen_rows += queries
            seen_chunks.add(block.queries.start)
        backward -= 2 * 4 * kv_width * rows  # of a rank's keys, the first block only writes
        delta += 2 * 2 * width * (rows // 2 if len(seen_chunks) == 2 else 0)
    elements = rows * width
    said = forward_traffic(ranks, rows, width)
    assert ranks * (said.hidden + 2 * elements) == forward and said.passes == 6 * elements
    said = backward_traffic(ranks, rows, width, kv_width)
    elements += 2 * rows * kv_width
    assert ranks * (said.hidden + 2 * elements) == backward
    assert ranks * (said.passes - 6 * elements) == pytest.approx(delta)
