"""The only place that knows both the model and the strategies applied to it, from outside, in one fixed order.

Today: compile, then data parallelism. Later strategies find their place in DESIGN's order: convert, pp, tp + sp, ep,
cp, activation checkpointing, compile, then fsdp or ddp. Each keeps parameter names.
"""

import shutil
from collections.abc import Callable

import torch
from torch import Tensor, nn

from llm.data_loader import Batch
from llm.loss import CrossEntropyLoss, LossSums
from llm.transformer_context import make_context
from parallel.ddp import broadcast_parameters
from parallel.mesh import Mesh

ForwardLoss = Callable[[Batch], LossSums]


def can_compile(device: torch.device) -> bool:
    """On a CPU torch.compile needs a C++ compiler; on a GPU Triton brings its own."""
    return device.type == "cuda" or shutil.which("g++") is not None or shutil.which("clang++") is not None


def apply_compile(model: nn.Module, mode: str, device: torch.device) -> str:
    """Compile each block in place for mode "block"; returns the mode in force, "none" where there is no compiler."""
    if mode == "none":
        return mode
    if not can_compile(device):
        print(f"compile={mode}: no C++ compiler was found, so the run stays eager; install g++ to compile on a CPU")
        return "none"
    if mode == "block":
        for block in model.blocks.values():
            block.compile()
    return mode


def make_forward_loss(model: nn.Module, loss: CrossEntropyLoss, compile_mode: str) -> ForwardLoss:
    """The function from a batch to its loss sums, compiled as a whole for mode "model"."""

    def logits_and_loss(token_ids: Tensor, targets: Tensor, positions: Tensor | None, doc_ids: Tensor | None):
        return loss(model(token_ids, make_context(token_ids, positions, doc_ids)), targets)

    compiled = torch.compile(logits_and_loss) if compile_mode == "model" else logits_and_loss
    return lambda batch: compiled(batch.token_ids, batch.targets, batch.token_positions, batch.doc_ids)


def apply_data_parallel(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Start every rank from the same weights; gradients are synchronised by the training step."""
    broadcast_parameters(model, mesh)
    return model
