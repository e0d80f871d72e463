"""What a batch of train_rl will take, from shapes, lengths and the device's rates alone, in seconds by part.

Rollout: on a GPU each decoding step is the longest of what the device must read or multiply (llm/cost_model_decode), of
its kernels at their shortest, and of what the engine's Python needs. On a CPU one comes after the other: products,
caches (gathered from their pages, so moved three times), sampling over the vocabulary, operations, Python. Updates are
llm's step time with the mean length as the sequence. The lengths of completions are those of the held-out problems
before the first batch; nothing of the engine or the trainer is timed.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from alignment.rollout import RolloutConfig
from alignment.train_rl_config import TrainRlConfig
from llm.args import ModelConfig
from llm.cost_model_counts import count_parameters, workload_of
from llm.cost_model_decode import (
    DecodeRates,
    cache_bytes_per_token,
    decode_step_flops,
    decode_step_time,
    decode_weight_bytes,
    prefill_time,
)
from llm.cost_model_time import predict_step_time
from llm.hardware import Hardware
from llm.hardware_calibration import interpolate

# Counted with cProfile in llm/engine: Python calls of a step, and of each token of it; operations of a decoding step.
CALLS_PER_STEP, CALLS_PER_TOKEN, CALLS_PER_REQUEST = 400, 26, 150
OPERATIONS_PER_LAYER, OPERATIONS_PER_STEP = 30, 40
CACHE_MOVES, SAMPLING_BYTES = 3, 80  # on a CPU: gather writes what attention reads; a row's passes over an id's scores
KERNELS_PER_LAYER, KERNEL_S = 10, 3e-6  # in a replayed graph no kernel is shorter


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and completions: means, and the longest completion."""

    prompt: float
    response: float
    longest: int


@dataclass
class RlPrediction:
    """Seconds of one batch by part."""

    rollout_s: float
    log_prob_s: float
    update_s: float
    sync_s: float
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def step_time_s(self) -> float:
        return self.rollout_s + self.log_prob_s + self.update_s + self.sync_s

    def fields(self) -> dict[str, Any]:
        names = ("rollout_s", "log_prob_s", "update_s", "sync_s", "step_time_s")
        share = {"rollout_share": self.rollout_s / self.step_time_s, "notes": self.notes}
        return {name: getattr(self, name) for name in names} | share


def predict_batch(
    config: TrainRlConfig, model: ModelConfig, hardware: Hardware, lengths: Lengths, call_s: float
) -> RlPrediction:
    """Seconds of a batch on one device that does both roles; `call_s`: one Python call with its lines."""
    rows = config.prompts_per_batch * config.group_size
    rollout_s = predict_rollout(rows, config.rollout, model, hardware, lengths, call_s)
    update_s = predict_update(config, model, hardware, lengths)
    passes = (config.steps_per_batch > 1) + (config.algorithm.kl_coef > 0)
    log_prob_s = passes * update_s / config.epochs_per_batch / 3  # a forward pass is a third of a step's products
    parameters = count_parameters(model).total
    sync_s = 0.0
    if hardware.memory_bytes_per_s:
        sync_s = parameters * (4 + element_bytes(config.rollout, hardware)) / hardware.memory_bytes_per_s
    note = f"completions of {lengths.response:.0f} tokens, the longest {lengths.longest}, as before the first batch"
    return RlPrediction(rollout_s, log_prob_s, update_s, sync_s, {"rollout_s": note})


def element_bytes(rollout: RolloutConfig, hardware: Hardware) -> int:
    """Of the engine's weights."""
    dtype = rollout.dtype
    return 2 if dtype == "bfloat16" or (dtype == "auto" and hardware.device == "cuda") else 4


def predict_rollout(
    rows: int, rollout: RolloutConfig, model: ModelConfig, hardware: Hardware, lengths: Lengths, call_s: float
) -> float:
    """So many completions together, at most `rollout.max_running` of them at a time."""
    running = min(rows, rollout.max_running)
    matmul_flops = interpolate(hardware.rates.matmul, model.d_model)
    rates = DecodeRates(matmul_flops, hardware.memory_bytes_per_s or float("inf"))
    size = element_bytes(rollout, hardware)
    steps = lengths.longest + (rows - running) * lengths.response / running  # a free row is taken by who waits
    alive = rows * lengths.response / steps
    context = lengths.prompt + lengths.response / 2
    python = (CALLS_PER_STEP + CALLS_PER_TOKEN * alive) * call_s
    prefill = prefill_time(model, [round(lengths.prompt)] * rows, rates, size).seconds
    begin = rows * CALLS_PER_REQUEST * call_s
    if hardware.device == "cuda":
        device = decode_step_time(model, round(alive), context, rates, size).seconds
        device = max(device, model.num_layers * KERNELS_PER_LAYER * KERNEL_S)
        return prefill + begin + steps * max(device, python)
    device = cpu_step(model, alive, context, rates, size)
    operations = model.num_layers * OPERATIONS_PER_LAYER + OPERATIONS_PER_STEP
    return prefill + begin + steps * (device + python + operations * hardware.rates.op_overhead_s)


def cpu_step(model: ModelConfig, rows: float, context: float, rates: DecodeRates, element_bytes: int) -> float:
    """Seconds of a decoding step's products and passes over memory on a CPU."""
    cache = rows * (context + 1) * cache_bytes_per_token(model, element_bytes)
    moved = decode_weight_bytes(model, element_bytes) + CACHE_MOVES * cache + rows * model.vocab_size * SAMPLING_BYTES
    return decode_step_flops(model, round(rows), context) / rates.matmul_flops + moved / rates.memory_bytes


def predict_update(config: TrainRlConfig, model: ModelConfig, hardware: Hardware, lengths: Lengths) -> float:
    """All updates of a batch; the output layer is paid for sampled tokens alone."""
    seq_len = max(1, round(lengths.prompt + lengths.response))
    rows = config.prompts_per_batch * config.group_size // config.updates_per_batch
    micro = max(1, min(rows, config.micro_batch_tokens // seq_len))
    count = max(1, round(rows / micro))
    train = config.train_config(replace(model, max_seq_len=max(model.max_seq_len, seq_len)), "", config.dtype)
    data = replace(train.data, seq_len=seq_len)
    train = replace(train, data=data, micro_batch_size=micro, global_batch_tokens=micro * count * seq_len)
    step = predict_step_time(workload_of(train, hardware.device, 1), hardware.rates)
    sampled = lengths.response / seq_len
    device_s = step.device_s - (1 - sampled) * step.loss_s
    return config.steps_per_batch * max(device_s, step.host_s)
