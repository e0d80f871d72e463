"""Memory of a training step, tensor by tensor: weights, gradients, optimizer state, and what autograd keeps.

A step has phases, and the peak is the largest of them: loss backward (all activations, the logits and their gradient),
backward through the blocks (activations go as gradients come), the sum over ranks, and the optimizer. Optimizer state
is counted in every phase, as in all steps but the first. `saved_in_block` is the list of what autograd keeps of one
block; tests/llm/test_cost_model.py holds it against autograd itself and against the measured peak.

Bytes, on one device. What a library allocates for itself is not counted, but for cuBLAS's workspace on a GPU.
"""

from dataclasses import dataclass, replace

from llm.args import ModelConfig
from llm.cost_model_counts import Workload, block_matrices, count_parameters, ffn_matrices, kv_width, query_width
from llm.loss import CPU_CHUNK_ELEMENTS, GPU_CHUNK_ELEMENTS
from llm.optimizer_adamw import CPU_BUNDLE_ELEMENTS

FP32, BF16, INT64 = 4, 2, 8
CUDA_WORKSPACE_BYTES = 32 * 2**20  # cuBLAS's on Hopper; it is allocated through torch and so counts


@dataclass(frozen=True)
class MemoryPrediction:
    """Bytes by part, the step's phases, and the largest of these."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int  # at the end of forward, copies of the weights in bfloat16 included, logits not
    logits_bytes: int  # logits, their gradient and the loss's scratch
    batch_bytes: int
    phases_bytes: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        return max(self.phases_bytes.values())


@dataclass(frozen=True)
class Saved:
    """A tensor that autograd keeps: what it is, and its bytes a token."""

    what: str
    bytes_per_token: int


def matmul_bytes(work: Workload) -> int:
    """Bytes of an element that enters or leaves a matrix multiplication."""
    return BF16 if work.dtype == "bfloat16" else FP32


def saved_in_block(work: Workload) -> list[Saved]:
    """What autograd keeps of one block for backward, a token; the sum is the block's activations."""
    model, compiled = work.model, work.compile != "none"
    C, Q, e = model.d_model, query_width(model), matmul_bytes(work)
    # Under autocast each projection makes its own bfloat16 copy of a float32 input; a compiled block makes one, and
    # tensor parallelism casts what enters before it crosses.
    cast_before = work.part.tensor_ranks > 1 or work.part.casts_norms
    once = e == FP32 or compiled or cast_before or work.fuses("norm") or work.fuses("linear")
    copies = {"q, k, v": 1, "gate, up": 1} if once else {"q, k, v": 3, "gate, up": 2}
    saved = [
        *saved_by_norm(work, C, "attention_norm"),
        Saved("normed input of q, k, v", copies["q, k, v"] * e * C),
        Saved("rotated q, k; v; repeated to H heads where the kernel asks for it", e * saved_heads(work)),
        Saved("attention output, also o_proj's input", e * Q),
        Saved("logsumexp of each query's scores", FP32 * model.num_heads),
        *saved_by_norm(work, C, "ffn_norm"),
    ]
    if model.qk_norm:
        K = kv_width(model)
        heads = model.num_heads + model.num_kv_heads
        kept = e if compiled else 2 * FP32
        saved.append(Saved("q_norm and k_norm: inputs and normed values", kept * (Q + K) + FP32 * heads))
    if model.attention == "eager" and work.part.context_ranks == 1:  # a ring's blocks make theirs again in backward
        grouped = model.num_kv_heads != model.num_heads  # then the products want the probabilities in another order
        per_score = 2 * FP32 + (BF16 if e == BF16 else FP32 * grouped)
        saved.append(Saved("scores and probabilities of T keys", per_score * model.num_heads * work.seq_len))
    if work.document_masking:
        saved.append(Saved("document mask as numbers to add to scores", e * work.seq_len))
    return saved + (saved_by_moe(work) if model.moe.num_experts else saved_by_swiglu(work, copies["gate, up"]))


def saved_heads(work: Workload) -> int:
    """Elements of q, k and v a token that attention keeps; of gathered keys those of all ranks."""
    model, part = work.model, work.part
    Q, K = query_width(model), kv_width(model)
    if part.context_ranks > 1 and part.context_mode == "ring":
        return Q + 2 * K
    keys = K if model.attention in ("triton", "eager") else Q  # the others repeat k and v
    if part.context_ranks > 1 and part.context_mode == "all_gather":
        return Q + 2 * part.context_ranks * keys
    # Ulysses keeps the output on either side of the exchange.
    return Q + 2 * keys + (Q if part.context_ranks > 1 else 0)


def stream_bytes(work: Workload) -> int:
    """Bytes of an element of the residual stream."""
    return BF16 if work.kernels.stream == "bfloat16" and work.dtype == "bfloat16" else FP32


def saved_by_norm(work: Workload, width: int, name: str) -> list[Saved]:
    """The residual stream, 1/rms, and (eager) the values before the weight; compiled or fused these are recomputed."""
    ranks = work.part.stream_ranks
    saved = [
        Saved(f"{name}: input, the residual stream", stream_bytes(work) * width // ranks),
        Saved(f"{name}: 1 / rms", FP32 // ranks),
    ]
    if work.compile != "none" or work.fuses("norm"):
        return saved
    return [*saved, Saved(f"{name}: normed values", FP32 * width // ranks)]


def saved_by_swiglu(work: Workload, copies: int) -> list[Saved]:
    C, F, e = work.model.d_model, work.model.d_ff, matmul_bytes(work)
    saved = [
        Saved("normed input of gate, up", copies * e * C),
        Saved("gate", e * F),
        Saved("up", e * F),
        Saved("silu(gate) * up, down's input", e * F),
    ]
    return saved if work.compile != "none" or work.fuses("swiglu") else [*saved, Saved("silu(gate)", e * F)]


def saved_by_moe(work: Workload) -> list[Saved]:
    model, e = work.model, matmul_bytes(work)
    C, E, k, F = model.d_model, model.moe.num_experts, model.moe.experts_per_token, model.moe.d_ff
    router_copy = [] if e == FP32 else [Saved("normed input as bfloat16 for the router", e * C)]
    expert_copies = [] if e == FP32 else [Saved("inputs as bfloat16, for gate and for up", 2 * k * e * C)]
    return [
        Saved("normed input, float32", FP32 * C if e == FP32 else 0),
        *router_copy,
        *expert_copies,
        Saved("router probabilities, chosen experts and their weights", FP32 * E + k * (INT64 + 3 * FP32)),
        Saved("order of the choices and the tokens they came from", 2 * k * INT64),
        Saved("inputs gathered by expert", k * FP32 * C if e == FP32 else 0),
        Saved("gate, silu(gate), up, product", 4 * k * e * F),
        Saved("experts' outputs, and those times their weights in float32", k * (e + FP32) * C),
    ]


def weight_copies(work: Workload, parameters: int) -> int:
    """bfloat16 copies of float32 matrices, made in forward and kept for backward, not once a step."""
    return BF16 * parameters if work.dtype == "bfloat16" and not work.part.casts_once else 0


def block_parameters(model: ModelConfig) -> int:
    count = count_parameters(model)
    return (count.attention + count.ffn) // model.num_layers


def block_activation_bytes(work: Workload) -> int:
    saved = sum(saved.bytes_per_token for saved in saved_in_block(work))
    return work.tokens * saved + weight_copies(work, block_parameters(work.model))


def head_activation_bytes(work: Workload) -> int:
    """The last norm's tensors, the output layer's input and its weight as bfloat16."""
    C, e = work.model.d_model, matmul_bytes(work)
    if not work.part.has_head:
        return 0
    outside = replace(work, compile="none") if work.compile == "block" else work  # what is not a block stays eager
    norm = sum(saved.bytes_per_token for saved in saved_by_norm(outside, C, "norm"))
    if work.fuses("loss"):
        return work.tokens * norm  # the rest is gone when forward ends
    return work.tokens * (norm + e * C) + weight_copies(work, work.model.vocab_size * C)


def batch_bytes(work: Workload) -> int:
    """Token ids and targets, the rotary tables, and the mask that keeps documents apart."""
    rows = work.micro_batch_size if work.document_masking else 1
    rotary = rows * work.row_tokens * 2 * FP32 * work.model.head_dim
    mask = work.tokens * work.seq_len if work.document_masking else 0
    return 2 * INT64 * work.tokens + rotary + mask


def loss_bytes(work: Workload) -> int:
    """The logits, their gradient, and the float32 scratch of one chunk of rows (llm/loss.py)."""
    V, N, e = work.model.vocab_size, work.tokens, matmul_bytes(work)
    if not work.part.has_head:
        return 0
    logits = N * V * e
    if work.fuses("loss"):  # a chunk, the layer's input and weight as the products read them, and both gradients
        copy = V * work.model.d_model * e if e == BF16 else 0
        chunk = min(logits, work.kernels.loss_chunk_mb << 20)
        return chunk + 2 * N * work.model.d_model * e + copy + FP32 * V * work.model.d_model
    if work.compile == "model":
        return logits  # the fused gradient overwrites the logits
    limit = CPU_CHUNK_ELEMENTS if work.device == "cpu" else GPU_CHUNK_ELEMENTS
    rows = max(1, limit // V)
    if e == FP32:
        return 2 * logits + (FP32 * rows * V if rows < N else 0)
    return 2 * logits + 2 * FP32 * min(rows, N) * V


def optimizer_state_bytes(work: Workload) -> int:
    """float32 moments: two for AdamW, one for Muon's matrices, none for SGD."""
    count = count_parameters(work.model)
    matrices = muon_parameters(work)
    moments = {"adamw": 2 * count.total, "muon": 2 * count.total - matrices, "sgd": 0}
    return FP32 * moments[work.optimizer]


def muon_parameters(work: Workload) -> int:
    """Hidden matrices, which Muon takes; biases, norms, embedding and output stay with AdamW."""
    model, count = work.model, work.parameters
    biases = work.layers * (query_width(model) + 2 * kv_width(model)) if model.qkv_bias else 0
    return count.attention + count.ffn - biases


def optimizer_scratch_bytes(work: Workload) -> int:
    """What one update allocates beside the state: AdamW's denominators, Muon's directions and its iteration."""
    model = work.model
    if work.optimizer == "sgd" or (work.optimizer == "adamw" and work.fuses("optimizer")):
        return 0
    hidden = muon_parameters(work) if work.optimizer == "muon" else 0
    others = work.parameters.total - hidden
    adamw = FP32 * (min(others, CPU_BUNDLE_ELEMENTS) if work.device == "cpu" else others)
    if not hidden:
        return adamw
    # The directions in float32, their orthogonal factors in bfloat16, and while one stack is worked on: itself twice
    # and its Gram matrices. A GPU stacks all matrices of one shape, copied in float32 first.
    shapes = [(m.inputs, m.outputs, model.moe.num_experts if m in expert_matrices(model) else 1)
              for m in block_matrices(model)]  # fmt: skip
    layers = 1 if work.device == "cpu" else work.layers
    stacks = [layers * stack * (rows * columns * (2 * BF16 + (FP32 if layers > 1 else 0))
              + 2 * BF16 * min(rows, columns) ** 2) for rows, columns, stack in shapes]  # fmt: skip
    return max(adamw, (FP32 + BF16) * hidden + max(stacks))


def expert_matrices(model: ModelConfig) -> list:
    return ffn_matrices(model)[1:] if model.moe.num_experts else []


def block_backward_bytes(work: Workload) -> int:
    """Gradients alive at the widest point of a block's backward, less what that block has freed by then."""
    model, e, part = work.model, matmul_bytes(work), work.part
    stream = stream_bytes(work) * model.d_model + (e * model.d_model if e == BF16 else 0)
    stream //= part.stream_ranks
    if model.moe.num_experts:
        return work.tokens * (stream + 3 * model.moe.experts_per_token * e * model.d_model)
    # d(product), then d(silu) and d(up), while the product itself is gone.
    widest = 2 * e * model.d_ff
    if part.tensor_ranks > 1:  # narrow products between wide tokens: the gradients of gate's and up's input
        widest = max(widest, 2 * e * model.d_model + e * model.d_ff)
    return work.tokens * (stream + widest)


def predict_memory(work: Workload) -> MemoryPrediction:
    """Bytes of one optimizer step on one device, by part and by phase."""
    model, e = work.model, matmul_bytes(work)
    C, V, L, N = model.d_model, model.vocab_size, model.num_layers, work.tokens
    weights = FP32 * count_parameters(model).total
    state, batch = optimizer_state_bytes(work), batch_bytes(work)
    workspace = CUDA_WORKSPACE_BYTES if work.device == "cuda" else 0
    block, head, logits = block_activation_bytes(work), head_activation_bytes(work), loss_bytes(work)
    activations = L * block + head
    accumulating = work.grad_accum_steps > 1  # then gradients of the micro-batches before are there from the start
    held = weights + state + batch + workspace + (weights if accumulating else 0)
    down = FP32 * model.d_model * (model.d_ff if not model.moe.num_experts else model.moe.num_experts * model.moe.d_ff)
    block_gradients = FP32 * count_parameters(model).attention // L + FP32 * count_parameters(model).ffn // L
    output_gradient = FP32 * V * C

    def through_block(layer: int) -> int:
        later = 0 if accumulating else (L - 1 - layer) * block_gradients + output_gradient
        return held + (layer + 1) * block + block_backward_bytes(work) + later + down

    # A tied table has a gradient from each end and a third for their sum; accumulation needs one beside the old.
    shared = (2 if model.tie_embeddings else 0) + (1 if accumulating else 0)
    phases = {
        "loss backward": held + activations + logits,
        "output backward": held + activations + output_gradient + N * C * e + (0 if work.fuses("loss") else N * V * e),
        "last block backward": through_block(L - 1),
        "first block backward": through_block(0),
        "embedding backward": held + (0 if accumulating else weights) + FP32 * N * C + shared * output_gradient,
        "optimizer": weights + state + batch + workspace + weights + optimizer_scratch_bytes(work),
    }  # fmt: skip
    if work.world_size > 1:
        phases["gradient all-reduce"] = weights + state + batch + workspace + 2 * weights
    return MemoryPrediction(weights, weights, state, activations, logits, batch, phases)
