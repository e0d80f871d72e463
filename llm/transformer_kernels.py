"""Puts the fused kernels of kernel/ into a model's seams: apply_kernels(model, kernels, device) -> model.

Parameters, names and results stay; what changes is the number of passes over memory (docs/fused_operations.md). Under
autocast a fused norm writes what the projections read, so that no cast of its own follows; the plain norm's result in
float32 is rounded to the same numbers by each projection.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configs.errors import UserError
from llm.args import KernelsConfig
from llm.loss import CrossEntropyLoss, FusedCrossEntropyLoss
from llm.moe import MixtureOfExperts
from llm.transformer import (
    Embedding,
    MultiHeadAttention,
    MultiHeadAttentionWithRoPE,
    RmsNorm,
    Rope,
    TransformerBlock,
)
from llm.transformer_layers import Linear, SwiGlu
from llm.transformer_linear import linear, project_side_by_side, project_together

OPERATIONS = ("embedding", "norm", "rope", "swiglu", "linear", "loss", "optimizer")


def check_kernels(kernels: KernelsConfig, device: torch.device) -> None:
    """Refuse fused kernels where they cannot run, before anything is built on them."""
    if not any(kernels.uses(operation) for operation in OPERATIONS):
        return
    try:
        from kernel.operator_inputs import is_interpreted
        from kernel.rms_norm_kernels import norm_forward_kernel
    except ImportError as error:
        raise UserError(f"kernels.fused=true needs Triton ({error}); install it, or use kernels=plain") from error
    if device.type != "cuda" and not is_interpreted(norm_forward_kernel):
        raise UserError(f"kernels.fused=true needs a CUDA device, not {device}; use kernels=plain")


def apply_kernels(model: nn.Module, kernels: KernelsConfig, device: torch.device) -> nn.Module:
    """Swap the seams of every module that `kernels` names, in place; UserError where the kernels cannot run."""
    check_kernels(kernels, device)
    for module in model.modules():
        if isinstance(module, RmsNorm) and kernels.uses("norm"):
            module.normalise = fused_normalise
        if isinstance(module, MultiHeadAttentionWithRoPE) and kernels.uses("rope"):
            module.rotate = fused_rotate
        if isinstance(module, SwiGlu) and kernels.uses("swiglu"):
            module.activate = fused_activate
        if kernels.uses("linear"):
            join_projections(module)
        if isinstance(module, Embedding) and kernels.uses("embedding"):
            module.lookup = fused_lookup
        if isinstance(module, Embedding) and kernels.stream is not None:
            module.stream_dtype = getattr(torch, kernels.stream)
    for module in model.modules():
        if isinstance(module, TransformerBlock) and kernels.uses("norm"):
            module.defers_sum = True  # the next norm adds as it reads
            if isinstance(module.ffn, MixtureOfExperts):
                # Experts' outputs are summed in the dtype of their input, which must stay the residual stream's.
                module.ffn_norm.normalise = partial(fused_normalise, keep_dtype=True)
    return model


def join_projections(module: nn.Module) -> None:
    """Projections of one input together; every other Linear of a block as a group of one."""
    if isinstance(module, MultiHeadAttention):
        module.project = project_together
    if isinstance(module, SwiGlu):
        module.project = project_side_by_side
    if isinstance(module, Linear) and module.matmul is F.linear:
        module.matmul = linear


def make_loss(kernels: KernelsConfig, z_loss: float) -> CrossEntropyLoss | FusedCrossEntropyLoss:
    """The loss that make_forward_loss takes."""
    if kernels.uses("loss"):
        return FusedCrossEntropyLoss(z_loss=z_loss, chunk_bytes=kernels.loss_chunk_mb << 20)
    return CrossEntropyLoss(z_loss=z_loss)


def fused_lookup(token_ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    from kernel.embedding import embedding

    return embedding(token_ids, weight, dtype)


def fused_normalise(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, keep_dtype: bool = False
) -> tuple[Tensor, Tensor]:
    from kernel.rms_norm import rms_norm

    stream_dtype = x.dtype if residual is None else residual.dtype
    autocast = torch.is_autocast_enabled(x.device.type) and not keep_dtype
    return rms_norm(x, weight, eps, residual, torch.get_autocast_dtype(x.device.type) if autocast else stream_dtype)


def fused_rotate(q: Tensor, k: Tensor, tables: Rope) -> tuple[Tensor, Tensor]:
    from kernel.rope import rope

    return rope(q, k, tables)


def fused_activate(gate: Tensor, up: Tensor) -> Tensor:
    from kernel.swiglu import swiglu

    return swiglu(gate, up)
