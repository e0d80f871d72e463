"""Without a GPU the kernels of this folder run in Triton's interpreter, chosen before any of them is imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def random_inputs():
    """Fresh numbers in every run on a GPU; in the default suite always the same, since small samples scatter."""
    torch.seed() if torch.cuda.is_available() else torch.manual_seed(0)
