"""What generating tokens must cost: a roofline of one decoding step and of a batch of requests, from plain numbers.

A step reads every weight that its tokens pass once, the keys and values of all sequences, and writes the new ones; its
products are 2 FLOPs a weight and token. The time is the longer of bytes over bandwidth and FLOPs over the matmul rate.
Not in it: launches, waves of thread blocks that do not fill the device, sampling, the host.
"""

from dataclasses import dataclass

from llm.args import ModelConfig
from llm.cost_model_counts import block_matrices, count_parameters, kv_width, output_matrix, query_width


@dataclass(frozen=True)
class DecodeRates:
    """Of the device: matmul FLOPs a second in the dtype, bytes a second to and from its memory."""

    matmul_flops: float
    memory_bytes: float


@dataclass(frozen=True)
class DecodeTime:
    """Seconds of a step or of a whole batch, and which of "memory" and "matmul" the larger part of it waits for."""

    seconds: float
    bound: str


def decode_weight_bytes(model: ModelConfig, element_bytes: int) -> int:
    """Weights that a decoding step reads: all but the embedding table, of which a token reads one row.

    With experts these are all of them, as a large batch reads; few tokens read fewer.
    """
    count = count_parameters(model)
    output = output_matrix(model)
    return (count.attention + count.ffn + count.norms + output.inputs * output.outputs) * element_bytes


def cache_bytes_per_token(model: ModelConfig, element_bytes: int) -> int:
    """Keys and values of one token in all layers."""
    return 2 * model.num_layers * kv_width(model) * element_bytes


def decode_step_bytes(model: ModelConfig, num_rows: int, context: float, element_bytes: int) -> float:
    """Bytes of a step of `num_rows` sequences of `context` tokens each."""
    cache = num_rows * (context + 1) * cache_bytes_per_token(model, element_bytes)
    return decode_weight_bytes(model, element_bytes) + cache


def decode_step_flops(model: ModelConfig, num_rows: int, context: float) -> float:
    """Products with the weights, and q k^T and p v over the whole context."""
    weights = sum(matrix.flops_per_token for matrix in block_matrices(model))
    attention = 4 * query_width(model) * context
    return num_rows * (model.num_layers * (weights + attention) + output_matrix(model).flops_per_token)


def decode_step_time(
    model: ModelConfig, num_rows: int, context: float, rates: DecodeRates, element_bytes: int = 2
) -> DecodeTime:
    """One token for each of `num_rows` sequences."""
    memory = decode_step_bytes(model, num_rows, context, element_bytes) / rates.memory_bytes
    matmul = decode_step_flops(model, num_rows, context) / rates.matmul_flops
    return DecodeTime(max(memory, matmul), "memory" if memory >= matmul else "matmul")


def prefill_time(model: ModelConfig, prompts: list[int], rates: DecodeRates, element_bytes: int = 2) -> DecodeTime:
    """Prompts of these lengths at once; only their last states meet the output matrix."""
    tokens = sum(prompts)
    flops = tokens * model.num_layers * sum(matrix.flops_per_token for matrix in block_matrices(model))
    flops += model.num_layers * sum(2 * query_width(model) * length**2 for length in prompts)
    flops += len(prompts) * output_matrix(model).flops_per_token
    moved = decode_weight_bytes(model, element_bytes) + tokens * cache_bytes_per_token(model, element_bytes)
    matmul, memory = flops / rates.matmul_flops, moved / rates.memory_bytes
    return DecodeTime(max(memory, matmul), "memory" if memory >= matmul else "matmul")


def generation_time(
    model: ModelConfig, prompts: list[int], new_tokens: list[int], rates: DecodeRates, element_bytes: int = 2
) -> DecodeTime:
    """All requests together: their prompts, then steps of the rows that are not done, at most one token a step each."""
    prefill = prefill_time(model, prompts, rates, element_bytes)
    seconds = {"memory": 0.0, "matmul": 0.0}
    seconds[prefill.bound] += prefill.seconds
    for step in range(1, max(new_tokens)):  # the first token comes with the prompt
        alive = [prompt + step for prompt, new in zip(prompts, new_tokens, strict=True) if new > step]
        time = decode_step_time(model, len(alive), sum(alive) / len(alive), rates, element_bytes)
        seconds[time.bound] += time.seconds
    return DecodeTime(sum(seconds.values()), max(seconds, key=seconds.get))
