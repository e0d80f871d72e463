"""Inputs of the kernels' tests; without a GPU they run in Triton's interpreter (tests/conftest.py)."""

import pytest
import torch


@pytest.fixture(autouse=True)
def random_inputs():
    """Fresh numbers in every run on a GPU; in the default suite always the same, since small samples scatter."""
    torch.seed() if torch.cuda.is_available() else torch.manual_seed(0)
