"""Our training step in its variants beside a plain PyTorch loop of the same model, in one run.

The plain loop is what a careful user writes: torch.nn modules, F.scaled_dot_product_attention, F.cross_entropy and
torch.optim.AdamW(fused=True), fp32 on a CPU; on a GPU bf16 autocast over fp32 weights, model and loss under
torch.compile (bench_mark_model_plain.py). All start from the same weights and see the same tokens; on a CPU their steps
alternate, because a shared machine drifts. Variants: bench_mark_model_variants.py.

    python -m bench_mark.bench_mark_model                                   # CPU: mew-1m and mew-12m, eager
    python -m bench_mark.bench_mark_model device=cuda models=[gpt-124m,350m,1b] variants=[fused-graph] \\
        steps=200 block=10
"""

import gc
import statistics
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from bench_mark.bench_mark_model_report import facts, print_head, print_row, write_document
from bench_mark.bench_mark_model_variants import (
    VARIANTS,
    Contestant,
    make_tokens,
    our_contestant,
    plain_contestant,
    workload_of_variant,
)
from configs.errors import UserError, check_choice, check_positive
from configs.loader import CONFIG_DIR, load_config, run_script, start_script
from llm.args import HardwareConfig, ModelConfig
from llm.cost_model import Workload, predict_workload
from llm.hardware import Hardware, detect_hardware
from llm.hardware_allocator import keep_freed_memory
from llm.metrics import comparison_rows, mfu
from llm.metrics_memory import PeakMemory
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
    variants: list[str] | None = None  # of VARIANTS; null: eager on a CPU, compiled and fused ones on a GPU
    plain_compile: str | None = None  # how the plain loop is compiled: none or model; null: model on a GPU
    steps: int = 20
    block: int = 1  # steps between two looks at the clock; the figure is the median of the blocks' means
    warmup: int = 5
    threads: int | None = None
    keep_freed_memory: bool = False  # ours and the plain loop alike, since both live in one process
    output: str = "bench_mark/results"
    hardware: HardwareConfig = field(default_factory=HardwareConfig)

    def __post_init__(self) -> None:
        check_choice("device", self.device, ("auto", "cpu", "cuda"))
        check_positive(steps=self.steps, block=self.block, warmup=self.warmup)
        if self.plain_compile is not None:
            check_choice("plain_compile", self.plain_compile, ("none", "model"))
        for name in self.models or []:
            check_choice("models", name, list(SHAPES))
        for name in self.variants or []:
            check_choice("variants", name, list(VARIANTS))


def load_model_config(name: str) -> ModelConfig:
    config = load_config(ModelConfig, OmegaConf.load(f"{CONFIG_DIR}/model/{name}.yaml"))
    return config.with_vocab_of(VOCAB_SIZES.get(name, 2))


def take_steps(contestants: list[Contestant], config: BenchmarkConfig, device: torch.device) -> None:
    """Warm up, measure one step's memory, then time steps in blocks that alternate between the contestants.

    The host waits for the device at the end of a block only, so that it may run ahead within one, as in training. A
    captured graph holds its memory for good and allocates nothing when it is replayed: there the warm-up is measured.
    """
    for contestant in contestants:
        with PeakMemory(device, contestant.tensors()) as warming:
            contestant.losses += [contestant.step().item() for _ in range(config.warmup)]
        with PeakMemory(device, contestant.tensors()) as memory:
            contestant.losses.append(contestant.step().item())
        contestant.peak_bytes = (warming if contestant.name.endswith("graph") else memory).peak_bytes
    for first in range(0, config.steps, config.block):
        count = min(config.block, config.steps - first)
        for contestant in contestants:
            start_s = time.perf_counter()
            losses = torch.stack([contestant.step() for _ in range(count)]).tolist()  # waits for the device
            contestant.seconds.append((time.perf_counter() - start_s) / count)
            contestant.losses += losses


def compete(work: Workload, names: list[str], config: BenchmarkConfig, mesh: Mesh) -> list[Contestant | None]:
    """The plain loop and our variants on the same windows; on a GPU one after the other, each with all its memory."""
    count = config.warmup + 1 + config.steps
    tokens = make_tokens(count, work.micro_batch_size, work.seq_len, work.model.vocab_size)
    if mesh.device.type == "cuda":
        tokens = tokens.pin_memory()  # else copying a window waits for the device
    builders = [plain_contestant] + [partial(our_contestant, name) for name in names]
    if mesh.device.type == "cpu":
        contestants = [build(work, mesh, tokens) for build in builders]
        take_steps(contestants, config, mesh.device)
        return contestants
    finished = []
    for build in builders:
        started_s, contestant = time.monotonic(), None
        try:
            contestant = build(work, mesh, tokens)
            take_steps([contestant], config, mesh.device)
            # The step holds the model; without it the next contestant has the GPU to itself.
            finished.append(replace(contestant, step=never, tensors=list))
            print(f"-- {contestant.name}: {time.monotonic() - started_s:.0f} s in all", flush=True)
        except Exception as error:  # whatever it is: one that fails leaves the others' figures
            print(f"-- {names[len(finished) - 1] if finished else 'plain torch'} failed: {error}", flush=True)
            finished.append(None)
        del contestant
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
    return finished


def never() -> Tensor:
    raise AssertionError("this contestant has finished")


def compare_losses(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """How far two loss curves lie apart, relative: the means of their last fifths, and the largest gap once smoothed.

    Single steps of a falling loss part by rounding alone; a window of a tenth of the steps shows what is left.
    """
    window, tail = max(1, len(ours) // 10), max(1, len(ours) // 5)
    means = [[statistics.fmean(x[i : i + window]) for i in range(len(x) - window + 1)] for x in (ours, theirs)]
    last = [statistics.fmean(x[-tail:]) for x in (ours, theirs)]
    return {
        "last_fifth": abs(last[0] - last[1]) / last[1],
        "smoothed": max(abs(a - b) / b for a, b in zip(*means, strict=True)),
        "steps": len(ours),
    }


def describe(contestant: Contestant, work: Workload, predicted: dict[str, Any], hardware: Hardware) -> dict[str, Any]:
    """What a contestant needed, as printed and as it goes into the JSON document."""
    step_s = statistics.median(contestant.seconds)
    tokens_per_s = work.tokens / step_s
    used = mfu(predicted["flops_per_token"], tokens_per_s, hardware.peak_flops(work.dtype))
    measured = {"parameters": predicted["parameters"], "memory_peak_bytes": contestant.peak_bytes,
                "step_s": step_s, "tokens_per_s": tokens_per_s, "mfu": used}  # fmt: skip
    is_ours = contestant.name in VARIANTS
    rows = comparison_rows(predicted if is_ours else {}, measured)[1:]
    return {"rows": rows, "step_s": step_s, "mfu": used, "seconds": contestant.seconds, "losses": contestant.losses}


def measure(
    name: str, work: Workload, names: list[str], hardware: Hardware, config: BenchmarkConfig, mesh: Mesh
) -> dict[str, Any]:
    """Predict, compete, print the rows; the result as it goes into the JSON document."""
    plain, *ours = compete(work, names, config, mesh)
    result: dict[str, Any] = {"model": name, "batch": [work.micro_batch_size, work.seq_len]}
    result["failed"] = [own for own, contestant in zip(names, ours, strict=True) if contestant is None]
    ours = [contestant for contestant in ours if contestant is not None]
    for contestant in (plain, *ours):
        own = work if contestant is plain else workload_of_variant(work, VARIANTS[contestant.name])
        predicted = predict_workload(own, hardware)
        described = result[contestant.name] = describe(contestant, work, predicted, hardware)
        for row in described["rows"]:
            print_row(name, contestant.name, row, predicted["bound"] if contestant is not plain else "")
        if contestant is plain:
            continue
        described["predicted"] = predicted
        described["speed_ratio"] = result["plain torch"]["step_s"] / described["step_s"]
        gaps = described["loss_gaps"] = compare_losses(contestant.losses, plain.losses)
        described["losses_agree"] = gaps["last_fifth"] < LOSS_TOLERANCE[work.dtype]
        print(
            f"{name}, {contestant.name}: {described['speed_ratio']:.3f} x the plain loop's tokens/s; losses of "
            f"{gaps['steps']} steps: last fifth within {gaps['last_fifth']:.1e}, smoothed within "
            f"{gaps['smoothed']:.1e}{'' if described['losses_agree'] else ', WHICH IS TOO MUCH'}"
        )
    nudged = [contestant for contestant in ours if VARIANTS[contestant.name].nudge]
    for contestant in nudged:  # the same arithmetic from weights a rounding away: what rounding alone does
        twin = next((other for other in ours if other.name == contestant.name.removesuffix("-nudged")), plain)
        gaps = result[contestant.name]["noise"] = compare_losses(contestant.losses, twin.losses)
        print(f"{name}: {contestant.name} against {twin.name}: {gaps['last_fifth']:.1e}, {gaps['smoothed']:.1e}")
    return result


def benchmark(config: BenchmarkConfig) -> dict[str, Any]:
    """Measure every model in every variant; writes and prints the results."""
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
    variants = config.variants or (["compiled", "fused", "fused-graph", "mixed"] if device == "cuda" else ["eager"])
    names = config.models or (["gpt-124m", "350m", "1b"] if device == "cuda" else ["mew-1m", "mew-12m"])
    plain_compile = config.plain_compile or ("model" if device == "cuda" else "none")
    result: dict[str, Any] = {"facts": known, "results": []}
    for name in names:
        work = Workload(load_model_config(name), *SHAPES[name], device=device, dtype=dtype, compile=plain_compile)
        result["results"].append(measure(name, work, variants, hardware, config, mesh))
        # After each model, so that a run cut short leaves what it has.
        write_document(result, Path(config.output) / f"model_{device}.json")
    close_mesh(mesh)
    rows = [row for found in result["results"] for row in found.values() if isinstance(row, dict)]
    if not all(row.get("losses_agree", True) for row in rows) or any(found["failed"] for found in result["results"]):
        raise UserError("a variant failed, or its losses lie too far from the plain loop's; see the lines above")
    return result


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="bench_mark_model")
def main(config: DictConfig) -> None:
    run_script(benchmark, BenchmarkConfig, config)


if __name__ == "__main__":
    start_script(main, BenchmarkConfig, "bench_mark_model")
