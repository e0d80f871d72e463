"""Step time: the model's counted work at the device's speed for generic work (llm/hardware_calibration.py).

Matrix products and attention are FLOPs over the rate measured at that width. Everything between them is bound by
memory: each operation moves so many tensors, and one pass over as many bytes was timed. On a GPU the host issues
operations while the device works, so a step takes the longer of the two; on a CPU the operations' own overhead is in
the passes. Nothing here was timed on a model; what the list leaves out (allocator, data loading) is the gap.
"""

import math
from dataclasses import dataclass, replace

from llm.args import KernelsConfig
from llm.cost_model_counts import (
    Matrix,
    Workload,
    attention_flops_per_token,
    block_matrices,
    kv_width,
    output_matrix,
    query_width,
    train_flops_per_token,
)
from llm.cost_model_memory import BF16, FP32, block_parameters, matmul_bytes, muon_parameters, stream_bytes
from llm.hardware_calibration import Rates, interpolate, pass_time
from llm.loss import CPU_CHUNK_ELEMENTS
from llm.optimizer_adamw import CPU_BUNDLE_ELEMENTS

NS_STEPS = 5


@dataclass(frozen=True)
class StepPrediction:
    """Seconds of one optimizer step by part; `host_s` is what the host needs to issue a GPU's operations."""

    matmul_s: float
    attention_s: float
    elementwise_s: float
    loss_s: float
    optimizer_s: float
    host_s: float
    tokens: int  # of the global batch
    flops: float  # of the step on one device

    @property
    def device_s(self) -> float:
        return self.matmul_s + self.attention_s + self.elementwise_s + self.loss_s + self.optimizer_s

    @property
    def step_s(self) -> float:
        return max(self.device_s, self.host_s)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    @property
    def bound(self) -> str:
        """The part that takes longest, or "host" when the device waits for it."""
        if self.host_s > self.device_s:
            return "host"
        parts = ("matmul", "attention", "elementwise", "loss", "optimizer")
        return max(parts, key=lambda part: getattr(self, f"{part}_s"))


@dataclass(frozen=True)
class Passes:
    """Element-wise work on `width` elements a token.

    `forward` and `backward` count tensors read or written; `kernels` is the operations of both together; `exp` marks
    work that computes an exponential, which on a CPU is slower than the memory.
    """

    what: str
    width: float
    element_bytes: float
    forward: float
    backward: float
    kernels: int
    exp: bool = False
    on_stream: bool = False  # between the layers, where sequence parallelism leaves a rank its share of the tokens


def block_passes(work: Workload) -> list[Passes]:
    """Every element-wise operation of one block, forward and backward."""
    if work.compile != "none":
        return compiled_passes(work)
    fused = {"norm": fused_norm_passes, "rope": fused_rope_passes, "swiglu": fused_swiglu_passes}
    passes = [own for operation, make in fused.items() if work.fuses(operation) for own in make(work)]
    return passes + [own for operation, own in eager_passes(work) if not work.fuses(operation)]


def fused_norm_passes(work: Workload) -> list[Passes]:
    """Tensors of the stream and of e bytes, in units of the stream's: norm, norm with sum, sum; and back (kernel/)."""
    C, stream, e = work.model.d_model, stream_bytes(work), matmul_bytes(work)
    forward = (1 + e / stream) + (2 + 2 * e / stream) + (2 + e / stream)
    backward = (3 + e / stream) + (3 + 2 * e / stream if e != stream else 4) + (0 if e == stream else 1 + e / stream)
    return [Passes("two norms with the residual sums", C, stream, forward, backward, 8, on_stream=True)]


def fused_rope_passes(work: Workload) -> list[Passes]:
    return [Passes("rotate q and k", query_width(work.model) + kv_width(work.model), matmul_bytes(work), 2, 2, 2)]


def fused_swiglu_passes(work: Workload) -> list[Passes]:
    """Dense blocks; experts stay as they are."""
    if work.model.moe.num_experts:
        return [own for operation, own in eager_passes(replace(work, kernels=KernelsConfig())) if operation == "swiglu"]
    return [Passes("silu times up", work.model.d_ff, matmul_bytes(work), 3, 5, 2)]


def eager_passes(work: Workload) -> list[tuple[str, Passes]]:
    """As torch runs the model's lines one by one, each with the fused operation that would replace it ("" for none)."""
    model, e = work.model, matmul_bytes(work)
    C, Q, K = model.d_model, query_width(model), kv_width(model)
    passes = [
        ("norm", Passes("two norms: square, mean, scale, weight; and back", 2 * C, FP32, 7, 23, 38, on_stream=True)),
        ("rope", Passes("rotate q and k: negate, join, two products, sum", Q + K, e, 10, 10, 20)),
        ("norm", Passes("residual sums, and the gradients of shared inputs", C, FP32, 6, 9, 5, on_stream=True)),
        *(("swiglu", own) for own in ffn_passes(work)),
    ]
    if model.num_kv_heads != model.num_heads and model.attention != "triton":
        passes.append(("", Passes("repeat k and v to all heads, sum their gradients", 2 * Q, e, 2, 1.5, 4)))
    if model.qk_norm:
        passes.append(("norm", Passes("norms of q and k", Q + K, FP32, 7, 23, 38)))
    if e == BF16:
        casts = Passes("inputs and weights to bfloat16, gradients back", 5 * C, BF16 + FP32, 1, 1, 35)
        passes.append(("linear", casts))
    return passes


def ffn_passes(work: Workload) -> list[Passes]:
    model, e = work.model, matmul_bytes(work)
    moe = model.moe
    F = moe.experts_per_token * moe.d_ff if moe.num_experts else model.d_ff
    experts = max(1, moe.num_experts)
    passes = [
        Passes("silu, and its backward", F, e, 2, 3, 2 * experts, exp=True),
        Passes("silu times up, and its two gradients", F, e, 3, 6, 3 * experts),
    ]
    if moe.num_experts:
        kC = moe.experts_per_token * model.d_model
        passes.append(Passes("gather by expert, weigh, scatter; and back", kC, FP32, 10, 14, 30))
    return passes


def compiled_passes(work: Workload) -> list[Passes]:
    """Inductor fuses what lies between two matrix products into one kernel each."""
    model, e = work.model, matmul_bytes(work)
    C, Q, K = model.d_model, query_width(model), kv_width(model)
    F = model.moe.experts_per_token * model.moe.d_ff if model.moe.num_experts else model.d_ff
    return [
        Passes("residual sum with norm, twice", 2 * C, (FP32 + e) / 2, 4, 6, 6, on_stream=True),
        Passes("rotate q and k, repeat k and v", 2 * Q + K, e, 2, 2, 6),
        Passes("silu times up", F, e, 3, 5, 2, exp=True),
    ]


def passes_time(passes: Passes, work: Workload, rates: Rates) -> float:
    """Seconds of forward and backward together: three tensors a timed multiplication, two a timed silu."""
    tokens = work.stream_tokens if passes.on_stream else work.tokens
    tensor_bytes = tokens * passes.width * passes.element_bytes
    if passes.exp:
        return (passes.forward + passes.backward) / 2 * pass_time(rates.exp_pass, 2 * tensor_bytes)
    return (passes.forward + passes.backward) / 3 * pass_time(rates.new_pass, 3 * tensor_bytes)


def matmul_time(work: Workload, rates: Rates) -> float:
    """Forward, gradient of the input and gradient of the weight of every linear layer, one micro-batch."""
    return 3 * (work.layers * block_products_s(work, rates) + output_product_s(work, rates))


def block_products_s(work: Workload, rates: Rates) -> float:
    """One block's products, forward; the gradients of inputs and of weights take as long each."""
    return sum(product_s(matrix, work, rates) for matrix in block_matrices(work.model))


def output_product_s(work: Workload, rates: Rates) -> float:
    """The output layer's, 0 on a rank without it."""
    return product_s(output_matrix(work.model), work, rates) if work.part.has_head else 0.0


def product_s(matrix: Matrix, work: Workload, rates: Rates) -> float:
    # A GPU works tile by tile, so a product runs like the square one of as many operations; a CPU's cache makes the
    # smaller side count.
    narrow, square = min(matrix.inputs, matrix.outputs), math.sqrt(matrix.inputs * matrix.outputs)
    rate = interpolate(rates.matmul, narrow if work.device == "cpu" else square)
    seconds = work.tokens * matrix.flops_per_token / rate
    if work.device == "cpu":
        # The products timed find their operands in the cache; a model's come from memory and go back to it.
        moved = work.tokens * matrix.calls * (matrix.inputs + matrix.outputs) * matmul_bytes(work)
        seconds += pass_time(rates.new_pass, moved)
    return seconds


def attention_times(work: Workload, rates: Rates) -> tuple[float, float]:
    """Causal attention of all layers, forward and the twice as much of backward, at the nearest head width's rates.

    A ring's blocks see a rank's keys at a time; with gathered keys or traded heads one call sees all.
    """
    head_dim, part = work.model.head_dim, work.part
    _, forward, backward = min(rates.attention, key=lambda measured: abs(measured[0] - head_dim))
    length = work.row_tokens if part.context_mode == "ring" else work.seq_len
    flops = work.layers * work.tokens * attention_flops_per_token(work.model, work.seq_len)
    return flops / interpolate(forward, length), 2 * flops / interpolate(backward, length)


def loss_time(work: Workload, rates: Rates) -> float:
    """llm/loss.py on the logits: maximum and sum of exponentials, then the scaled softmax, in chunks on a CPU."""
    elements, e = work.tokens * work.model.vocab_size, matmul_bytes(work)
    if not work.part.has_head:
        return 0.0
    if work.fuses("loss"):
        chunks = -(-e * elements // (work.kernels.loss_chunk_mb << 20))
        added = 2 * FP32 * work.model.vocab_size * work.model.d_model * (chunks - 1)  # dW read and written by a product
        return pass_time(rates.inplace_pass, 2 * e * elements / chunks) * chunks + pass_time(rates.inplace_pass, added)
    if work.compile == "model":
        return pass_time(rates.new_pass, 3 * e * elements)
    if work.device == "cpu":
        chunks = max(1.0, elements / CPU_CHUNK_ELEMENTS)
        chunk_bytes = FP32 * elements / chunks
        exponentials = 2 * pass_time(rates.exp_pass, 2 * chunk_bytes)
        others = 4 * pass_time(rates.inplace_pass, 2 * chunk_bytes)
        from_memory = pass_time(rates.new_pass, 4 * e * elements)  # logits twice, their gradient, and its first touch
        return chunks * (exponentials + others) + from_memory
    return pass_time(rates.new_pass, (3 * FP32 + 4 * e + 8 * FP32) * elements)


def optimizer_time(work: Workload, rates: Rates) -> float:
    """The gradient norm, clipping and the update, once a step."""
    parameters = work.parameters.total
    if work.optimizer == "adamw" and work.fuses("optimizer"):  # the norm reads the gradients, the update seven tensors
        return pass_time(rates.inplace_pass, (1 + 7) * FP32 * parameters)
    hidden = muon_parameters(work) if work.optimizer == "muon" else 0
    others = parameters - hidden if work.optimizer != "sgd" else 0
    seconds = pass_time(rates.inplace_pass, 3 * FP32 * parameters)  # the norm reads, clipping reads and writes
    # AdamW touches 18 tensors in seven operations; on a CPU four come from memory and the rest from the cache.
    if work.device == "cpu" and others:
        bundle = min(others, CPU_BUNDLE_ELEMENTS)
        seconds += others / bundle * 9 * pass_time(rates.inplace_pass, 2 * FP32 * bundle)
        seconds += pass_time(rates.inplace_pass, 7 * FP32 * others)
    elif others:
        seconds += pass_time(rates.inplace_pass, 18 * FP32 * others)
    if work.optimizer == "sgd":
        seconds += pass_time(rates.inplace_pass, 3 * FP32 * parameters)
    if hidden:
        seconds += pass_time(rates.inplace_pass, 12 * FP32 * hidden) + muon_matmul_time(work, rates)
    return seconds


def muon_matmul_time(work: Workload, rates: Rates) -> float:
    """Newton-Schulz: a Gram matrix, its square and their product with X, five times."""
    seconds = 0.0
    for matrix in block_matrices(work.model):
        copies = work.model.moe.num_experts if matrix.calls > 1 else 1
        rows, columns = sorted((matrix.inputs, matrix.outputs))
        flops = NS_STEPS * (4 * rows * rows * columns + 2 * rows**3)
        rate = rates.bf16_matmul if work.device == "cpu" else interpolate(rates.matmul, rows)
        seconds += work.layers * copies * flops / rate
    return seconds


def accumulation_time(work: Workload, rates: Rates) -> float:
    """Weights to bfloat16 and their gradients back (autocast), and adding to the gradients that are there."""
    parameters = work.parameters.total
    seconds = 0.0
    if work.dtype == "bfloat16":
        cast = work.layers * block_parameters(work.model) + work.output_elements
        directions = 1 if work.fuses("linear") else 2  # gradients come in float32 from the products themselves
        seconds += pass_time(rates.new_pass, directions * (FP32 + BF16) * cast)
        seconds /= work.grad_accum_steps if work.part.casts_once else 1
    if work.grad_accum_steps > 1:
        seconds += pass_time(rates.inplace_pass, (2 if work.part.adds_in_products else 3) * FP32 * parameters)
    return seconds


# Counted with a TorchDispatchMode over a step of four blocks: 1,050 operations, of which 601 launch a kernel and the
# rest make views; and the optimizer's small operations on the host, a counter and its reading for each tensor.
DISPATCHES_PER_KERNEL = 1.75
OPTIMIZER_OPS_PER_TENSOR = 4
# Of an autograd node written in Python, forward and backward: 50 us beside 1.9 us for a product of two small tensors,
# processor time on a CPU. Of a Triton launch: what a call of attention takes on an H200's host, 137 us, beside its half
# of a node, where a plain operation takes 5 to 10.
PYTHON_NODE_OPS = 25
TRITON_LAUNCH_OPS = 6
OPS_BESIDE_GRAPH = 20  # copies of the batch, the replay, the norm and the update


def host_time(work: Workload, rates: Rates) -> float:
    """What a GPU's host needs to issue a step; 0 on a CPU. A compiled model issues one kernel a fused group."""
    if work.device == "cpu":
        return 0.0
    if work.kernels.cuda_graph:
        return rates.op_overhead_s * OPS_BESIDE_GRAPH * work.grad_accum_steps
    products = 3 * len(block_matrices(work.model)) + 5
    kernels = products + sum(passes.kernels for passes in block_passes(work))
    per_micro_batch = work.layers * kernels + 60
    if work.compile == "none":
        per_micro_batch = DISPATCHES_PER_KERNEL * per_micro_batch + work.layers * python_ops(work)
    tensors = 9 * work.layers + 3
    per_tensor = 1 if work.fuses("optimizer") else OPTIMIZER_OPS_PER_TENSOR
    return rates.op_overhead_s * (work.grad_accum_steps * per_micro_batch + per_tensor * tensors)


def python_ops(work: Workload) -> int:
    """What fused operations of one block cost the host beside their kernels, in plain operations' worth."""
    nodes = {"norm": (2, 4), "rope": (1, 2), "swiglu": (1, 2), "linear": (4, 0)}  # and launches, both ways
    own = [counts for operation, counts in nodes.items() if work.fuses(operation)]
    own += [(1, 4)] if work.model.attention == "triton" else []
    return sum(PYTHON_NODE_OPS * node + TRITON_LAUNCH_OPS * launches for node, launches in own)


def predict_step_time(work: Workload, rates: Rates) -> StepPrediction:
    """Seconds of one optimizer step on one device; communication between devices is not in it."""
    micro_batches = work.grad_accum_steps
    elementwise = work.layers * sum(passes_time(passes, work, rates) for passes in block_passes(work))
    last = (1.5, 3, 2) if work.fuses("norm") else (7, 23, 19)
    if work.part.has_head:
        norm = Passes("last norm", work.model.d_model, FP32, *last, on_stream=True)
        elementwise += passes_time(norm, work, rates)
    elementwise += accumulation_time(work, rates)
    return StepPrediction(
        matmul_s=micro_batches * matmul_time(work, rates),
        attention_s=micro_batches * sum(attention_times(work, rates)),
        elementwise_s=micro_batches * elementwise,
        loss_s=micro_batches * loss_time(work, rates),
        optimizer_s=optimizer_time(work, rates),
        host_s=host_time(work, rates),
        tokens=work.global_tokens,
        flops=float(train_flops_per_token(work.model, work.seq_len)) * work.tokens * micro_batches,
    )
