"""The largest micro_batch_size that fits in memory: predicted first, then tried.

On a GPU each size takes real optimizer steps on random tokens until torch runs out of memory, doubling from the
prediction and then halving the gap. On a CPU, where running out ends the process, the live tensor bytes of two small
sizes are measured and drawn out in a straight line to the limit.

    python -m llm.training_probe model=gpt-124m seq_len=1024 compile=model
    python -m llm.training_probe model=mew-12m device=cpu limit_bytes=2e9
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import hydra
import torch
from omegaconf import DictConfig

from configs.errors import UserError, check_choice, check_positive
from configs.loader import CONFIG_DIR, run_script, start_script
from configs.report_numbers import format_quantity
from llm.args import HardwareConfig, ModelConfig
from llm.cost_model import Workload, predict_memory
from llm.hardware import available_memory_bytes
from llm.loss import CrossEntropyLoss
from llm.metrics_memory import PeakMemory, held_tensors
from llm.optimizer import OptimizerConfig, build_optimizer, clip_gradients
from llm.parallelize import apply_compile, make_forward_loss
from llm.transformer import Transformer
from llm.transformer_init import initialise
from parallel.mesh import close_mesh, init_mesh

STEPS = 2  # the first makes the optimizer's state, so only the second has the peak
CPU_SIZES = (4, 8)  # smaller ones may have their peak in the optimizer, which does not grow with the batch
HEADROOM = 0.97  # of what is free: what the allocator cannot use because it lies in pieces


@dataclass
class ProbeConfig:
    """What to fit, and into how much."""

    seq_len: int = 128
    vocab_size: int = 32768  # where the model's own is null
    device: str = "auto"
    dtype: str = "auto"
    compile: str = "none"
    grad_accum_steps: int = 1  # more than one keeps gradients during forward
    limit_bytes: float | None = None  # null: what the device has free
    most: int = 4096  # sequences; the search goes no further
    model: ModelConfig = "???"  # from its group file
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)

    def __post_init__(self) -> None:
        check_choice("device", self.device, ("auto", "cpu", "cuda"))
        check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16"))
        check_choice("compile", self.compile, ("none", "block", "model"))
        check_positive(seq_len=self.seq_len, vocab_size=self.vocab_size, most=self.most)
        check_positive(grad_accum_steps=self.grad_accum_steps, limit_bytes=self.limit_bytes or 1)
        if self.seq_len > self.model.max_seq_len:
            raise UserError(
                f"seq_len={self.seq_len} must not exceed model.max_seq_len={self.model.max_seq_len}; "
                f"lower it or raise model.max_seq_len"
            )


def search_largest(fits: Callable[[int], bool], guess: int, most: int) -> int:
    """The largest size in 0..most for which fits(size), which must be true up to some size and false beyond.

    Starts at `guess`, walks away from it in growing strides to find both sides of the border, then halves the gap.
    """
    low, high = 0, most + 1
    size, stride = min(max(guess, 1), most), max(1, guess // 16)
    while low + 1 < high:
        if fits(size):
            low, size = size, size + stride
        else:
            high, size = size, size - stride
        stride *= 2
        if not low < size < high or (low > 0 and high <= most):
            size = (low + high) // 2
    return low


def predicted_bytes(work: Workload, size: int) -> int:
    return predict_memory(replace(work, micro_batch_size=size)).peak_bytes


class Trial:
    """A model that takes steps at any micro-batch size and says what they needed."""

    def __init__(self, config: ProbeConfig, work: Workload, device: torch.device):
        self.work, self.device = work, device
        self.model = Transformer(work.model)
        initialise(self.model, seed=0)
        self.model.to(device)
        self.optimizer = build_optimizer(self.model.named_parameters(), config.optimizer)
        compile_mode = apply_compile(self.model, work.compile, device)
        self.forward_loss = make_forward_loss(self.model, CrossEntropyLoss(), compile_mode)

    def take_step(self, size: int) -> None:
        shape = (size, self.work.seq_len)
        for _ in range(min(self.work.grad_accum_steps, 2)):  # the second already finds gradients
            token_ids = torch.randint(self.work.model.vocab_size, shape, device=self.device)
            batch = RandomBatch(token_ids, token_ids)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.work.dtype == "bfloat16"):
                sums = self.forward_loss(batch)
            (sums.loss_sum / token_ids.numel()).backward()
        clip_gradients(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def peak_bytes(self, size: int) -> int:
        """Bytes of a step at this size; raises torch.OutOfMemoryError on a GPU that lacks them."""
        for _ in range(STEPS - 1):
            self.take_step(size)
        with PeakMemory(self.device, held_tensors(self.model, self.optimizer)) as memory:
            self.take_step(size)
        return memory.peak_bytes


@dataclass
class RandomBatch:
    """What make_forward_loss reads of a batch, filled with random tokens."""

    token_ids: torch.Tensor
    targets: torch.Tensor
    token_positions: torch.Tensor | None = None
    doc_ids: torch.Tensor | None = None


def try_on_gpu(trial: Trial, size: int, limit_bytes: float) -> int | None:
    """Measured peak at this size, or None where it does not fit."""
    try:
        peak = trial.peak_bytes(size)
    except torch.OutOfMemoryError:
        peak = None
    trial.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    return peak if peak is not None and peak <= limit_bytes else None


def measured_line(trial: Trial, guess: int) -> Callable[[int], float]:
    """Bytes as a straight line through two measured sizes: what does not grow with the batch, and what does."""
    sizes = CPU_SIZES if guess >= CPU_SIZES[1] else (max(1, guess // 2), max(2, guess))
    peaks = [trial.peak_bytes(size) for size in sizes]
    for size, peak in zip(sizes, peaks, strict=True):
        print_trial(size, predicted_bytes(trial.work, size), peak)
    slope = (peaks[1] - peaks[0]) / (sizes[1] - sizes[0])
    return lambda size: peaks[0] + slope * (size - sizes[0])


def print_trial(size: int, predicted: float, measured: float | None, note: str = "") -> None:
    ratio = f"{measured / predicted:.2f}" if measured is not None else "–"
    seen = format_quantity(measured, "bytes") if measured is not None else "out of memory"
    print(f"{size:>10} {format_quantity(predicted, 'bytes'):>12} {seen:>14} {ratio:>6}  {note}")


def probe(config: ProbeConfig) -> dict[str, Any]:
    """Print each tried size and the answer; returns predicted and measured largest sizes and the limit."""
    mesh = init_mesh(config.device)
    device = mesh.device
    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if device.type == "cuda" else "float32"
    model = config.model if config.model.vocab_size else config.model.with_vocab_of(config.vocab_size)
    work = Workload(
        model, 1, config.seq_len, config.optimizer.name, config.grad_accum_steps, device.type, dtype, config.compile
    )
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory_bytes()
    limit = config.limit_bytes or HEADROOM * free
    guess = search_largest(lambda size: predicted_bytes(work, size) <= limit, 8, config.most)
    print(f"limit {format_quantity(limit, 'bytes')}; predicted largest micro_batch_size {guess}")
    print(f"{'size':>10} {'predicted':>12} {'measured':>14} {'ratio':>6}")
    trial = Trial(config, work, device)
    if device.type == "cpu":
        line = measured_line(trial, guess)

    def fits(size: int) -> bool:
        if device.type == "cpu":
            print_trial(size, predicted_bytes(work, size), line(size), "drawn out from the sizes above")
            return line(size) <= limit
        measured = try_on_gpu(trial, size, limit)
        print_trial(size, predicted_bytes(work, size), measured)
        return measured is not None

    largest = search_largest(fits, guess, config.most)
    close_mesh(mesh)
    if largest == 0:
        raise UserError(
            f"not one sequence of seq_len={config.seq_len} fits into limit_bytes={limit:.3g}; "
            f"lower seq_len or take a smaller model"
        )
    print(f"largest micro_batch_size {largest} (predicted {guess})")
    return {"largest": largest, "predicted_largest": guess, "limit_bytes": limit}


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="training_probe")
def main(config: DictConfig) -> None:
    run_script(probe, ProbeConfig, config)


if __name__ == "__main__":
    start_script(main, ProbeConfig, "training_probe")
