"""Peak memory of a pipeline rank whose operations are CUDA graphs (parallel/pipeline_parallel_graph).

Each place keeps all that its operations ever need, and gradients lie in buffers for good, so the update finds all of it
there. What torch counts as allocated leaves out what a capture has freed again: look at what is reserved.
"""

from collections.abc import Iterable
from typing import Any

from llm.cost_model_memory import (
    CUDA_WORKSPACE_BYTES,
    batch_bytes,
    block_parameters,
    loss_bytes,
    matmul_bytes,
    optimizer_scratch_bytes,
)
from llm.plan_memory import RankMemory, moments_of
from llm.plan_rank import RankShare
from parallel.cost_model_memory import rank_state
from parallel.pipeline_parallel_graph import assign_places
from parallel.pipeline_schedules import Operation


def graphed_memory(share: RankShare, row: Iterable[Operation], sizes: dict[int, Any], copied: int) -> RankMemory:
    """`row`: the rank's operations; `sizes`: StageBytes by stage; `copied`: bytes of a tied table's copy."""
    work, layout, params = share.work, share.layout, list(share.params)
    state = rank_state(params, layout, moments_of(params, work.optimizer))
    _, counts = assign_places(row)
    last = max(sizes)
    places = 0
    for stage, count in counts.items():
        size = sizes[stage]
        passes = max(size.forward, size.backward) + (loss_bytes(work) if stage == last else 0)
        places += count * (size.kept + passes + 3 * size.boundary)  # input, gradient, gradient of the input
    casts = matmul_bytes(work) * work.layers * block_parameters(work.model) if work.dtype == "bfloat16" else 0
    gradients = sum(param.nbytes for param in params if param.trainable) + copied
    base = state.weights + state.optimizer + layout.micro_batches * batch_bytes(work) + copied
    base += casts + (CUDA_WORKSPACE_BYTES if work.device == "cuda" else 0)
    scratch = optimizer_scratch_bytes(work) // (layout.shard if layout.zero else 1)
    phases = {
        "backward": base + gradients + places,
        "sums over data ranks": base + gradients + places + state.in_flight_last,
        "optimizer": base + gradients + places + scratch,
    }
    return RankMemory(state, places, 0, phases)
