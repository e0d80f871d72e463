"""From our configs to the plain numbers of parallel/cost_model: a model's parameters and a run's layout.

The model is built on the meta device: its shapes are those of the real one, and no memory is taken.
"""

from itertools import pairwise

import torch
from torch import nn

from llm.args import ModelConfig, ParallelConfig, TrainConfig
from llm.lora import LoraConfig, apply_lora
from llm.optimizer import is_hidden_matrix
from llm.plan_shapes_context import context_shape, tokens_of_rank
from llm.plan_shapes_pipeline import pipeline_passes, pipeline_shape, rank_params
from llm.plan_shapes_tensor import tensor_cuts, tensor_messages
from llm.transformer import Transformer
from parallel.cost_model_context import context_messages
from parallel.cost_model_matrices import matrix_messages
from parallel.cost_model_pipeline import pipeline_messages
from parallel.cost_model_pipeline_fsdp import pipelined_fsdp_messages
from parallel.cost_model_tensor import cut_params
from parallel.cost_model_traffic import DataLayout, Message, Param, Traffic, step_messages, summed
from parallel.mesh_degrees import Degrees, known_groups


def meta_params(model: ModelConfig, optimizer: str = "adamw", lora: LoraConfig = LoraConfig()) -> list[Param]:
    """The parameters of a Transformer of this shape (vocab_size filled in) with its adapters, in registration order."""
    with torch.device("meta"):
        return params_of(apply_lora(Transformer(model), lora), optimizer)


def params_of(model: nn.Module, optimizer: str = "adamw") -> list[Param]:
    """The parameters of a built Transformer; tied ones once, at the place of the first."""
    layers = len(model.blocks)
    return [
        Param(
            name=name,
            shape=tuple(param.shape),
            stage=stage_of(name, layers),
            in_block=name.startswith("blocks."),
            dtype=str(param.dtype).removeprefix("torch."),
            trainable=param.requires_grad,
            matrix=optimizer == "muon" and is_hidden_matrix(name, param),
        )
        for name, param in model.named_parameters()
    ]


def stage_of(name: str, layers: int) -> int:
    """0 for the embedding, 1 .. layers for the blocks, layers + 1 for the last norm and the output layer."""
    if name.startswith("blocks."):
        return 1 + int(name.split(".")[1])
    return 0 if name.startswith("embedding.") else layers + 1


def data_layout(parallel: ParallelConfig, degrees: Degrees, micro_batches: int, dtype: str = "float32") -> DataLayout:
    """How the data ranks of these degrees share the model; `degrees` are resolved, dtype is that of the matmuls."""
    sharded = degrees.dp_shard * degrees.cp
    return DataLayout(
        replicate=degrees.dp_replicate,
        shard=sharded,
        zero=parallel.zero,
        bucketed=parallel.ddp_mode == "bucketed",
        bucket_bytes=int(parallel.bucket_mb * 2**20),
        first_bucket_bytes=int(parallel.first_bucket_mb * 2**20),
        reduce_dtype=parallel.reduce_dtype,
        param_dtype="bfloat16" if dtype == "bfloat16" and parallel.zero >= 2 else None,
        micro_batches=micro_batches,
        reduce_each_micro_batch=parallel.reduces_each_micro_batch,
        transport=parallel.transport,
    )


def rank_messages(
    params: list[Param], config: TrainConfig, world_size: int, micro_batches: int, rank: int = 0
) -> list[Message]:
    """Every collective that one rank takes part in during an optimizer step of a run with this config."""
    degrees = config.parallel.degrees().resolve(world_size)
    layout = data_layout(config.parallel, degrees, micro_batches, config.dtype)
    row = next(ranks for ranks in known_groups(degrees, "dp_shard_cp") if rank in ranks)
    place = row.index(rank)
    rows = config.global_batch_tokens // config.data.seq_len // degrees.dp
    bounds = [rows * index // micro_batches for index in range(micro_batches + 1)]
    counts = [tokens_of_rank(config, last - first) for first, last in pairwise(bounds)]
    activations: list[Message] = []
    if degrees.pp > 1:
        place_in_pipeline = next(ranks.index(rank) for ranks in known_groups(degrees, "pp") if rank in ranks)
        cut = config.parallel.tp if config.parallel.sequence_parallel else 1
        parts = cut_params(params, tensor_cuts(params, config))
        crossing = pipeline_shape(parts, config, [count // cut for count in counts])
        activations += pipeline_messages(crossing, place_in_pipeline)
        params = rank_params(params, config, place_in_pipeline)
    if degrees.cp > 1:
        activations += context_messages(context_shape(params, config), counts)
    if degrees.tp > 1:
        activations += tensor_messages(params, config, layout, place, counts)
        params = cut_params(params, tensor_cuts(params, config))
    if degrees.pp > 1 and layout.is_fsdp:
        passes = pipeline_passes(config, place_in_pipeline, micro_batches)
        data = pipelined_fsdp_messages(params, layout, *passes)
    else:
        data = step_messages(params, layout)
    return [*data, *matrix_messages(params, layout, place), *activations]


def predicted_traffic(
    params: list[Param], config: TrainConfig, world_size: int, micro_batches: int, rank: int = 0
) -> list[Traffic]:
    """What comm.jsonl will say of a step in which every trainable parameter has a gradient, but for the seconds."""
    return summed(rank_messages(params, config, world_size, micro_batches, rank))
