"""Where parameters lie in shards and messages, from shapes alone."""

import torch
from torch import nn

from parallel.fsdp_layout import plan_unit


def test_rows_are_cut_evenly_and_the_last_ranks_get_less():
    shapes = {"rows": (7, 3), "vector": (2,), "number": ()}
    named = [(name, nn.Parameter(torch.empty(shape))) for name, shape in shapes.items()]
    layout = plan_unit(named, [torch.bfloat16, torch.float32, torch.float32], ranks=4)
    assert [place.name for place in layout.places] == ["vector", "number", "rows"]  # the wider dtype first
    vector, number, rows = layout.places
    assert (rows.rows, rows.block, rows.starts(4)) == (2, 6, (0, 6, 12, 18, 21))
    assert vector.starts(4) == (0, 1, 2, 2, 2) and number.starts(4) == (0, 1, 1, 1, 1)
    assert (layout.share, layout.gradient_share, layout.message_dtype) == (8, 8, torch.uint8)
    assert layout.slot_bytes == 32 and layout.split_sizes() == [4, 4, 12]  # 4 + 4 + 12 bytes, to a multiple of 16
    assert layout.ranges() == [(torch.float32, 0, 2, 0), (torch.bfloat16, 2, 8, 8)]
    assert all(place.full_offset % 256 == 0 for place in layout.places)


def test_frozen_parameters_have_no_place_among_the_gradients():
    frozen = nn.Parameter(torch.empty(4, 2), requires_grad=False)
    layout = plan_unit([("frozen", frozen), ("trained", nn.Parameter(torch.empty(4)))], [torch.float32] * 2, ranks=2)
    assert [place.gradient_offset for place in layout.places] == [-1, 0]
    assert (layout.share, layout.gradient_share) == (6, 2)
