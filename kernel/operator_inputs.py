"""What the operations ask of their tensors before a launch, in one line each, and how a call reaches a kernel.

An eager call goes through a plain autograd.Function; torch.compile, FakeTensor and dispatch modes must see a node of
torch.library, whose Python layers cost an eager call some 300 us (docs/kernels.md).
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch.nn import Parameter

from configs.errors import UserError

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def is_traced(x: Tensor) -> bool:
    """Whether somebody must see an operator: torch.compile, a subclass (FakeTensor), or a mode of dispatch."""
    return torch.compiler.is_compiling() or type(x) not in (Tensor, Parameter) or _len_torch_dispatch_stack() > 0


def is_interpreted(kernel: Any) -> bool:
    """Whether Triton's interpreter runs this kernel, on CPU tensors (TRITON_INTERPRET=1 when it was imported)."""
    return type(kernel).__name__ == "InterpretedFunction"


def check_tensors(operation: str, kernel: Any, **tensors: Tensor | None) -> None:
    """Devices are one, and one the kernel runs on; dtypes are bfloat16, float16 or float32. Raises UserError."""
    given = {name: x for name, x in tensors.items() if x is not None}
    devices = {x.device for x in given.values()}
    if len(devices) > 1:
        places = ", ".join(f"{name} on {x.device}" for name, x in given.items())
        raise UserError(f"{operation}: {places} must lie on one device; move them together")
    if not (next(iter(devices)).type == "cuda" or is_interpreted(kernel)):
        place = devices.pop()
        raise UserError(
            f"{operation} needs a CUDA device, not {place}; use kernels.fused=false (or TRITON_INTERPRET=1)"
        )
    for name, x in given.items():
        if x.dtype not in FLOAT_DTYPES:
            raise UserError(f"{operation}: {name} of {x.dtype} must be bfloat16, float16 or float32; cast it")


def check_rows(operation: str, name: str, x: Tensor) -> None:
    """The last dimension is contiguous and the others flatten to rows of one stride. Raises UserError."""
    if x.numel() == 0:
        raise UserError(f"{operation}: {name} {tuple(x.shape)} is empty; skip the call")
    if not is_rows(x):
        raise UserError(f"{operation}: {name} with strides {x.stride()} must be rows of one stride; call .contiguous()")


def is_rows(x: Tensor) -> bool:
    """Whether x (..., C) can be read as (N, C) with a row stride and contiguous rows."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        return False
    expected = None
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if expected is not None and stride != expected:
            return False
        expected = stride * size
    return True


def row_stride(x: Tensor) -> int:
    """Elements between two rows of x (..., C), which check_rows has passed."""
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size > 1:
            return stride
    return x.shape[-1]


@cache
def num_processors(device_index: int | None) -> int:
    """Multiprocessors of a GPU; 2 in the interpreter, so that a test sees several programs."""
    if not torch.cuda.is_available():
        return 2
    return torch.cuda.get_device_properties(device_index).multi_processor_count
