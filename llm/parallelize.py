"""The only place that knows both the model and the strategies applied to it, from outside, in one fixed order.

The order is: convert (kernels, LoRA), tp + sp, pp, ep, cp, activation checkpointing, compile, then fsdp or ddp; what is
not there yet is refused. Each keeps parameter names.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from configs.errors import UserError
from llm.args import ParallelConfig, TrainConfig
from llm.data_loader import Batch
from llm.lora import apply_lora, is_adapter
from llm.loss import CrossEntropyLoss, FusedCrossEntropyLoss, LossSums
from llm.loss_vocab import vocab_head
from llm.optimizer import build_optimizer
from llm.parallelize_context import ContextShards, apply_context
from llm.parallelize_pipeline import Pipeline, PipelineLayout, apply_deferral, apply_pipeline, pipeline_strategy
from llm.parallelize_strategy import Strategy
from llm.parallelize_tensor import apply_tensor, fill_parts, tensor_strategy
from llm.transformer_context import make_context
from llm.transformer_init import initialise_parameter, initialise_range
from llm.transformer_kernels import apply_kernels
from parallel.activation_checkpointing import make_checkpoint
from parallel.ddp import DataParallel, DdpSettings
from parallel.fsdp import FsdpSettings
from parallel.fsdp_init import apply_fsdp
from parallel.fsdp_pipeline import PipelinedFsdp
from parallel.mesh import Mesh
from parallel.sharded_optimizer import Zero1, Zero1Settings
from parallel.tensor_parallel import TensorLayout

ForwardLoss = Callable[..., LossSums]  # of a Batch; on a pipeline's last stage of its input states too


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


def make_forward_loss(
    model: nn.Module,
    loss: CrossEntropyLoss | FusedCrossEntropyLoss,
    compile_mode: str,
    shards: ContextShards | None = None,
) -> ForwardLoss:
    """The function from a batch to its loss sums, compiled as a whole for mode "model".

    With `shards` (Parallelized.shards) it takes what they have cut. A pipeline's last stage, whose model has no
    embedding, takes the states (B, T, C) of the stage before as a second argument.
    """
    context_of = make_context if shards is None else shards.make_context

    def logits_and_loss(
        token_ids: Tensor, targets: Tensor, positions: Tensor | None, doc_ids: Tensor | None, x: Tensor | None
    ) -> LossSums:
        ctx = context_of(token_ids, positions, doc_ids)
        ctx.token_ids = token_ids
        x = token_ids if x is None else x
        head = vocab_head(model, loss, targets)
        if head is not None:
            return model(x, ctx, head=head)
        if isinstance(loss, FusedCrossEntropyLoss):
            return model(x, ctx, head=lambda states, output: loss(states, output, targets))
        return loss(model(x, ctx), targets)

    compiled = torch.compile(logits_and_loss) if compile_mode == "model" else logits_and_loss

    def forward_loss(batch: Batch, states: Tensor | None = None) -> LossSums:
        return compiled(batch.token_ids, batch.targets, batch.token_positions, batch.doc_ids, states)

    return forward_loss


@dataclass
class Parallelized:
    """A model with every strategy applied, and what a training step needs beside it."""

    model: nn.Module
    optimizer: Any  # step(), zero_grad(), param_groups, state: a MixedOptimizer or one over shards
    strategy: Strategy
    compile: str  # the mode in force
    shards: ContextShards | None = None  # under context parallelism: cuts batches, makes their contexts
    pipeline: Pipeline | None = None  # under pipeline parallelism: runs the stages

    @property
    def head_model(self) -> nn.Module:
        """What make_forward_loss takes: the model, or a pipeline's last stage."""
        return self.model if self.pipeline is None else self.pipeline.head_model


def parallelize(model: nn.Module, config: TrainConfig, mesh: Mesh) -> Parallelized:
    """Apply what the config asks for to a model with its initial weights; UserError for what is not there.

    Under FSDP the model may be on the meta device: its shards are then drawn where they belong.
    """
    refuse_unknown(config.parallel)
    apply_kernels(model, config.kernels, mesh.device)
    convert(model, config)
    deferred = apply_deferral(model, config, mesh)
    # Before the stages, which then exchange parts of a tied table.
    tensor_layout = apply_tensor(model, config, mesh, deferred)
    stages = apply_pipeline(model, config, mesh, deferred)
    shards = apply_context(model, config, mesh)
    for block in model.blocks.values():
        block.checkpoint = make_checkpoint(config.parallel.activation_checkpointing)
    compile_mode = apply_compile(model, config.compile, mesh.device)
    data = apply_data_strategy(model, config, mesh, tensor_layout, stages)
    strategy = pipeline_strategy(data, stages)
    strategy = tensor_strategy(strategy, model, tensor_layout)
    fused = config.kernels.uses("optimizer")
    optimizer = strategy.shard_optimizer(build_optimizer(model.named_parameters(), config.optimizer, fused))
    autocast_dtype = torch.bfloat16 if config.dtype == "bfloat16" else None
    context_of = make_context if shards is None else shards.make_context
    keeper = data if isinstance(data, PipelinedFsdp) else None
    pipeline = None if stages is None else Pipeline(stages, strategy, autocast_dtype, context_of, keeper)
    return Parallelized(model, optimizer, strategy, compile_mode, shards, pipeline)


def convert(model: nn.Module, config: TrainConfig) -> None:
    """Adapters in place of full weights where the config asks for them, drawn by name as every parameter is."""
    apply_lora(model, config.lora)
    for name, parameter in model.named_parameters():
        if is_adapter(name) and not parameter.is_meta:
            initialise_parameter(name, parameter, config.seed, config.model.num_layers)


def refuse_unknown(config: ParallelConfig) -> None:
    if config.ep > 1:
        raise UserError(f"parallel.ep={config.ep} is not implemented yet; use parallel.ep=1")


def apply_data_strategy(
    model: nn.Module,
    config: TrainConfig,
    mesh: Mesh,
    tensor_layout: TensorLayout | None = None,
    stages: PipelineLayout | None = None,
) -> Strategy:
    """DDP for zero=0, ZeRO-1, or FSDP for zero=2 and 3; on a single rank that is not forced, DDP that does nothing."""
    parallel = config.parallel
    reduce_dtype = None if parallel.reduce_dtype is None else getattr(torch, parallel.reduce_dtype)
    bucket_bytes, first_bytes = (int(mb * 2**20) for mb in (parallel.bucket_mb, parallel.first_bucket_mb))
    if parallel.zero == 0 or not mesh.is_active("dp_cp"):
        ddp = DdpSettings(parallel.ddp_mode, bucket_bytes, first_bytes, reduce_dtype, transport=parallel.transport)
        return DataParallel(model, mesh, ddp)
    if parallel.zero == 1:
        zero1 = Zero1Settings(bucket_bytes, first_bytes, reduce_dtype, transport=parallel.transport)
        # A model that is compiled as a whole, and a pipeline's stages, have no place to wait for a block's parameters.
        late = config.compile != "model" and stages is None
        return Zero1(model, mesh, zero1, model.blocks.values() if late else ())
    if config.compile == "model":
        raise UserError(
            f"compile=model cannot see through the hooks of parallel.zero={parallel.zero}; use compile=block"
        )
    settings = FsdpSettings(
        reshard_after_forward=parallel.zero == 3,
        param_dtype=torch.bfloat16 if config.dtype == "bfloat16" else None,
        keep_dtype=is_kept_by_autocast,
        reduce_dtype=reduce_dtype,
        reduce_each_micro_batch=parallel.reduces_each_micro_batch,
    )
    fill = partial(initialise_range, seed=config.seed, num_layers=config.model.num_layers)
    fill, units = fill_parts(fill, tensor_layout), None if stages is None else stages.units()
    return apply_fsdp(model, mesh, settings, model.blocks.values(), fill, units)


def is_kept_by_autocast(name: str, param: Tensor) -> bool:
    """Norms and embeddings, which autocast computes with in float32; so gathering bfloat16 changes no result."""
    return param.ndim < 2 or name.startswith("embedding.")
