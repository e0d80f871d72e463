"""Step time: the model's counted work at the device's speed for generic work (llm/hardware_calibration.py).

Matrix products and attention are FLOPs over the rate measured at that width. Everything between them is bound by
memory: cost_model_time_passes counts bytes by kind, and one pass of each kind was timed. On a GPU the host issues
operations while the device works, so a step takes the longer of the two; on a CPU the operations' own overhead is in
the passes. Nothing here was timed on a model; what the list leaves out (allocator, data loading) is the gap.
"""

import math
from dataclasses import dataclass

from llm.cost_model_counts import (
    Matrix,
    Workload,
    attention_flops_per_token,
    block_matrices,
    output_matrix,
    train_flops_per_token,
)
from llm.cost_model_memory import BF16, FP32, block_parameters, matmul_bytes, muon_parameters, stream_bytes
from llm.cost_model_time_passes import Moved, Passes, block_passes, loss_moved, norm_moved, passes_time
from llm.hardware_calibration import Rates, interpolate, pass_time
from llm.loss import CPU_CHUNK_ELEMENTS, GPU_CHUNK_ELEMENTS
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
    chunks = max(1.0, elements / GPU_CHUNK_ELEMENTS)
    return chunks * passes_time(Passes("loss", elements / chunks / work.tokens, loss_moved(e), 0), work, rates)


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
        seconds += pass_time(rates.new_pass, (FP32 + BF16) * cast)
        if not work.fuses("linear"):  # whose gradients come in float32 from the products themselves
            seconds += pass_time(rates.pass_points("widen"), (FP32 + BF16) * cast)
        seconds /= work.grad_accum_steps if work.part.casts_once else 1
    if work.grad_accum_steps > 1:
        seconds += pass_time(rates.inplace_pass, (2 if work.part.adds_in_products else 3) * FP32 * parameters)
    return seconds


# Views and calls of modules beside kernels: a block of tiny tensors takes a CPU as long as 2.13 (float32) and 2.10
# (autocast) operations for each of its kernels. The optimizer's are a counter and its reading for each tensor.
DISPATCHES_PER_KERNEL = 2.1
OPTIMIZER_OPS_PER_TENSOR = 4
# Of an operation of ours, forward and backward, with what Python does in it (a node that does nothing is worth 2): a
# fused block takes an H200's host 4.0 to 4.5 ms a micro-batch, where a plain operation takes 12 us. Of a Triton launch:
# what a call of attention takes there, 137 us, beside its half of a node.
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


def end_passes(work: Workload) -> list[Passes]:
    """The table's look-up and its gradient, and the norm before the output layer with the cast of its result."""
    C, S, e = work.model.d_model, stream_bytes(work), matmul_bytes(work)
    passes = []
    if work.part.has_embedding:
        table = Passes("look-up and its gradient", C, Moved(plain=2 * S, broadcast=FP32 + S), 2, on_stream=True)
        passes.append(table)
    if work.part.has_head:
        cast = Moved(plain=FP32 + e, widen=FP32 + e) if e < FP32 else Moved()
        moved = Moved(plain=(S + e) + (3 * S + e)) if work.fuses("norm") else norm_moved(adds=1) + cast
        passes.append(Passes("last norm", C, moved, 2 if work.fuses("norm") else 21, on_stream=True))
    return passes


def predict_step_time(work: Workload, rates: Rates) -> StepPrediction:
    """Seconds of one optimizer step on one device; communication between devices is not in it."""
    micro_batches = work.grad_accum_steps
    elementwise = work.layers * sum(passes_time(passes, work, rates) for passes in block_passes(work))
    elementwise += sum(passes_time(passes, work, rates) for passes in end_passes(work))
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
