"""The two layers that dense and expert blocks share: Linear, whose matmul can be swapped, and SwiGlu."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Matmul = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def at_least_float32(x: Tensor) -> Tensor:
    """bfloat16 and float16 to float32, for sums that must not lose digits; float32 and float64 as they are."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class Linear(nn.Module):
    """x (..., in) -> x weight^T + bias (..., out); weight (out, in).

    `matmul(x, weight, bias)` is the seam for LoRA, FP8, tensor parallelism and deferred weight gradients.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.matmul: Matmul = F.linear

    def forward(self, x: Tensor) -> Tensor:
        return self.matmul(x, self.weight, self.bias)


def project_each(x: Tensor, layers: Sequence[Linear]) -> list[Tensor]:
    """The outputs of layers that read one input: the seam for a projection of all of them together."""
    return [layer(x) for layer in layers]


class SwiGlu(nn.Module):
    """down(silu(gate(x)) * up(x)): (..., C) -> (..., F) -> (..., C). Shazeer 2020, without biases.

    `activate(gate, up)` and `project(x, layers)` are seams for fused kernels.
    """

    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.gate_proj = Linear(d_model, d_ff)
        self.up_proj = Linear(d_model, d_ff)
        self.down_proj = Linear(d_ff, d_model)
        self.activate: Callable[[Tensor, Tensor], Tensor] = silu_times
        self.project: Callable[[Tensor, Sequence[Linear]], list[Tensor]] = project_each

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.project(x, (self.gate_proj, self.up_proj))
        return self.down_proj(self.activate(gate, up))


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up
