"""Peak memory of a pipeline rank whose operations are CUDA graphs (parallel/pipeline_parallel_graph).

Each place keeps all that its operations ever need, and gradients lie in buffers for good, so the update finds all of it
there. What torch counts as allocated leaves out what a capture has freed again: look at what is reserved.
"""

from collections.abc import Iterable

from llm.cost_model_counts import Workload
from llm.cost_model_memory import (
    BF16,
    CUDA_WORKSPACE_BYTES,
    FP32,
    batch_bytes,
    block_parameters,
    loss_bytes,
    matmul_bytes,
    optimizer_scratch_bytes,
)
from llm.plan_memory import RankMemory, moments_of
from llm.plan_memory_passes import StageBytes
from llm.plan_rank import RankShare
from parallel.cost_model_memory import rank_state
from parallel.pipeline_parallel_graph import assign_places
from parallel.pipeline_schedules import Operation


def graphed_memory(share: RankShare, row: Iterable[Operation], sizes: dict[int, StageBytes], copied: int) -> RankMemory:
    """`row`: the rank's operations; `sizes` by stage; `copied`: bytes of a tied table's copy."""
    work, layout, params = share.work, share.layout, list(share.params)
    state = rank_state(params, layout, moments_of(params, work.optimizer))
    _, counts = assign_places(row)
    places = sum(count * place_bytes(work, stage, sizes) for stage, count in counts.items())
    gradients = sum(param.nbytes for param in params if param.trainable) + copied
    base = state.held + layout.micro_batches * batch_bytes(work) + copied
    base += cast_bytes(work) + (CUDA_WORKSPACE_BYTES if work.device == "cuda" else 0)
    scratch = optimizer_scratch_bytes(work) // (layout.shard if layout.zero else 1)
    phases = {
        "backward": base + gradients + places,
        "sums over data ranks": base + gradients + places + state.in_flight_last,
        "optimizer": base + gradients + places + scratch,
    }
    return RankMemory(state, places, 0, phases)


def cast_bytes(work: Workload) -> int:
    """The matrices in bfloat16, made once a step; a fused loss casts the output layer's itself."""
    if work.dtype != "bfloat16":
        return 0
    return BF16 * (work.layers * block_parameters(work.model) + (0 if work.fuses("loss") else work.output_elements))


def place_bytes(work: Workload, stage: int, sizes: dict[int, StageBytes]) -> int:
    """One place of a stage: its output's gradient, and the most that its graphs have at once, its input included.

    Factors of weight gradients stay until their products, so the feed-forward's is still there when its two inputs'
    gradients are made from its own.
    """
    model, size, N, e = work.model, sizes[stage], work.tokens, matmul_bytes(work)
    has_head, has_embedding = work.part.has_head and stage == max(sizes), stage == 0
    table = FP32 * model.vocab_size * model.d_model
    widest = N * (3 * e * model.d_ff + (e * model.d_model if e == BF16 else 0)) if size.blocks else 0
    fixed = 0 if has_head else size.boundary  # what comes in is the first block's input, which is in `kept`
    if not has_head:
        end = size.factors + table if has_embedding else 0  # the table's gradient comes last
        return fixed + max(size.kept + max(size.forward, widest), end)
    if not work.fuses("loss"):
        return fixed + size.kept + max(loss_bytes(work) - size.logits, widest)
    gradients = table + N * e * model.d_model  # of the output layer and its input: a fused loss makes them in forward
    return fixed + size.kept + gradients + max(loss_bytes(work) - gradients, widest)
