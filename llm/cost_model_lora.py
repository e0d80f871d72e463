"""What adapters change in a step: frozen weights have no gradient, no optimizer state and no product for either.

A frozen projection costs two products (forward, gradient of its input) in place of three; its adapter two thin ones
forward and four back, bound by memory, and a sum as wide as its output. Everything is on top of
cost_model_memory and cost_model_time, whose parts that adapters leave alone stay as they are.
"""

from dataclasses import replace

from llm.args import ModelConfig
from llm.cost_model_counts import (
    Workload,
    attention_flops_per_token,
    block_matrices,
    forward_flops_per_token,
    train_flops_per_token,
)
from llm.cost_model_memory import (
    CUDA_WORKSPACE_BYTES,
    FP32,
    MemoryPrediction,
    block_activation_bytes,
    block_backward_bytes,
    matmul_bytes,
    predict_memory,
)
from llm.cost_model_time import StepPrediction, predict_step_time
from llm.hardware_calibration import Rates, pass_time
from llm.lora import LoraConfig

MOMENTS = {"adamw": 2, "muon": 1, "sgd": 0}  # adapters are hidden matrices
PASSES_AT_OUTPUT = 6  # the sum 3, B's product writes it 1, and two products read its gradient 2
PASSES_AT_INPUT = 4  # A's product reads it, forward and back, and its input's gradient is made and added


def targets(model: ModelConfig, lora: LoraConfig) -> list[tuple[int, int]]:
    """(inputs, outputs) of each projection of a block that has an adapter; experts have none."""
    matrices = [matrix for matrix in block_matrices(model) if matrix.name in lora.targets]
    if model.moe.num_experts:
        matrices = [matrix for matrix in matrices if matrix.name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    return [(matrix.inputs, matrix.outputs) for matrix in matrices]


def count_adapters(model: ModelConfig, lora: LoraConfig) -> int:
    """Parameters that learn."""
    return model.num_layers * lora.rank * sum(inputs + outputs for inputs, outputs in targets(model, lora))


def flops_per_trained_token(model: ModelConfig, lora: LoraConfig, seq_len: int) -> int:
    """FLOPs of one trained token: all of a model three times forward, or with adapters what is really multiplied."""
    if lora.rank == 0:
        return train_flops_per_token(model, seq_len)
    attention = model.num_layers * attention_flops_per_token(model, seq_len)  # both its factors have gradients
    flops = 2 * forward_flops_per_token(model, seq_len) + attention + 6 * count_adapters(model, lora)
    return flops - unneeded_flops_per_token(model, lora)


def unneeded_flops_per_token(model: ModelConfig, lora: LoraConfig) -> int:
    """The first block's queries, keys and values read a frozen embedding, whose gradient nobody asks for."""
    read = [matrix for matrix in block_matrices(model) if matrix.name in ("q_proj", "k_proj", "v_proj")]
    adapted = sum(matrix.name in lora.targets for matrix in read)
    return sum(matrix.flops_per_token for matrix in read) + 2 * adapted * model.d_model * lora.rank


def lora_memory(work: Workload, lora: LoraConfig) -> MemoryPrediction:
    """Bytes of one optimizer step on one device, by part and by phase."""
    full, model = predict_memory(work), work.model
    N, L, e = work.tokens, model.num_layers, matmul_bytes(work)
    adapters = FP32 * count_adapters(model, lora)
    weights, state = full.weights_bytes + adapters, MOMENTS[work.optimizer] * adapters
    narrow = len(targets(model, lora)) * N * lora.rank * e
    # A norm's backward keeps what it scaled for the sake of its weight alone.
    scaled = 0 if work.fuses("norm") else N * FP32 * model.d_model
    activations = full.activations_bytes + L * narrow - (2 * L + 1) * scaled
    workspace = CUDA_WORKSPACE_BYTES if work.device == "cuda" else 0
    held = weights + state + full.batch_bytes + workspace
    accumulated = adapters if work.grad_accum_steps > 1 else 0
    block = block_activation_bytes(work) + narrow - 2 * scaled
    phases = {
        "loss backward": held + accumulated + activations + full.logits_bytes,
        "last block backward": held + adapters + L * block + block_backward_bytes(work),
        "optimizer": held + 2 * adapters,
    }
    return MemoryPrediction(weights, adapters, state, activations, full.logits_bytes, full.batch_bytes, phases)


def lora_step(work: Workload, rates: Rates, lora: LoraConfig) -> StepPrediction:
    """Seconds of one optimizer step on one device."""
    full, model = predict_step_time(work, rates), work.model
    share = count_adapters(model, lora) / work.parameters.total
    e = matmul_bytes(work)
    wide = sum(PASSES_AT_OUTPUT * outputs + PASSES_AT_INPUT * inputs for inputs, outputs in targets(model, lora))
    extra = work.grad_accum_steps * work.layers * pass_time(rates.new_pass, wide * work.tokens * e)
    return replace(
        full,
        matmul_s=full.matmul_s * 2 / 3,
        elementwise_s=full.elementwise_s + extra,
        optimizer_s=full.optimizer_s * share,
    )
