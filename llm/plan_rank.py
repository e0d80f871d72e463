"""What one rank of a layout computes and holds: the model's widths, tokens, layers and parameters that fall to it.

Tensor parallelism makes matrices narrower, context parallelism sequences shorter, pipeline parallelism models
shallower. So a rank's work is a Workload of a smaller model, and the cost models of one device count it.
"""

from dataclasses import dataclass, replace

from llm.args import ModelConfig, TrainConfig
from llm.cost_model_counts import RankPart, Workload, workload_of
from llm.parallelize_context import multiple_of
from llm.parallelize_pipeline import stage_pieces
from llm.plan_shapes import data_layout
from llm.plan_shapes_pipeline import rank_params
from llm.plan_shapes_tensor import tensor_cuts
from parallel.context_parallel_layout import padded_length
from parallel.cost_model_tensor import cut_params
from parallel.cost_model_traffic import DataLayout, Param
from parallel.mesh_degrees import Degrees, known_groups
from parallel.pipeline_schedules import SPLIT_SCHEDULES


@dataclass(frozen=True)
class RankShare:
    """One rank's part of an optimizer step."""

    work: Workload
    params: tuple[Param, ...]  # as the rank holds them, before a data strategy shards them
    layout: DataLayout
    stages: tuple[range, ...] = ()  # of a pipeline: the pieces of each of its stages, in their order


def rank_share(config: TrainConfig, params: list[Param], device: str, world_size: int, rank: int = 0) -> RankShare:
    """The part of rank `rank`; `params` are the whole model's, config is resolved, device is "cpu" or "cuda"."""
    degrees = config.parallel.degrees().resolve(world_size)
    work = replace(workload_of(config, device, degrees.dp), world_size=degrees.dp * degrees.cp)
    layout = data_layout(config.parallel, degrees, work.grad_accum_steps, work.dtype)
    part, stages = RankPart(), ()
    if degrees.pp > 1:
        place = place_in_pipeline(degrees, rank)
        stages = tuple(stages_of(config, place))
        graphed, splits = config.kernels.cuda_graph, config.parallel.pp_schedule in SPLIT_SCHEDULES
        adds = graphed or (splits and degrees.dp * degrees.cp == 1 and not config.parallel.force)
        part = replace(part, **pieces_of(stages, config.model.num_layers), adds_in_products=adds, casts_once=graphed)
        params = rank_params(params, config, place)
        if graphed or splits:  # their split products join layers of one input
            work = replace(work, kernels=replace(work.kernels, linear=True))
    if degrees.cp > 1:
        multiple = multiple_of(config.parallel.cp_mode, degrees.cp)
        work = replace(work, seq_len=padded_length(work.seq_len, multiple))
        part = replace(part, context_ranks=degrees.cp, context_mode=config.parallel.cp_mode)
    if degrees.tp > 1:
        params = cut_params(params, tensor_cuts(params, config))
        stream = degrees.tp if config.parallel.sequence_parallel else 1
        part = replace(part, tensor_ranks=degrees.tp, stream_ranks=stream, tensor_chunks=config.parallel.tp_chunks)
        work = replace(work, model=narrowed(work.model, degrees.tp))
    return RankShare(replace(work, part=part), tuple(params), layout, stages)


def place_in_pipeline(degrees: Degrees, rank: int) -> int:
    return next(ranks.index(rank) for ranks in known_groups(degrees, "pp") if rank in ranks)


def stages_of(config: TrainConfig, place: int) -> list[range]:
    """The pieces of each stage on one rank of the pp axis: 0 the embedding, 1 .. L the blocks, L + 1 the head."""
    parallel = config.parallel
    return stage_pieces(config.model, config.data.seq_len, parallel.pp * parallel.pp_chunks)[place :: parallel.pp]


def pieces_of(stages: tuple[range, ...], layers: int) -> dict[str, int | bool]:
    """Of a RankPart: blocks, and which ends are there."""
    pieces = [piece for stage in stages for piece in stage]
    blocks = sum(1 <= piece <= layers for piece in pieces)
    return {"layers": blocks, "has_embedding": 0 in pieces, "has_head": layers + 1 in pieces}


def narrowed(model: ModelConfig, ranks: int) -> ModelConfig:
    """The widths of one rank's matrices; experts stay whole, a vocabulary that does not divide is padded."""
    return replace(
        model,
        num_heads=model.num_heads // ranks,
        num_kv_heads=max(1, model.num_kv_heads // ranks),
        d_ff=model.d_ff if model.moe.num_experts else model.d_ff // ranks,
        vocab_size=-(-model.vocab_size // ranks),
    )
