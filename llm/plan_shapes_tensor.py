"""From our configs to the plain numbers of parallel/cost_model_tensor: how a model is cut, and what crosses."""

import math
from collections.abc import Iterator
from functools import lru_cache

from llm.args import TrainConfig
from llm.parallelize_tensor import tensor_plan
from parallel.cost_model_matrices import (
    fsdp_held,
    fsdp_starts,
    iteration_cost,
    owners_of,
    zero1_held,
    zero1_starts,
)
from parallel.cost_model_tensor import (
    TensorCut,
    TensorShape,
    activation_messages,
    cut_params,
    gradient_messages,
)
from parallel.cost_model_traffic import DataLayout, Message, Param, trainable
from parallel.tensor_parallel import TensorSettings, placements_of


def tensor_cuts(params: list[Param], config: TrainConfig) -> dict[str, TensorCut]:
    """How each parameter is cut over the tp axis, by its full shape."""
    parallel = config.parallel
    settings = TensorSettings(config.model.num_kv_heads, parallel.sequence_parallel)
    named = tuple((param.name, param.shape) for param in params)
    return cuts_of(named, tuple(tensor_plan(config.model).items()), parallel.tp, settings)


@lru_cache(maxsize=64)
def cuts_of(
    named: tuple[tuple[str, tuple[int, ...]], ...],
    plan: tuple[tuple[str, str], ...],
    ranks: int,
    settings: TensorSettings,
) -> dict[str, TensorCut]:
    """A plan of a cluster asks for the same parameters again and again."""
    places = placements_of(named, dict(plan), ranks, settings)
    return {name: TensorCut(place.dim, place.parts, place.partial) for name, place in places.items()}


def tensor_shape(params: list[Param], config: TrainConfig) -> TensorShape:
    wide = params[0].dtype == "float64"
    dtype = "bfloat16" if config.dtype == "bfloat16" else params[0].dtype
    stream = config.kernels.stream if config.dtype == "bfloat16" and config.kernels.stream else params[0].dtype
    pairs = 1 if config.model.moe.num_experts else 2
    return TensorShape(
        ranks=config.parallel.tp,
        cut_by_tokens=config.parallel.sequence_parallel,
        width=config.model.d_model,
        blocks=(pairs,) * config.model.num_layers,
        dtype=dtype,
        stream_dtype=stream,
        statistics_dtype="float64" if wide else "float32",
        chunks=config.parallel.tp_chunks,
        recomputes=config.parallel.activation_checkpointing != "none",
        frozen_start=config.lora.rank > 0,
    )


def tensor_messages(
    params: list[Param], config: TrainConfig, layout: DataLayout, data_rank: int, micro_batch_tokens: list[int]
) -> Iterator[Message]:
    """The messages over the tp axis of a step; `params` of this rank's stages, in full, `data_rank` its place there."""
    cuts = tensor_cuts(params, config)
    params = cut_params(params, cuts)
    stages = {param.stage for param in params} | output_stage(params, config)
    messages = activation_messages(tensor_shape(params, config), micro_batch_tokens)
    yield from (message for message in messages if message.stage in stages)  # those that this rank runs
    held = held_elements(params, [param for param in params if cuts[param.name].partial], layout, data_rank)
    matrices = matrix_elements([p for p in params if cuts[p.name].dim is not None], params, layout, data_rank)
    yield from gradient_messages(params, cuts, config.parallel.tp, held, matrices)


def output_stage(params: list[Param], config: TrainConfig) -> set[int]:
    """The stage of the last norm and the output layer, where a rank has these."""
    last = config.model.num_layers + 1
    return {last} if any(param.name == "norm.weight" for param in params) else set()


def held_elements(params: list[Param], asked: list[Param], layout: DataLayout, data_rank: int) -> dict[str, int]:
    """Elements of each of the parameters asked for whose gradient this data rank ends up with."""
    if layout.zero == 0 or layout.ranks == 1:
        return {param.name: param.numel for param in asked}
    return zero1_held(params, layout, data_rank) if layout.zero == 1 else fsdp_held(asked, layout, data_rank)


def matrix_elements(cut: list[Param], params: list[Param], layout: DataLayout, data_rank: int) -> int:
    """Elements of the cut matrices that this data rank transforms (Muon)."""
    matrices = [param for param in trainable(params) if param.matrix]
    if not matrices:
        return 0
    if layout.zero and layout.shard > 1:
        starts = zero1_starts(params, layout) if layout.zero == 1 else fsdp_starts(params, layout)
        shared = [p for p in matrices if any(start % math.prod(p.shape[-2:]) for start in starts[p.name])]
        owners = owners_of([iteration_cost(param.shape) for param in shared], layout.shard)
        mine = {param.name for param, owner in zip(shared, owners, strict=True) if owner == data_rank}
        whole = [param for param in matrices if param not in shared]
        elements = {p.name: p.numel for p in shared if p.name in mine}
        elements |= {p.name: starts[p.name][data_rank + 1] - starts[p.name][data_rank] for p in whole}
    else:
        elements = {param.name: param.numel for param in matrices}
    return sum(count for name, count in elements.items() if any(param.name == name for param in cut))
