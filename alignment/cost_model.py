"""What a batch of train_rl will take, from shapes, lengths and the device's constants, in seconds by part.

The rollout is alignment/cost_model_rollout's, updates are llm's step time with the mean length as the sequence. Beside
them the host grades completions, makes padded batches and copies weights, each by count. The lengths of completions are
those of the held-out problems before the first batch; neither the model nor the trainer is timed.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from alignment.cost_model_calibration import EngineRates, calibrate_engine
from alignment.cost_model_rollout import Device, Lengths, predict_rollout
from alignment.rollout import RolloutConfig
from alignment.train_rl_config import TrainRlConfig
from llm.args import ModelConfig
from llm.cost_model_counts import count_parameters, workload_of
from llm.cost_model_time import predict_step_time
from llm.hardware import Hardware
from llm.hardware_calibration import Points
from llm.model_loading import choose_dtype

# Counted in a profile: operations on small tensors for a completion that becomes a row of a batch, and for a tensor of
# the model that goes to the engine.
OPERATIONS_PER_SAMPLE, OPERATIONS_PER_TENSOR = 12, 5


@dataclass
class RlPrediction:
    """Seconds of one batch by part."""

    rollout_s: float
    reward_s: float
    log_prob_s: float
    update_s: float
    sync_s: float
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def step_time_s(self) -> float:
        return self.rollout_s + self.reward_s + self.log_prob_s + self.update_s + self.sync_s

    def fields(self) -> dict[str, Any]:
        names = ("rollout_s", "reward_s", "log_prob_s", "update_s", "sync_s", "step_time_s")
        share = {"rollout_share": self.rollout_s / self.step_time_s, "notes": self.notes}
        return {name: getattr(self, name) for name in names} | share


def device_of(hardware: Hardware, rollout: RolloutConfig) -> Device:
    """The hardware with its engine measured, in the engine's dtype."""
    device = torch.device(hardware.device)
    dtype = choose_dtype(rollout.dtype, device)
    rates = rates_of(device, dtype, hardware.rates.matmul, torch.get_num_threads())
    return Device(hardware, rates, torch.empty(0, dtype=dtype).element_size())


@lru_cache(maxsize=8)
def rates_of(device: torch.device, dtype: torch.dtype, matmul: Points, threads: int) -> EngineRates:
    """Measured once a process for each device, dtype and number of threads."""
    return calibrate_engine(device, dtype, matmul)


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
        reward_s=0.0,
        log_prob_s=log_prob_s,
        update_s=update_s,
        sync_s=moved / device.memory_bytes_per_s + tensors * OPERATIONS_PER_TENSOR * operation_s,
        notes={"rollout_s": note},
    )


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
