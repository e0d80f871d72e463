"""The harness' one option: `pytest tests/parity --layout "dp=2,zero=3"` runs that layout alone, all passes."""

import pytest
import torch

from tests.parity.layouts import DEFAULT_GRID, SLOW_GRID, Layout, forced, parse_layout


def pytest_addoption(parser):
    parser.addoption("--layout", default=None, help='one layout in place of the grid, for example "dp=2,zero=3"')


def pytest_collection_modifyitems(config, items):
    """A layout that was asked for is compared with the reference; the suite's own tests are left out."""
    if config.getoption("--layout", default=None) is not None:
        items[:] = [item for item in items if "layout" in getattr(item, "fixturenames", ())]


def pytest_generate_tests(metafunc):
    """`layout` runs over the grid, or over the one that was asked for."""
    if "layout" not in metafunc.fixturenames:
        return
    asked = metafunc.config.getoption("--layout", default=None)
    if asked is not None:
        chosen = [pytest.param(parse_layout(asked), id=asked)]
    else:
        chosen = [pytest.param(layout, id=layout.text) for layout in DEFAULT_GRID]
        chosen += [pytest.param(layout, id=layout.text, marks=pytest.mark.slow) for layout in SLOW_GRID]
    metafunc.parametrize("layout", chosen)


@pytest.fixture
def gpu_layout(layout) -> Layout:
    """The layout where there are GPUs for it; with fewer, its data strategy on one rank, forced."""
    available = torch.cuda.device_count()
    chosen = layout if 1 < layout.world_size <= available else forced(layout)
    if chosen.world_size > available:
        pytest.skip(f"{layout.text} needs {layout.world_size} GPUs, here are {available}")
    return chosen
