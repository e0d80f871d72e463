"""Shared fixtures: where the optional real data lies, and one thread a test process.

Without a GPU kernels run in Triton's interpreter. That is chosen here, before any test module is imported: whoever
imports Triton first decides for the whole process, Triton's own library of functions included.
"""

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data beside the checkout; tests that need it skip where it is absent."""
    path = ROOT.parent / "shared" / "data"
    if not path.exists():
        pytest.skip("no ../shared/data here")
    return path
