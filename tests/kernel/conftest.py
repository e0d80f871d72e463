"""Without a GPU the kernels of this folder run in Triton's interpreter, chosen before any of them is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
