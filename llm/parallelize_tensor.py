"""Tensor parallelism of our Transformer: the plan, what the degree must divide, and initial weights of parts.

The plan is a dict from modules to styles (parallel/tensor_parallel.py). Attention is cut by heads and the feed-forward
by its hidden width, so that a block needs one sum after each; experts stay whole and see this rank's tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configs.errors import UserError
from llm.args import ModelConfig, TrainConfig
from llm.transformer_linear import linear
from parallel.mesh import Mesh
from parallel.pipeline_parallel_backward import DeferredGradients
from parallel.tensor_parallel import Plan, TensorLayout, TensorSettings, apply_tensor_parallel
from parallel.tensor_parallel_strategy import TensorParallel

Fill = Callable[[str, tuple[int, ...], int, Tensor], None]
ENDS: Plan = {"embedding": "vocab", "norm": "last", "output": "vocab"}
ATTENTION: Plan = {
    "blocks.*.attention.q_proj": "column",
    "blocks.*.attention.k_proj": "kv",
    "blocks.*.attention.v_proj": "kv",
    "blocks.*.attention.o_proj": "row",
}
HEAD_NORMS: Plan = {"blocks.*.attention.q_norm": "heads", "blocks.*.attention.k_norm": "heads"}
FEED_FORWARD: Plan = {
    "blocks.*.ffn.gate_proj": "column",
    "blocks.*.ffn.up_proj": "column",
    "blocks.*.ffn.down_proj": "row",
}


def tensor_plan(config: ModelConfig) -> Plan:
    """The styles of a whole model's modules."""
    plan = ENDS | ATTENTION
    if config.qk_norm:
        plan |= HEAD_NORMS
    return plan if config.moe.num_experts else plan | FEED_FORWARD


def check_tensor(config: TrainConfig) -> None:
    """UserError where parallel.tp does not divide what it has to."""
    model, tp = config.model, config.parallel.tp
    if model.num_heads % tp:
        raise UserError(
            f"parallel.tp={tp} must divide num_heads={model.num_heads}; use one of {divisors(model.num_heads)}"
        )
    if model.num_kv_heads % tp and tp % model.num_kv_heads:
        raise UserError(
            f"parallel.tp={tp} must divide num_kv_heads={model.num_kv_heads} or be a multiple of it; "
            f"use one of {divisors(model.num_kv_heads)}"
        )
    if not model.moe.num_experts and model.d_ff % tp:
        raise UserError(
            f"parallel.tp={tp} must divide d_ff={model.d_ff}; change model.d_ff to {-(-model.d_ff // tp) * tp}"
        )
    tokens = config.data.seq_len // config.parallel.cp
    pieces = tp * config.parallel.tp_chunks
    if config.parallel.sequence_parallel and tokens % pieces:
        raise UserError(
            f"parallel.tp={tp} x tp_chunks={config.parallel.tp_chunks} must divide the {tokens} tokens of a sequence "
            f"that a rank holds under parallel.sequence_parallel=true; change data.seq_len or set "
            f"parallel.sequence_parallel=false and parallel.tp_chunks=1"
        )


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def apply_tensor(
    model: nn.Module, config: TrainConfig, mesh: Mesh, deferred: DeferredGradients | None = None
) -> TensorLayout | None:
    """Cut the model over the tp axis, in place; None, with nothing done, where that axis has one rank.

    `deferred` is what stands in the products under a pipeline whose backward is split.
    """
    if not mesh.is_active("tp"):
        return None
    check_tensor(config)
    present = {name for name, _ in model.named_modules()}
    plan = {name: style for name, style in tensor_plan(config.model).items() if name not in ENDS or name in present}
    parallel = config.parallel
    plain, later = (F.linear, linear), None
    if deferred is not None:
        plain, later = (*plain, deferred.matmul), deferred.put_aside
    settings = TensorSettings(
        config.model.num_kv_heads, parallel.sequence_parallel, parallel.tp_chunks, plain, later=later
    )
    return apply_tensor_parallel(model, plan, mesh, settings)


def tensor_strategy(inner: Any, model: nn.Module, layout: TensorLayout | None) -> Any:
    """The data strategy, which under tensor parallelism has parts where one device has parameters."""
    return inner if layout is None else TensorParallel(inner, model, layout)


def fill_parts(fill: Fill, layout: TensorLayout | None) -> Fill:
    """From a function that writes elements of a full parameter, the one that writes elements of this rank's part."""
    if layout is None:
        return fill

    def fill_part(name: str, shape: tuple[int, ...], start: int, flat: Tensor) -> None:
        place = layout.placements[name]
        if place.dim is None:
            fill(name, shape, start, flat)
            return
        (offsets, sizes), full = place.box(layout.rank), place.shape
        width = flat.new_empty(sizes[1:]).numel()  # of a row here
        full_width = flat.new_empty(full[1:]).numel()
        first, last = start // width, min(-(-(start + flat.numel()) // width), sizes[0])
        flat.zero_()  # padding past the last row
        if last <= first:
            return
        rows = torch.empty((last - first) * full_width, dtype=flat.dtype)
        fill(name, full, (offsets[0] + first) * full_width, rows)
        rows = rows.view(last - first, *full[1:])
        if place.dim > 0:
            rows = rows.narrow(place.dim, offsets[place.dim], sizes[place.dim])
        skipped = start - first * width
        part = rows.reshape(-1)[skipped : skipped + flat.numel()]
        flat[: part.numel()].copy_(part)

    return fill_part
