"""From our configs to the plain numbers of parallel/cost_model_pipeline: what a rank holds, and what crosses."""

from llm.args import TrainConfig
from llm.parallelize_pipeline import stage_pieces
from parallel.cost_model_pipeline import PipelineShape, known_schedule
from parallel.cost_model_traffic import Param, norm_dtype
from parallel.pipeline_schedules import Operation


def rank_params(params: list[Param], config: TrainConfig, pp_rank: int) -> list[Param]:
    """The parameters of the stages on one rank of the pp axis, in the model's order; a tied table is the first's."""
    parallel = config.parallel
    pieces = stage_pieces(config.model, config.data.seq_len, parallel.pp * parallel.pp_chunks)
    own = {piece for stage, part in enumerate(pieces) if stage % parallel.pp == pp_rank for piece in part}
    return [param for param in params if param.stage in own]


def pipeline_passes(
    config: TrainConfig, pp_rank: int, micro_batches: int
) -> tuple[tuple[Operation, ...], dict[int, range]]:
    """What a rank of the pp axis runs in a step, in order, and the pieces of each of its stages."""
    parallel = config.parallel
    schedule = known_schedule(parallel.pp_schedule, parallel.pp, micro_batches, parallel.pp_chunks)
    pieces = stage_pieces(config.model, config.data.seq_len, schedule.stages)
    return schedule.table[pp_rank], {stage: pieces[stage] for stage in schedule.stages_of(pp_rank)}


def pipeline_shape(params: list[Param], config: TrainConfig, micro_batch_tokens: list[int]) -> PipelineShape:
    """`params` are those of the whole model."""
    parallel, model = config.parallel, config.model
    table = next(param for param in params if param.name == "embedding.weight")
    lower = config.dtype == "bfloat16" and config.kernels.stream is not None
    return PipelineShape(
        ranks=parallel.pp,
        schedule=parallel.pp_schedule,
        chunks=parallel.pp_chunks,
        tokens=tuple(micro_batch_tokens),
        width=model.d_model,
        dtype=config.kernels.stream if lower else table.dtype,
        table_elements=table.numel if model.tie_embeddings else 0,
        table_dtype=table.dtype,
        table_learns=table.trainable,
        norm_dtype=norm_dtype(params),
    )
