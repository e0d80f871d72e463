"""What the pictures of positions show, read back from the axes, against formulas."""

import numpy as np
import pytest
import torch

from llm.args import ModelConfig
from llm.evaluation_context import ContextLoss
from llm.figures_positions import draw_context, draw_rope, rope_product
from llm.transformer import RoPE
from tests.tolerances import FP32_FORWARD, ROPE_COSINE


def test_rope_is_drawn_by_pair_and_position_of_this_model():
    model = ModelConfig(vocab_size=8, d_model=64, num_heads=4, head_dim=16, rope_theta=5e5)
    turns, products = draw_rope(model, 200).axes[:2]
    picture = turns.images[0].get_array()
    angles = np.outer(5e5 ** (-np.arange(0, 16, 2) / 16), np.arange(200))  # (pairs, positions)
    np.testing.assert_allclose(picture, np.cos(angles), atol=ROPE_COSINE)
    assert "theta 500,000, head_dim 16" in turns.get_title(loc="left")
    own = products.lines[0]
    distances = own.get_xdata()
    assert distances[0] == 1 and distances[-1] > 131_000
    expected = rope_product(RoPE(16, 5e5), 16, torch.from_numpy(distances[:5]))
    np.testing.assert_allclose(own.get_ydata()[:5], expected, atol=FP32_FORWARD)
    (window,) = [line for line in products.lines if line.get_label().endswith("200")]
    assert list(window.get_xdata()) == [200, 200]


def test_losses_by_position_and_by_context_stand_where_they_belong():
    near = [dict(first=0, last=0, loss=5.0), dict(first=1, last=2, loss=4.0), dict(first=3, last=7, loss=3.0)]
    far = [dict(first=0, last=0, loss=6.0), dict(first=8, last=15, loss=9.0)]
    by_context = [ContextLoss(1, 5.0, 0.0, 0.1), ContextLoss(2, 4.5, 0.5, 0.2), ContextLoss(4, 4.6, -0.1, 0.3)]
    position, context = draw_context(near, far, 8, by_context).axes
    by_label = {line.get_label(): line for line in position.lines}
    within = by_label["in training's windows"]
    assert within.get_xdata() == pytest.approx([1.0, np.sqrt(2 * 3), np.sqrt(4 * 8)]), "positions counted from 1"
    assert list(within.get_ydata()) == [5.0, 4.0, 3.0]
    assert list(by_label["in windows longer than training's"].get_ydata()) == [6.0, 9.0]
    assert context.lines[0].get_xydata().tolist() == [[1.0, 5.0], [2.0, 4.5], [4.0, 4.6]]
    notes = [(text.xy, text.get_text()) for text in context.texts]
    assert notes == [((2, 4.5), "-0.500\n\u00b10.200"), ((4, 4.6), "+0.100\n\u00b10.300")], "the change of the loss"


def test_without_longer_windows_there_is_no_second_curve():
    position, _ = draw_context([dict(first=0, last=7, loss=5.0)], [], 8, [ContextLoss(1, 5.0, 0.0, 0.1)]).axes
    assert len(position.lines) == 2  # the curve and the window's end
