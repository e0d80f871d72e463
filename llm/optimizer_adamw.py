"""The AdamW update (Loshchilov & Hutter 2019) over many tensors at once, in float32 whatever the parameters are.

Only lists go through torch._foreach_*: on a GPU one launch an operation, and on a CPU bundles small enough that the
seven passes over a bundle find it in the cache.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# 2^18 elements of four float32 tensors are 4 MiB; half or twice as many were no quicker on the CPUs tried.
CPU_BUNDLE_ELEMENTS = 1 << 18


def adamw_step(group: dict[str, Any], state: dict[Tensor, dict[str, Tensor]]) -> None:
    """Update the parameters of one group that have a gradient; state: exp_avg, exp_avg_sq (fp32), step.

    `step` counts each parameter's own updates, since one without a gradient is skipped. A bfloat16 or float16
    parameter is updated in float32 and rounded once.
    """
    params = count_step(group, state)
    if not params:
        return
    weights = [param.to(working_dtype(param)) for param in params]  # the parameter itself when it is fp32
    columns = [
        weights,
        [param.grad.to(working_dtype(param)) for param in params],
        [state[param]["exp_avg"] for param in params],
        [state[param]["exp_avg_sq"] for param in params],
    ]
    steps = [state[param]["step"].item() for param in params]
    for tensors, bundle_steps in bundles(columns, steps):
        adamw_update(tensors, bundle_steps, group)
    for param, weight in zip(params, weights, strict=True):
        if weight is not param:
            param.copy_(weight)


def count_step(group: dict[str, Any], state: dict[Tensor, dict[str, Tensor]]) -> list[Tensor]:
    """The parameters of a group that have a gradient, with their state made and this step counted."""
    params = [param for param in group["params"] if param.grad is not None]
    for param in params:
        if not state[param]:
            state[param].update(
                step=torch.zeros((), dtype=torch.float32),
                exp_avg=torch.zeros_like(param, dtype=working_dtype(param)),
                exp_avg_sq=torch.zeros_like(param, dtype=working_dtype(param)),
            )
        state[param]["step"] += 1
    return params


def fused_adamw_step(
    group: dict[str, Any], state: dict[Tensor, dict[str, Tensor]], kernel: Any, gradient_scale: Tensor | None
) -> list[Tensor]:
    """The same update by kernel.adamw.FusedAdamW: one launch for all parameters of one dtype and count of steps.

    Returns the parameters that it counted a step for.
    """
    from kernel.adamw import AdamWRates

    alike: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
    counted = count_step(group, state)
    for param in counted:
        alike[param.dtype, param.grad.dtype, int(state[param]["step"].item())].append(param)
    for (_, _, step), params in alike.items():
        moments = tuple([state[param][key] for param in params] for key in ("exp_avg", "exp_avg_sq"))
        rates = AdamWRates(group["lr"], *group["betas"], group["eps"], group["weight_decay"], step)
        kernel.update(params, [param.grad for param in params], moments, rates, gradient_scale)
    return counted


def adamw_update(tensors: list[list[Tensor]], steps: list[float], group: dict[str, Any]) -> None:
    """One update of [weights, gradients, exp_avg, exp_avg_sq] in place; steps count from 1.

    w <- (1 - lr decay) w - lr m^ / (sqrt(v^) + eps), with both bias corrections folded into two numbers a tensor:
    the same as -lr c / (1 - beta1^t) * m / (sqrt(v) + eps c) where c = sqrt(1 - beta2^t).
    """
    weights, gradients, exp_avgs, exp_avg_sqs = tensors
    beta1, beta2 = group["betas"]
    corrections = [math.sqrt(1 - beta2**step) for step in steps]
    scales = [-group["lr"] * c / (1 - beta1**step) for c, step in zip(corrections, steps, strict=True)]
    if group["weight_decay"]:
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
    torch._foreach_lerp_(exp_avgs, gradients, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, gradients, gradients, 1 - beta2)
    denominators = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_add_(denominators, [group["eps"] * c for c in corrections])
    torch._foreach_addcdiv_(weights, exp_avgs, denominators, scales)


def working_dtype(param: Tensor) -> torch.dtype:
    """The dtype of the update and its state: at least float32."""
    return torch.promote_types(param.dtype, torch.float32)


def bundles(columns: list[list[Tensor]], steps: list[float]) -> Iterator[tuple[list[list[Tensor]], list[float]]]:
    """Cut parallel lists of tensors into bundles of at most CPU_BUNDLE_ELEMENTS; on a GPU one bundle holds all."""
    if columns[0][0].is_cuda:
        yield columns, steps
        return
    bundle, bundle_steps, size = [[] for _ in columns], [], 0
    for row, step in zip(zip(*columns, strict=True), steps, strict=True):
        for pieces in flat_pieces(row):
            if size and size + pieces[0].numel() > CPU_BUNDLE_ELEMENTS:
                yield bundle, bundle_steps
                bundle, bundle_steps, size = [[] for _ in columns], [], 0
            for column, piece in zip(bundle, pieces, strict=True):
                column.append(piece)
            bundle_steps.append(step)
            size += pieces[0].numel()
    yield bundle, bundle_steps


def flat_pieces(row: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    """Matching flat views of the tensors of one parameter; one with other strides stays whole."""
    if row[0].numel() <= CPU_BUNDLE_ELEMENTS or not all(tensor.is_contiguous() for tensor in row):
        return iter([row])
    return zip(*(tensor.view(-1).split(CPU_BUNDLE_ELEMENTS) for tensor in row), strict=True)
