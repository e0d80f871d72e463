"""What the scaling law's picture shows, read back from the axes, against the law that its points were made of."""

import numpy as np
import pytest

from llm.figures_scaling import draw_scaling
from llm.scaling_laws_fit import Fit, Point, ScalingLaw

LAW = ScalingLaw(E=1.8, A=210.0, alpha=0.45, B=560.0, beta=0.40)
OTHER = ScalingLaw(E=1.7, A=200.0, alpha=0.40, B=500.0, beta=0.45)
SIZES, TOKENS = (1e5, 4e5), (1e6, 3e6, 9e6)


def test_points_and_lines_are_the_fits_by_tokens_and_by_compute():
    points = [Point(f"n{n:.0e}", n, t, float(LAW.loss(n, t)) + 0.01) for n in SIZES for t in TOKENS]
    figure = draw_scaling(Fit(LAW, points, np.zeros(len(points)), {"n1e+05": OTHER}))
    by_tokens, by_compute, best = figure.axes
    for index, size in enumerate(SIZES):
        losses = [point.loss for point in points if point.parameters == size]
        for axes, scale in ((by_tokens, 1.0), (by_compute, 6.0 * size)):
            dots = np.asarray(axes.collections[index].get_offsets())
            np.testing.assert_allclose(dots, np.stack((np.array(TOKENS) * scale, losses), axis=1))
            x, y = axes.lines[index].get_data()
            np.testing.assert_allclose(y, LAW.loss(size, x / scale))
            assert axes.collections[index].get_label() == f"{size / 1e6:.2f}M"
    by_label = {line.get_label(): line for line in best.lines}
    for label, law in (("all runs", LAW), ("without one of the runs", OTHER)):
        budgets, sizes = by_label[label].get_data()
        np.testing.assert_allclose(sizes, law.best_parameters(budgets))
        assert (budgets[0], budgets[-1]) == pytest.approx((6 * 1e5 * 1e6, 6 * 4e5 * 9e6))
    assert "L = 1.80 + 210 / N^0.45 + 560 / D^0.40" in figure.get_suptitle()
