"""From our configs to the plain numbers of parallel/cost_model_context: what attention sends over the cp axis."""

from llm.args import TrainConfig
from llm.parallelize_context import multiple_of
from parallel.context_parallel_layout import padded_length
from parallel.cost_model_context import ContextShape
from parallel.cost_model_traffic import Param


def tokens_of_rank(config: TrainConfig, rows: int) -> int:
    """Tokens of so many sequences that one cp rank holds, padding included."""
    parallel = config.parallel
    if parallel.cp == 1:
        return rows * config.data.seq_len
    return rows * padded_length(config.data.seq_len, multiple_of(parallel.cp_mode, parallel.cp)) // parallel.cp


def context_shape(params: list[Param], config: TrainConfig) -> ContextShape:
    """What a rank with these parameters, those of its pipeline stages, sends."""
    model, parallel = config.model, config.parallel
    return ContextShape(
        ranks=parallel.cp,
        mode=parallel.cp_mode,
        heads=model.num_heads // parallel.tp,
        kv_heads=max(1, model.num_kv_heads // parallel.tp),
        head_dim=model.head_dim,
        layers=len({param.stage for param in params if param.in_block}),
        dtype="bfloat16" if config.dtype == "bfloat16" else params[0].dtype,
        recomputes=parallel.activation_checkpointing != "none",
    )
