"""Peak memory of a rank under any layout: under pipeline parallelism its table of operations is walked.

A forward pass leaves a stage's activations until its backward pass, and zero-bubble's W keeps the factors of its
products a while longer. So how much is held at once follows from the schedule, operation by operation.
"""

from collections.abc import Iterable

from llm.args import TrainConfig
from llm.cost_model_counts import block_matrices, output_matrix
from llm.cost_model_memory import (
    CUDA_WORKSPACE_BYTES,
    batch_bytes,
    block_backward_bytes,
    head_activation_bytes,
    matmul_bytes,
    optimizer_scratch_bytes,
    stream_bytes,
)
from llm.plan_memory import RankMemory, activation_bytes, moments_of, rank_memory
from llm.plan_memory_graphs import graphed_memory
from llm.plan_memory_passes import ShardedPasses, StageBytes, WholePasses
from llm.plan_rank import RankShare, place_in_pipeline, rank_share
from parallel.cost_model_memory import rank_state
from parallel.cost_model_pipeline import known_schedule
from parallel.cost_model_traffic import Param
from parallel.pipeline_schedules import BACKWARD, FORWARD, INPUT, WEIGHT, Operation


def layout_memory(config: TrainConfig, params: list[Param], device: str, world_size: int, rank: int = 0) -> RankMemory:
    """Bytes of one optimizer step on rank `rank`; `params` are the whole model's, config is resolved."""
    share, parallel = rank_share(config, params, device, world_size, rank), config.parallel
    if parallel.pp == 1:
        return rank_memory(share.work, list(share.params), share.layout, parallel.activation_checkpointing)
    place = place_in_pipeline(parallel.degrees().resolve(world_size), rank)
    count = share.layout.micro_batches
    schedule = known_schedule(parallel.pp_schedule, parallel.pp, count, parallel.pp_chunks)
    stages = {chunk * parallel.pp + place: pieces for chunk, pieces in enumerate(share.stages)}
    sizes = {stage: stage_bytes(config, share, pieces) for stage, pieces in stages.items()}
    copied = copy_of_table(config, share)
    if config.kernels.cuda_graph:
        return graphed_memory(share, schedule.table[place], sizes, copied)
    if share.layout.is_fsdp and share.layout.ranks > 1:
        passes = ShardedPasses(list(share.params), share.layout, schedule.table[place], stages, copied)
    else:
        passes = WholePasses(list(share.params), copied)
    return pipeline_memory(share, schedule.table[place], sizes, passes, copied)


def stage_bytes(config: TrainConfig, share: RankShare, pieces: range) -> StageBytes:
    work, layers = share.work, config.model.num_layers
    N, e = work.tokens, matmul_bytes(work)
    blocks = sum(1 <= piece <= layers for piece in pieces)
    has_head = layers + 1 in pieces
    block, kept, _ = activation_bytes(work, share.layout, config.parallel.activation_checkpointing)
    boundary = int(work.stream_tokens * work.model.d_model * stream_bytes(work))
    logits = N * work.model.vocab_size * e if has_head and not work.fuses("loss") else 0
    products = block_matrices(work.model)
    factors = sum(m.calls * (m.outputs + (0 if m.name in SHARED_INPUT else m.inputs)) for m in products)
    factors *= blocks * N * e
    if logits:
        factors += N * e * (output_matrix(work.model).inputs + work.model.vocab_size)
    # What the head keeps is not there yet when the last block runs forward, and gone when it runs backward.
    after = head_activation_bytes(work) + logits if has_head else boundary
    again = block - kept if blocks else 0
    return StageBytes(
        blocks=blocks,
        of_block=kept if blocks else 0,
        after=after,
        factors=factors,
        forward=max(0, again - after) + boundary,
        logits=logits,
        widest=again + block_backward_bytes(work) - (after if has_head else 0) if blocks else 0,
        boundary=boundary,
    )


SHARED_INPUT = ("k_proj", "v_proj", "up_proj")  # read what another product has kept already


def pipeline_memory(
    share: RankShare,
    row: Iterable[Operation],
    sizes: dict[int, StageBytes],
    passes: WholePasses | ShardedPasses,
    copied: int,
) -> RankMemory:
    """Walk one rank's operations; the update is as without a pipeline. `copied`: bytes of a tied table's copy."""
    work, layout, params = share.work, share.layout, list(share.params)
    state = rank_state(params, layout, moments_of(params, work.optimizer))
    base = state.held + layout.micro_batches * batch_bytes(work)
    base += CUDA_WORKSPACE_BYTES if work.device == "cuda" else 0
    base += copied
    held = most = 0
    phase_peaks = {"forward": 0, "backward": 0}
    for op in row:
        size = sizes[op.stage]
        phase = "forward" if op.kind == FORWARD else "backward"
        phase_peaks[phase] = max(phase_peaks[phase], held + passes.during(op, size))
        goes = {FORWARD: -size.kept, BACKWARD: size.kept, INPUT: size.kept - size.factors, WEIGHT: size.factors}
        held -= goes[op.kind]
        most = max(most, held)
        passes.end(op)
    phases = {name: base + value for name, value in phase_peaks.items()}
    phases["sums over data ranks"] = base + passes.at_the_end(state)
    scratch = optimizer_scratch_bytes(work) // (layout.shard if layout.zero else 1)
    phases["optimizer"] = base + state.gradients + scratch
    logits = work.tokens * work.model.vocab_size * matmul_bytes(work) if work.part.has_head else 0
    return RankMemory(state, most, logits, phases)


def copy_of_table(config: TrainConfig, share: RankShare) -> int:
    """Of a tied table, on the last rank, which has no parameter of it."""
    part, model = share.work.part, share.work.model
    return (
        4 * model.vocab_size * model.d_model if model.tie_embeddings and part.has_head and not part.has_embedding else 0
    )
