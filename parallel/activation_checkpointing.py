"""Activation checkpointing (Chen et al. 2016): keep less of forward for backward, and compute the rest again there.

"full" keeps a block's input alone; "selective" keeps what is dear, the outputs of matrix products and attention, and
recomputes the cheap operations between them (Korthikanti et al. 2022 choose so by cost). Gradients are the same bits
either way: the recomputation runs the same operations on the same inputs. The model has no dropout, so no random state
is kept.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from configs.errors import check_choice

MODES = ("none", "selective", "full")
Checkpoint = Callable[..., Any]  # (function, *arguments) -> function(*arguments)

aten = torch.ops.aten
KEPT = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
KEPT_BY_NAME = ("mew::flash_attention_forward",)  # ours, registered only where Triton is


def keep_what_is_dear(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy of "selective" for one operation of the block."""
    name = getattr(operation, "_schema", None)
    if operation in KEPT or (name is not None and name.name in KEPT_BY_NAME):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def make_checkpoint(mode: str) -> Checkpoint | None:
    """What a block calls instead of its own computation, `run(function, *arguments)`; None for mode "none"."""
    check_choice("parallel.activation_checkpointing", mode, MODES)
    if mode == "none":
        return None
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if mode == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, keep_what_is_dear)
    return partial(checkpoint, **settings)
