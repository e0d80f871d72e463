"""The Muon update (Jordan et al. 2024): momentum, made nearly orthogonal by a Newton-Schulz iteration in bfloat16.

It follows torch.optim.Muon number for number. What differs: matrices of one shape go through one batched iteration on
a GPU, and a parameter (E, F, C) is a stack of E matrices.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

# Jordan's quintic: steep at zero, so that five iterations bring every singular value to about 0.7-1.2.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NORM_EPS = 1e-7
ADJUSTMENTS = ("original", "match_rms_adamw")


def muon_step(group: dict[str, Any], state: dict[Tensor, dict[str, Tensor]]) -> None:
    """Update the matrices of one group that have a gradient; state: momentum_buffer, at least float32.

    group["matrices"], where it is set, says how to get at whole matrices of which the parameters are parts.
    """
    params = [param for param in group["params"] if param.grad is not None]
    matrices = group.get("matrices", WholeMatrices())
    momentum = group["momentum"]
    for param in params:
        if not state[param]:
            dtype = torch.promote_types(param.dtype, torch.float32)
            state[param]["momentum_buffer"] = torch.zeros_like(param, dtype=dtype)
    buffers = [state[param]["momentum_buffer"] for param in params]
    gradients = [param.grad.to(buffer.dtype) for param, buffer in zip(params, buffers, strict=True)]
    if params:
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
    directions = torch._foreach_lerp(gradients, buffers, momentum) if params and group["nesterov"] else buffers
    directions = matrices.transform(params, directions, partial(orthogonalise_step, ns_steps=group["ns_steps"]))
    if params and group["weight_decay"]:
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
    for param, direction in zip(params, directions, strict=True):
        param.add_(direction, alpha=-group["lr"] * rate_adjustment(matrices.shape_of(param), group["adjust_lr"]))


class WholeMatrices:
    """The matrices of a group whose parameters are whole: themselves. A strategy that shards them puts its own here."""

    def shape_of(self, param: Tensor) -> torch.Size:
        """The full shape of the matrix of which `param` is a part."""
        return param.shape

    def transform(
        self, params: list[Tensor], tensors: list[Tensor], function: Callable[[list[Tensor]], list[Tensor]]
    ) -> list[Tensor]:
        """function of the full matrices of which `tensors` are the parts that belong to `params`, as parts again."""
        return function(tensors)


def rate_adjustment(shape: torch.Size, rule: str) -> float:
    """The factor on the rate of a (rows, columns) matrix.

    "original" is Jordan's sqrt(max(1, rows / columns)); "match_rms_adamw" is 0.2 sqrt(max(rows, columns)), which gives
    the update the size of AdamW's, so that both can share one rate (Liu et al. 2025, Muon is Scalable).
    """
    rows, columns = shape[-2:]
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def orthogonalise_step(matrices: list[Tensor], ns_steps: int) -> list[Tensor]:
    """orthogonalise_all as it is quickest where the matrices are."""
    return orthogonalise_all(matrices, ns_steps, batched=bool(matrices) and matrices[0].is_cuda)


def orthogonalise_all(matrices: list[Tensor], ns_steps: int, batched: bool) -> list[Tensor]:
    """Newton-Schulz of every matrix or stack; `batched` takes all of one shape at once (no gain on a CPU)."""
    by_shape = defaultdict(list)
    for index, matrix in enumerate(matrices):
        by_shape[matrix.shape if batched else index].append(index)
    results: list[Tensor] = list(matrices)
    for indices in by_shape.values():
        if len(indices) == 1:
            results[indices[0]] = newton_schulz(matrices[indices[0]], ns_steps)
            continue
        stacked = newton_schulz(torch.stack([matrices[index] for index in indices]), ns_steps)
        for index, result in zip(indices, stacked.unbind(), strict=True):
            results[index] = result
    return results


def newton_schulz(matrix: Tensor, ns_steps: int) -> Tensor:
    """The nearly orthogonal factor of (..., rows, columns), bfloat16: U S V^T with S near 1.

    X <- a X + (b A + c A^2) X with A = X X^T, on the wide side so that A is the smaller square.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrix.to(torch.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=NORM_EPS)  # spectral norm at most 1
    for _ in range(ns_steps):
        gram = x @ x.mT
        polynomial = add_matmul(gram, gram, gram, b, c)
        x = add_matmul(x, polynomial, x, a, 1.0)
    return x.mT if tall else x


def add_matmul(addend: Tensor, left: Tensor, right: Tensor, beta: float, alpha: float) -> Tensor:
    """beta * addend + alpha * left @ right with one rounding, for a matrix or any stack of them."""
    if addend.ndim == 2:
        return torch.addmm(addend, left, right, beta=beta, alpha=alpha)
    shape = addend.shape
    flat = [tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (addend, left, right)]
    return torch.baddbmm(*flat, beta=beta, alpha=alpha).reshape(shape)
