"""What an engine needs to write a batch of completions, from shapes, lengths and the constants of the device.

The batch shrinks as completions end: the lengths seen before the first batch say how many rows each decoding step has,
waiting requests taking the places of those that end (`alive_by_step`). A step is the device's work and the host's: on a
CPU one after the other, on a GPU at the same time. The host's part and the rates of few rows come from
alignment/cost_model_calibration; prompts are a training step's forward pass, pages that a group shares computed once.
"""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from alignment.cost_model_calibration import EngineRates, prompt_flops
from alignment.rollout import RolloutConfig
from llm.args import ModelConfig
from llm.cost_model_counts import output_matrix
from llm.cost_model_decode import cache_bytes_per_token, decode_step_flops, decode_weight_bytes
from llm.engine_config import EngineConfig
from llm.hardware import Hardware
from llm.hardware_calibration import interpolate

# Of a GPU's layer, read off a profile of the engine on one H200 at 64 and 256 rows (docs/grpo.md): its four products,
# its attention and its four small kernels each begin and end, and attention reaches so much of the bandwidth.
PRODUCT_S, ATTENTION_S, SMALL_S = 4.5e-6, 6e-6, 2.5e-6
ATTENTION_SHARE = 0.83
LAYER_S, STEP_S = 4 * PRODUCT_S + ATTENTION_S + 4 * SMALL_S, 30e-6
PIECE_OPERATIONS = 8  # of a further layer for each request's own piece of prompt, on a CPU


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and of completions, one by one as they were seen; group: completions of a prompt."""

    prompts: Sequence[int]
    responses: Sequence[int]
    group: int = 1

    @property
    def prompt(self) -> float:
        return sum(self.prompts) / max(len(self.prompts), 1)

    @property
    def response(self) -> float:
        return sum(self.responses) / max(len(self.responses), 1)

    @property
    def longest(self) -> int:
        return max(self.responses, default=0)


@dataclass(frozen=True)
class Device:
    """What a rollout is predicted on: the hardware with its generic rates, the engine's own, bytes of an element."""

    hardware: Hardware
    engine: EngineRates
    element_bytes: int

    @property
    def is_gpu(self) -> bool:
        return self.hardware.device == "cuda"

    @property
    def memory_bytes_per_s(self) -> float:
        return self.hardware.memory_bytes_per_s or float("inf")


def draw_lengths(seen: Sequence[int], rows: int, seed: int = 0) -> list[int]:
    """`rows` lengths distributed as those seen (their quantiles), in an order that says nothing."""
    ordered = sorted(seen)
    drawn = [ordered[int((row + 0.5) / rows * len(ordered))] for row in range(rows)]
    random.Random(seed).shuffle(drawn)
    return drawn


def alive_by_step(drawn: Sequence[int], most: int) -> list[int]:
    """Rows of each decoding step: at most `most` at a time, a waiting completion taking the place of one that ended."""
    waiting, left, alive = list(reversed(drawn)), [], []
    while waiting or left:
        while waiting and len(left) < most:
            left.append(waiting.pop())
        alive.append(len(left))
        left = [tokens - 1 for tokens in left if tokens > 1]
    return alive


def predict_rollout(rows: int, rollout: RolloutConfig, model: ModelConfig, device: Device, lengths: Lengths) -> float:
    """Seconds for `rows` completions that are asked for together."""
    if not lengths.longest:
        return 0.0
    later = [
        tokens - 1 for tokens in draw_lengths(lengths.responses, rows) if tokens > 1
    ]  # the first comes with the prompt
    steps = Counter(alive_by_step(later, rollout.max_running))
    context = lengths.prompt + lengths.response / 2
    decoding = sum(count * step_seconds(model, alive, context, device) for alive, count in steps.items())
    return prompt_seconds(rows, model, device, lengths) + decoding


def step_seconds(model: ModelConfig, rows: int, context: float, device: Device) -> float:
    """One token for each of `rows` sequences of `context` tokens."""
    host_s = device.engine.step_s + rows * device.engine.row_s
    return (
        max(gpu_step(model, rows, context, device), host_s)
        if device.is_gpu
        else host_s + cpu_step(model, rows, context, device)
    )


def cpu_step(model: ModelConfig, rows: int, context: float, device: Device) -> float:
    """Products, reading the cache (each query head for itself), and sampling, one after the other."""
    cache = rows * context * cache_bytes_per_token(model, device.element_bytes) * model.num_heads / model.num_kv_heads
    products = max(
        decode_step_flops(model, rows, 0) / interpolate(device.engine.products, rows),
        decode_weight_bytes(model, device.element_bytes) / device.memory_bytes_per_s,
    )
    return products + cache / device.engine.cache_bytes_per_s + rows * model.vocab_size * device.engine.score_s


def gpu_step(model: ModelConfig, rows: int, context: float, device: Device) -> float:
    """Weights are read or multiplied, caches are read, and no kernel is shorter than it must."""
    products = max(
        decode_step_flops(model, rows, 0) / interpolate(device.hardware.rates.matmul, model.d_model),
        decode_weight_bytes(model, device.element_bytes) / device.memory_bytes_per_s,
    )
    cache = rows * context * cache_bytes_per_token(model, device.element_bytes)
    attention = cache / (ATTENTION_SHARE * device.memory_bytes_per_s)
    return products + attention + model.num_layers * LAYER_S + STEP_S


def prompt_seconds(rows: int, model: ModelConfig, device: Device, lengths: Lengths) -> float:
    """All prompts, and what the host does once for each request."""
    config = engine_config(device)
    tokens = prompt_tokens(rows, lengths, config.page_size)
    flops = prompt_flops(model, tokens) + rows * output_matrix(model).flops_per_token
    work_s = flops / interpolate(device.hardware.rates.matmul, model.d_model)
    steps = math.ceil(tokens / config.prefill_chunk)
    host_s = steps * device.engine.prompt_s
    if device.is_gpu:
        work_s += steps * (model.num_layers * LAYER_S + STEP_S)
        return max(work_s, host_s) + rows * device.engine.request_s
    work_s += tokens * model.num_layers * model.d_model * device.engine.stream_s
    work_s += rows * model.vocab_size * device.engine.score_s
    pieces_s = rows * (model.num_layers - 1) * PIECE_OPERATIONS * device.hardware.rates.op_overhead_s
    return work_s + host_s + pieces_s + rows * device.engine.request_s


def prompt_tokens(rows: int, lengths: Lengths, page: int) -> float:
    """Tokens of prompts that are computed: a group's first prompt, and of the others what lies beyond whole pages."""
    shared = (max(lengths.prompt, 1.0) - 1) // page * page
    groups = rows / max(lengths.group, 1)
    return groups * lengths.prompt + (rows - groups) * (lengths.prompt - shared)


def engine_config(device: Device) -> EngineConfig:
    """What alignment/rollout leaves as it is."""
    return EngineConfig().for_device(torch.device(device.hardware.device))
