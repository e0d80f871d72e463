"""Our training step beside a plain PyTorch loop of the same model, in one run.

The plain loop is what a careful user writes: torch.nn modules, F.scaled_dot_product_attention, F.cross_entropy and
torch.optim.AdamW(fused=True), fp32 on a CPU, bf16 autocast over fp32 weights on a GPU (bench_mark_model_plain.py). Both
start from the same weights and see the same tokens; on a CPU their steps alternate, because a shared machine drifts.

    python -m bench_mark.bench_mark_model                                   # CPU: mew-1m and mew-12m, eager
    python -m bench_mark.bench_mark_model device=cuda models=[gpt-124m,350m,1b]
"""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.nn import functional as F

from bench_mark.bench_mark_model_plain import PlainModel, plain_optimizer
from bench_mark.bench_mark_model_report import facts, print_head, print_row, write_results
from configs.errors import UserError, check_choice, check_positive
from configs.loader import CONFIG_DIR, load_config, run_script
from llm.args import DataConfig, HardwareConfig, ModelConfig, TrainConfig
from llm.cost_model import Workload, predict_workload
from llm.data_loader import Batch
from llm.hardware import Hardware, detect_hardware
from llm.hardware_allocator import keep_freed_memory
from llm.loss import CrossEntropyLoss
from llm.metrics import comparison_rows, mfu
from llm.metrics_memory import PeakMemory, held_tensors
from llm.parallelize import make_forward_loss, parallelize
from llm.schedule import ScheduleConfig
from llm.training_step import TrainingStep
from llm.transformer import Transformer
from llm.transformer_init import initialise
from parallel.mesh import Mesh, close_mesh, init_mesh

# micro-batch and sequence length of each model, of DESIGN.md's table where it has one
SHAPES = {"mew-1m": (32, 128), "mew-12m": (8, 256), "gpt-124m": (32, 1024), "350m": (16, 2048), "1b": (4, 4096)}
VOCAB_SIZES = {"mew-1m": 2048, "mew-12m": 4096}  # for the shapes that take the tokenizer's
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


@dataclass
class BenchmarkConfig:
    """What to measure; null means what suits the device."""

    device: str = "auto"
    models: list[str] | None = None
    compile: list[str] | None = None  # of none, block, model; null: none on a CPU, none and model on a GPU
    steps: int = 20
    warmup: int = 5
    threads: int | None = None
    keep_freed_memory: bool = False  # ours and the plain loop alike, since both live in one process
    output: str = "bench_mark/results"
    hardware: HardwareConfig = field(default_factory=HardwareConfig)

    def __post_init__(self) -> None:
        check_choice("device", self.device, ("auto", "cpu", "cuda"))
        check_positive(steps=self.steps, warmup=self.warmup)
        unknown = sorted(set(self.models or []) - SHAPES.keys())
        if unknown:
            raise UserError(f"models={unknown} have no batch shape here; use some of {sorted(SHAPES)}")


@dataclass
class Contestant:
    """A training step that can be taken again and again, and what it was seen to need."""

    name: str
    step: Callable[[], Tensor]  # takes one optimizer step, returns the loss
    tensors: Callable[[], list[Tensor]]  # what it holds between steps
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0


def load_model_config(name: str) -> ModelConfig:
    config = load_config(ModelConfig, OmegaConf.load(f"{CONFIG_DIR}/model/{name}.yaml"))
    return config.with_vocab_of(VOCAB_SIZES.get(name, 2))


def train_config(work: Workload) -> TrainConfig:
    """One micro-batch a step at a constant rate, clipped at norm 1; the plain loop does the same."""
    config = TrainConfig(
        name="benchmark", dtype=work.dtype, model=work.model, micro_batch_size=work.micro_batch_size,
        global_batch_tokens=work.tokens, data=DataConfig(seq_len=work.seq_len),
        schedule=ScheduleConfig(name="constant", warmup_steps=0),
    )  # fmt: skip
    return replace(config, compile=work.compile)


def our_contestant(work: Workload, mesh: Mesh, token_ids: Tensor) -> Contestant:
    """The step of llm.training on windows (B, T + 1)."""
    model = Transformer(work.model)
    initialise(model, seed=0)
    model.to(mesh.device)
    config = train_config(work)
    parts = parallelize(model, config, mesh)
    training_step = TrainingStep(config, mesh, parts, make_forward_loss(model, CrossEntropyLoss(), parts.compile))
    batch = Batch(token_ids[:, :-1].contiguous(), token_ids[:, 1:].contiguous(), work.tokens)

    def step() -> Tensor:
        result = training_step.run(0, [batch])
        return result.loss_sum / result.num_targets

    return Contestant("mew", step, lambda: [*held_tensors(model, parts.optimizer), batch.token_ids, batch.targets])


def plain_contestant(work: Workload, mesh: Mesh, token_ids: Tensor) -> Contestant:
    """The plain loop from the same weights, compiled as a whole where ours is compiled."""
    ours = Transformer(work.model)
    initialise(ours, seed=0)
    model = PlainModel(work.model, work.seq_len)
    model.copy_weights(ours)
    model.to(mesh.device)
    rates = train_config(work).optimizer
    optimizer = plain_optimizer(model, rates.lr, rates.weight_decay, (rates.beta1, rates.beta2))
    forward = torch.compile(model) if work.compile != "none" else model
    inputs = token_ids[:, :-1].contiguous().to(mesh.device)
    targets = token_ids[:, 1:].contiguous().to(mesh.device)

    def step() -> Tensor:
        with torch.autocast(mesh.device.type, torch.bfloat16, enabled=work.dtype == "bfloat16"):
            loss = F.cross_entropy(forward(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), rates.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Contestant("plain torch", step, lambda: [*held_tensors(model, optimizer), inputs, targets])


def take_steps(contestants: list[Contestant], config: BenchmarkConfig, device: torch.device) -> None:
    """Warm up, measure one step's memory, then time steps that alternate between the contestants."""
    for contestant in contestants:
        for _ in range(config.warmup):
            contestant.losses.append(contestant.step().item())
        with PeakMemory(device, contestant.tensors()) as memory:
            contestant.losses.append(contestant.step().item())
        contestant.peak_bytes = memory.peak_bytes
    for _ in range(config.steps):
        for contestant in contestants:
            start_s = time.perf_counter()
            loss = contestant.step().item()  # waits for the device
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            contestant.seconds.append(time.perf_counter() - start_s)
            contestant.losses.append(loss)


def compete(work: Workload, config: BenchmarkConfig, mesh: Mesh) -> list[Contestant]:
    """Both contestants on the same windows. A GPU takes them one after the other, so that memory is each one's own."""
    generator = torch.Generator().manual_seed(0)
    shape = (work.micro_batch_size, work.seq_len + 1)
    token_ids = torch.randint(work.model.vocab_size, shape, generator=generator)
    if mesh.device.type == "cpu":
        contestants = [build(work, mesh, token_ids) for build in (our_contestant, plain_contestant)]
        take_steps(contestants, config, mesh.device)
        return contestants
    finished = []
    for build in (our_contestant, plain_contestant):
        contestant = build(work, mesh, token_ids)
        take_steps([contestant], config, mesh.device)
        # The step holds the model; without it the next contestant has the GPU to itself.
        finished.append(replace(contestant, step=never, tensors=list))
        del contestant
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
    return finished


def never() -> Tensor:
    raise AssertionError("this contestant has finished")


def check_losses(contestants: list[Contestant], dtype: str) -> float:
    """The largest relative difference of the two losses over the first steps; AssertionError when too large."""
    ours, plain = (contestant.losses[:5] for contestant in contestants)
    difference = max(abs(a - b) / b for a, b in zip(ours, plain, strict=True))
    assert difference < LOSS_TOLERANCE[dtype], f"losses {ours} and {plain} differ by {difference:.1e}"
    return difference


def measure(name: str, work: Workload, hardware: Hardware, config: BenchmarkConfig, mesh: Mesh) -> dict[str, Any]:
    """Predict, compete, print the rows; the result as it goes into the JSON document."""
    predicted = predict_workload(work, hardware)
    contestants = compete(work, config, mesh)
    difference = check_losses(contestants, work.dtype)
    result: dict[str, Any] = {"model": name, "compile": work.compile, "batch": [work.micro_batch_size, work.seq_len]}
    for contestant in contestants:
        step_s = statistics.median(contestant.seconds)
        tokens_per_s = work.tokens / step_s
        used = mfu(predicted["flops_per_token"], tokens_per_s, hardware.peak_flops(work.dtype))
        measured = {"parameters": predicted["parameters"], "memory_peak_bytes": contestant.peak_bytes,
                    "step_s": step_s, "tokens_per_s": tokens_per_s, "mfu": used}  # fmt: skip
        is_ours = contestant.name == "mew"
        rows = comparison_rows(predicted if is_ours else {}, measured)[1:]
        for row in rows:
            print_row(name, f"{contestant.name}, {work.compile}", row, predicted["bound"] if is_ours else "")
        result[contestant.name] = {"rows": rows, "seconds": contestant.seconds, "losses": contestant.losses[:5]}
    ours, plain = (statistics.median(contestant.seconds) for contestant in contestants)
    print(f"{name}, {work.compile}: {plain / ours:.3f} x the plain loop's tokens/s; losses within {difference:.1e}")
    return result | {"speed_ratio": plain / ours, "loss_difference": difference, "predicted": predicted}


def benchmark(config: BenchmarkConfig) -> dict[str, Any]:
    """Measure every model in every compile mode; writes and prints the results."""
    mesh = init_mesh(config.device)
    if config.threads:
        torch.set_num_threads(config.threads)
    if config.keep_freed_memory:
        keep_freed_memory()
    device = mesh.device.type
    torch.set_float32_matmul_precision("high" if device == "cuda" else "highest")  # as llm.training does
    dtype = "bfloat16" if device == "cuda" else "float32"
    hardware = detect_hardware(config.hardware, mesh.device)
    known = facts(hardware, dtype)
    print_head(known)
    modes = config.compile or (["none", "model"] if device == "cuda" else ["none"])
    names = config.models or (["gpt-124m", "350m", "1b"] if device == "cuda" else ["mew-1m", "mew-12m"])
    results = []
    for name in names:
        for mode in modes:
            work = Workload(load_model_config(name), *SHAPES[name], device=device, dtype=dtype, compile=mode)
            results.append(measure(name, work, hardware, config, mesh))
    close_mesh(mesh)
    result = {"facts": known, "results": results}
    write_results(result, config.output, device)
    return result


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="bench_mark_model")
def main(config: DictConfig) -> None:
    run_script(benchmark, BenchmarkConfig, config)


if __name__ == "__main__":
    main()
