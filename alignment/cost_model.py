"""What a batch of train_rl will take, from shapes, lengths and the device's constants, in seconds by part.

The rollout is alignment/cost_model_rollout's, updates are llm's step time over the padded micro-batches that the
lengths make. Beside them the host makes batches and copies weights, each by count; grading is not predicted. Lengths
are those of the held-out problems before the first batch; neither the model nor the trainer is timed.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from alignment.cost_model_calibration import EngineRates, Setting, calibrate_engine
from alignment.cost_model_rollout import Device, Lengths, draw_lengths, predict_rollout
from alignment.rollout import RolloutConfig
from alignment.train_rl_batch import PADDING, cut_micro_batches
from alignment.train_rl_config import TrainRlConfig
from llm.args import ModelConfig
from llm.bpe_tokenizer import Tokenizer
from llm.cost_model_counts import count_parameters, workload_of
from llm.cost_model_time import output_product_s, predict_step_time
from llm.hardware import Hardware
from llm.hardware_calibration import Rates, pass_time
from llm.loss import CPU_CHUNK_ELEMENTS
from llm.model_loading import choose_dtype

# Counted in a profile: operations on small tensors for a completion that becomes a row of a batch, and for a tensor of
# the model that goes to the engine.
OPERATIONS_PER_SAMPLE, OPERATIONS_PER_TENSOR = 12, 5


@dataclass
class RlPrediction:
    """Seconds of one batch by part; grading, one part in a hundred, is left out."""

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


def device_of(hardware: Hardware, rollout: RolloutConfig, tokenizer: Tokenizer) -> Device:
    """The hardware with its engine measured, in the engine's dtype."""
    device = torch.device(hardware.device)
    at = Setting(device, choose_dtype(rollout.dtype, device), hardware.rates.matmul, tokenizer)
    return Device(hardware, rates_of(at, torch.get_num_threads()), torch.empty(0, dtype=at.dtype).element_size())


@lru_cache(maxsize=8)
def rates_of(at: Setting, threads: int) -> EngineRates:
    """Measured once a process for each setting and number of threads."""
    return calibrate_engine(at)


def predict_batch(config: TrainRlConfig, model: ModelConfig, device: Device, lengths: Lengths) -> RlPrediction:
    """Seconds of a batch on one device that does both roles."""
    rows = config.prompts_per_batch * config.group_size
    operation_s = device.hardware.rates.op_overhead_s
    update_s = predict_update(config, model, device.hardware, lengths)
    passes = (config.steps_per_batch > 1) + (config.algorithm.kl_coef > 0)
    # A forward pass is a third of a step's products.
    log_prob_s = passes * update_s / config.epochs_per_batch / 3 + rows * OPERATIONS_PER_SAMPLE * operation_s
    tensors = 9 * model.num_layers + 3
    moved = count_parameters(model).total * (4 + device.element_bytes)
    note = f"completions of {lengths.response:.0f} tokens, the longest {lengths.longest}, as before the first batch"
    return RlPrediction(
        rollout_s=predict_rollout(rows, config.rollout, model, device, lengths),
        log_prob_s=log_prob_s,
        update_s=update_s,
        sync_s=moved / device.memory_bytes_per_s + tensors * OPERATIONS_PER_TENSOR * operation_s,
        notes={"rollout_s": note},
    )


def predict_update(config: TrainRlConfig, model: ModelConfig, hardware: Hardware, lengths: Lengths) -> float:
    """All updates of a batch; the output layer is paid for sampled tokens alone."""
    rows = config.prompts_per_batch * config.group_size // config.updates_per_batch
    padded, count = padded_tokens(rows, config.micro_batch_tokens, lengths)
    micro = max(1, round(rows / count))
    seq_len = max(1, round(padded / (micro * count)))
    train = config.train_config(replace(model, max_seq_len=max(model.max_seq_len, seq_len)), "", config.dtype)
    data = replace(train.data, seq_len=seq_len)
    train = replace(train, data=data, micro_batch_size=micro, global_batch_tokens=micro * count * seq_len)
    work = workload_of(train, hardware.device, 1)
    step = predict_step_time(work, hardware.rates)
    sampled = rows * lengths.response / padded
    unused_s = (1 - sampled) * 3 * count * output_product_s(work, hardware.rates)
    policy_s = policy_loss_seconds(sampled * count * micro * seq_len * model.vocab_size, hardware, config.dtype)
    return config.steps_per_batch * max(step.device_s - step.loss_s - unused_s + policy_s, step.host_s)


def padded_tokens(rows: int, max_tokens: int, lengths: Lengths) -> tuple[int, int]:
    """Tokens of all micro-batches, padding included, and how many they are, cut as the learner cuts them."""
    pairs = zip(draw_lengths(lengths.prompts, rows, seed=1), draw_lengths(lengths.responses, rows), strict=True)
    tokens = sorted((prompt + response - 1 for prompt, response in pairs), reverse=True)
    cut = cut_micro_batches(range(rows), tokens, max_tokens)
    return sum(len(group) * -(-max(tokens[group[0]], 1) // PADDING) * PADDING for group in cut), len(cut)


def policy_loss_seconds(scores: float, hardware: Hardware, dtype: str) -> float:
    """Log-probs with their gradient and the entropy of so many scores, as alignment/grpo_log_probs passes over them.

    On a GPU 25 passes of a float32 tensor and four of the logits'; on a CPU, in chunks that the cache holds, four of
    exponentials and eight others, and the logits from memory and back.
    """
    rates: Rates = hardware.rates
    if hardware.device == "cuda":
        return pass_time(rates.new_pass, (25 * 4 + 4 * 4 + 4 * (2 if dtype == "bfloat16" else 4)) * scores)
    chunks = max(1.0, scores / CPU_CHUNK_ELEMENTS)
    chunk_bytes = 2 * 4 * scores / chunks
    inside = 4 * pass_time(rates.exp_pass, chunk_bytes) + 8 * pass_time(rates.inplace_pass, chunk_bytes)
    return chunks * inside + pass_time(rates.new_pass, 4 * 4 * scores)
