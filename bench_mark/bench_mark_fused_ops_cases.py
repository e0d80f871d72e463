"""The operations of the fused benchmark: shapes, inputs, and the industrial versions of each, all of one signature.

A contestant takes tensors that require gradients and returns the tensors to differentiate. Liger's kernels take part
where liger-kernel is installed (pip install -e '.[bench]').
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

from kernel import cost_model_fused as work
from kernel.cost_model import KernelWork
from kernel.rms_norm import rms_norm, rms_norm_reference
from kernel.rope import rope, rope_reference
from kernel.swiglu import swiglu, swiglu_reference

Operation = Callable[..., tuple[Tensor, ...]]
EPS = 1e-5
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """One operation at one shape: its inputs, what it must do, and who can do it."""

    name: str
    inputs: Callable[[], list[Tensor]]
    forward: KernelWork
    backward: KernelWork
    contestants: dict[str, Operation]


def leaf(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype).requires_grad_()


def compiled(operation: Operation) -> Operation:
    torch._dynamo.reset()  # else the shapes before this one count against its limit of recompilations
    return torch.compile(operation, dynamic=False)


def has_liger() -> bool:
    return find_spec("liger_kernel") is not None


def norm_case(N: int, C: int) -> Case:
    """Plain RMSNorm in bf16."""
    contestants: dict[str, Operation] = {
        "mew": lambda x, weight: rms_norm(x, weight, EPS)[:1],
        "torch": lambda x, weight: (F.rms_norm(x, (C,), weight, EPS),),
        "compile": compiled(lambda x, weight: (rms_norm_reference(x, weight, EPS)[0],)),
    }
    if has_liger():
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        contestants["liger"] = lambda x, weight: (LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False),)
    sizes = work.norm_forward(N, C, 2), work.norm_backward(N, C, 2)
    return Case(f"rms_norm {N}x{C}", lambda: [leaf(N, C), leaf(C)], *sizes, contestants)


def add_norm_case(N: int, C: int) -> Case:
    """Update in bf16 added to a float32 residual stream, normed into bf16: what a block does under autocast."""

    def plain(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        stream = x + residual
        return F.rms_norm(stream, (C,), weight, EPS).to(BF16), stream

    def reference(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return rms_norm_reference(x, weight, EPS, residual, BF16)

    contestants: dict[str, Operation] = {
        "mew": lambda x, residual, weight: rms_norm(x, weight, EPS, residual, BF16),
        "torch": plain,
        "compile": compiled(reference),
    }
    if has_liger():
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction as Liger

        contestants["liger"] = lambda x, residual, weight: Liger.apply(x, residual, weight, EPS, 0.0, "llama", False)
    sizes = work.norm_forward(N, C, 2, 4), work.norm_backward(N, C, 2, 4)
    fp32 = torch.float32
    inputs = lambda: [leaf(N, C), leaf(N, C, dtype=fp32), leaf(C, dtype=fp32)]  # noqa: E731
    return Case(f"add+rms_norm {N}x{C}", inputs, *sizes, contestants)


def rope_case(B: int, T: int, H: int, K: int, D: int) -> Case:
    angles = torch.randn(1, T, 1, D // 2, device="cuda").repeat(1, 1, 1, 2)
    tables = (angles.cos(), angles.sin())
    contestants: dict[str, Operation] = {
        "mew": lambda q, k: rope(q, k, tables),
        "torch": lambda q, k: rope_reference(q, k, tables),
        "compile": compiled(lambda q, k: rope_reference(q, k, tables)),
    }
    if has_liger():
        from liger_kernel.ops.rope import LigerRopeFunction

        cos, sin = (table[:, :, 0] for table in tables)
        contestants["liger"] = lambda q, k: LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    size = work.rope_pass(B * T, H + K, D, 2)
    return Case(f"rope {B}x{T} H{H}/{K} D{D}", lambda: [leaf(B, T, H, D), leaf(B, T, K, D)], size, size, contestants)


def swiglu_case(N: int, width: int) -> Case:
    contestants: dict[str, Operation] = {
        "mew": lambda gate, up: (swiglu(gate, up),),
        "torch": lambda gate, up: (swiglu_reference(gate, up),),
        "compile": compiled(lambda gate, up: (swiglu_reference(gate, up),)),
    }
    if has_liger():
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        contestants["liger"] = lambda gate, up: (LigerSiLUMulFunction.apply(gate, up),)
    sizes = work.swiglu_forward(N, width, 2), work.swiglu_backward(N, width, 2)
    return Case(f"swiglu {N}x{width}", lambda: [leaf(N, width), leaf(N, width)], *sizes, contestants)


CASES: list[Callable[[], Case]] = [
    lambda: norm_case(16_384, 2048),
    lambda: norm_case(32_768, 768),
    lambda: norm_case(16_384, 4096),
    lambda: norm_case(16_384 * 32, 64),
    lambda: add_norm_case(32_768, 768),
    lambda: add_norm_case(16_384, 2048),
    lambda: rope_case(4, 4096, 32, 8, 64),
    lambda: rope_case(32, 1024, 12, 12, 64),
    lambda: swiglu_case(16_384, 8192),
    lambda: swiglu_case(32_768, 2048),
]
