"""Peak memory of one rank: the model's activations beside what parallel/cost_model_memory says of its states.

Phases as in llm/cost_model_memory, for any data layout: the end of forward, backward through the last and the first
block, the embedding, the update. Activation checkpointing keeps a block's input, and if selective the outputs of its
matrix products and attention, and makes the rest again.
"""

from dataclasses import dataclass

from llm.cost_model_counts import Workload, block_matrices, query_width
from llm.cost_model_memory import (
    CUDA_WORKSPACE_BYTES,
    FP32,
    batch_bytes,
    block_activation_bytes,
    block_backward_bytes,
    block_parameters,
    head_activation_bytes,
    loss_bytes,
    matmul_bytes,
    optimizer_scratch_bytes,
    stream_bytes,
    weight_copies,
)
from parallel.cost_model_memory import RankState, rank_state
from parallel.cost_model_traffic import ITEM_BYTES, DataLayout, Param, ddp_buckets, gathered_dtype

CHECKPOINTING = ("none", "selective", "full")
MOMENT_BYTES = {"adamw": 8, "sgd": 0, "muon": 8}


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank by part, the step's phases, and the largest of these."""

    state: RankState
    activations_bytes: int
    logits_bytes: int
    phases_bytes: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        return max(self.phases_bytes.values())

    @property
    def phase(self) -> str:
        return max(self.phases_bytes, key=self.phases_bytes.__getitem__)


def moments_of(params: list[Param], optimizer: str) -> dict[str, int]:
    """Bytes of optimizer state an element: two float32 moments, one for Muon's matrices, none for SGD."""
    return {param.name: 4 if param.matrix else MOMENT_BYTES[optimizer] for param in params}


def rank_memory(work: Workload, params: list[Param], layout: DataLayout, checkpointing: str = "none") -> RankMemory:
    """Bytes of one optimizer step on one rank; `work` is its own micro-batch."""
    model, e, N = work.model, matmul_bytes(work), work.tokens
    C, V, L = model.d_model, model.vocab_size, work.layers
    state = rank_state(params, layout, moments_of(params, work.optimizer))
    block, kept, head = activation_bytes(work, layout, checkpointing)
    logits = loss_bytes(work)
    scores = 0 if work.fuses("loss") else N * V * e  # the gradient of the logits
    base = state.held + batch_bytes(work)
    base += CUDA_WORKSPACE_BYTES if work.device == "cuda" else 0
    gradients = GradientBytes(params, layout, state)
    all_gathered = state.gathered_root + sum(state.gathered_blocks)
    one_gathered = state.gathered_root + max(state.gathered_blocks, default=0) + state.gather_message
    # Under ZeRO-3 the last block stays for the beginning of backward.
    kept_gathered = all_gathered if layout.zero == 2 else state.gathered_root + sum(state.gathered_blocks[-1:])
    held = base + state.waiting
    backward = block_backward_bytes(work) + (block - kept) + gradients.of_block
    phases = {
        "forward": held + one_gathered + L * kept + (block - kept),
        "loss backward": held + kept_gathered + L * kept + head + logits,
        "output backward": held + kept_gathered + L * kept + head + scores + gradients.of_output + N * C * e,
    }
    for name, layer in (("last block backward", L - 1), ("next block backward", L - 2), ("first block backward", 0)):
        if layer >= 0:
            gathered = gathered_in_backward(state, layout, layer)
            phases[name] = base + gathered + (layer + 1) * kept + backward + gradients.after(L - 1 - layer, L)
    if layout.is_fsdp:  # a block's activations are gone when its gradients are copied into a message
        sent = gradients.of_block + state.in_flight + gathered_in_backward(state, layout, L - 1)
        phases["last block's message"] = base + sent + (L - 1) * kept + gradients.after(0, L)
    phases["embedding backward"] = (
        base + gradients.after(L, L) + state.gathered_root + gradients.of_embedding + FP32 * N * C
    )
    if state.in_flight_last or state.filled_last:  # what is no block is sent at the end, beside its gradients
        sent = state.in_flight_last + (gradients.outside if layout.is_fsdp else state.filled_last)
        phases["last message"] = base + state.gradients + state.gathered_root + sent
    scratch = optimizer_scratch_bytes(work) // (layout.shard if layout.zero else 1)
    phases["optimizer"] = base + state.gradients + scratch
    return RankMemory(state, L * kept + head, logits, phases)


def gathered_in_backward(state: RankState, layout: DataLayout, layer: int) -> int:
    """Full parameters in a block's backward.

    Under ZeRO-3 its own, those of the block before it, since autograd reaches that block while the last gradients of
    this one are still to come, and the message for the block before that.
    """
    if layout.zero == 2:
        return state.gathered_root + sum(state.gathered_blocks[: layer + 1])
    own = sum(state.gathered_blocks[max(0, layer - 1) : layer + 1])
    return state.gathered_root + own + (state.gather_message if layer >= 2 else 0)


def activation_bytes(work: Workload, layout: DataLayout, checkpointing: str) -> tuple[int, int, int]:
    """(one block's activations, what is kept of it until backward, the last norm and output layer's)."""
    block, head = block_activation_bytes(work), head_activation_bytes(work)
    if layout.is_fsdp and layout.ranks > 1 and layout.param_dtype == "bfloat16":
        # Gathered in bfloat16 already: autocast makes no copies of the weights.
        block -= weight_copies(work, block_parameters(work.model))
        head -= weight_copies(work, work.model.vocab_size * work.model.d_model)
    return block, block if checkpointing == "none" else min(block, checkpoint_bytes(work, checkpointing)), head


def checkpoint_bytes(work: Workload, checkpointing: str) -> int:
    """What is kept of a block until its backward under "selective" or "full" checkpointing."""
    model, e = work.model, matmul_bytes(work)
    per_token = stream_bytes(work) * model.d_model // work.part.stream_ranks  # its input
    if checkpointing == "selective":
        products = [matrix.outputs * matrix.calls for matrix in block_matrices(model)]
        per_token += e * (sum(products) + query_width(model)) + FP32 * model.num_heads
    return work.tokens * per_token


class GradientBytes:
    """Full gradients that are alive while backward goes on, in the dtype of the parameters that the model sees."""

    def __init__(self, params: list[Param], layout: DataLayout, state: RankState):
        self.layout, self.state = layout, state
        size = {p.name: p.numel * ITEM_BYTES[gathered_dtype(p, layout) if layout.is_fsdp else p.dtype] for p in params}
        own = [param for param in params if param.trainable]
        first = min((param.stage for param in own if param.in_block), default=0)
        table = max((size[param.name] for param in own if not param.in_block and len(param.shape) == 2), default=0)
        self.of_block = sum(size[param.name] for param in own if param.in_block and param.stage == first)
        self.outside = sum(size[param.name] for param in own if not param.in_block)
        self.of_output = table
        self.of_head = sum(size[param.name] for param in own if not param.in_block and param.stage > 0)
        is_tied = self.of_head < table
        # A tied table has a gradient from each end and a third for their sum.
        self.of_embedding = table * (2 if is_tied else 1)
        if is_tied and state.waiting and not layout.is_fsdp:
            self.of_embedding += table
        self.of_head += table if is_tied else 0
        self.first = first
        moves = state.peer and layout.zero == 0 and not state.gradients  # to where other ranks read them
        self.buckets = ddp_buckets(own, layout) if moves else []

    def not_sent(self, blocks: int, of: int) -> int:
        """Gradients whose bucket is not full when backward has passed `blocks` of the `of` blocks."""
        passed = self.first + of - blocks
        waiting = [bucket for bucket in self.buckets if min(param.stage for param in bucket) < passed]
        return sum(p.nbytes for bucket in waiting for p in bucket if self.state.waiting or p.stage >= passed)

    def after(self, blocks: int, of: int) -> int:
        """What is held when backward has passed `blocks` of the `of` blocks: gradients, shards of them, messages."""
        state, layout = self.state, self.layout
        in_flight = state.in_flight if blocks else 0
        reduced = state.gradients * blocks // of
        if self.buckets:
            return self.not_sent(blocks, of)
        if layout.ranks == 1 or layout.zero == 0:
            return max(state.waiting, self.of_head + blocks * self.of_block) + in_flight
        if layout.zero == 1:
            return max(state.waiting - blocks * self.of_block, self.of_head, in_flight) + reduced
        # The root unit's gradients, the output layer's among them, wait in full until backward is over.
        return max(state.waiting, reduced) + self.of_head + in_flight
