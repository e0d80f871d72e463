"""Where a decoding step's time goes: the kernels of a few steps, and the configurations of the matrix-vector kernels.

python -m bench_mark.bench_mark_engine_profile --out profile.json     # on a GPU
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench_mark.bench_mark_engine import GREEDY, build_model, make_prompts
from kernel.few_rows import FewRowsConfig, ProductConfig
from llm.engine import Engine, EngineConfig, RequestParams
from llm.transformer import Transformer

STEPS = 20
# (elements that a program asks for at once, warps, overlap)
SWEPT = [
    (8192, 4, True), (8192, 4, False), (4096, 4, True), (16384, 4, True), (16384, 8, True), (32768, 8, True),
    (4096, 2, True), (8192, 8, True), (8192, 2, True),
]  # fmt: skip


def decoding_engine(model: Transformer, count: int) -> Engine:
    """An engine whose `count` requests have their prompts behind them and many tokens to go."""
    rows = max(2, count)  # so that there are buffers for few rows
    engine = Engine(model, EngineConfig(max_running=rows, max_seq_len=512, prefill_chunk=16384, prefix_sharing=False))
    for prompt in make_prompts(count, [128], model.config.vocab_size, count):
        engine.submit(prompt, RequestParams(GREEDY, max_new_tokens=300))
    while engine.scheduler.waiting or any(request.prefilling for request in engine.scheduler.running):
        engine.step()
    for _ in range(5):
        engine.step()
    return engine


def step_seconds(engine: Engine) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / STEPS


def profile_steps(engine: Engine) -> dict[str, Any]:
    """Microseconds a step by the clock, of the host alone, and of each kernel."""
    seconds = step_seconds(engine)
    start = time.process_time()
    step_seconds(engine)
    host = (time.process_time() - start) / STEPS
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step_seconds(engine)
    kernels = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    found = [
        {"kernel": event.key[:90], "calls": event.count / STEPS, "us": event.self_device_time_total / STEPS}
        for event in kernels[:25]
    ]
    busy = sum(event.self_device_time_total for event in kernels) / STEPS
    return {"step_us": 1e6 * seconds, "host_cpu_us": 1e6 * host, "kernels_us": busy, "kernels": found}


def without_few_rows(engine: Engine) -> Engine:
    """The engine with steps by the model's own layers in place of kernel/few_rows."""
    engine.runner.few = None
    engine.runner.graphs.captured.clear()
    for _ in range(3):
        engine.step()
    return engine


def few_rows_variants(base: FewRowsConfig) -> dict[str, FewRowsConfig]:
    """The default and what differs from it in one place."""
    found = {"default": base}
    tiles = {
        "qkv": [(64, 64, 2, 5), (64, 128, 3, 3)],
        "out": [(64, 64, 4, 5), (64, 128, 4, 4)],
        "gated": [(64, 64, 1, 8), (64, 128, 1, 3)],
        "down": [(64, 64, 4, 5), (64, 128, 4, 6), (64, 64, 8, 5)],
        "scores": [(128, 128, 1, 3)],
    }  # block_n, block_c, parts, stages
    for name, choices in tiles.items():
        found |= {f"{name} {tile}": replace(base, **{name: ProductConfig(*tile)}) for tile in choices}
    for block_s, warps, registers in ((32, 4, None), (64, 4, 128), (32, 2, None), (128, 8, None)):
        changed = dict(block_s=block_s, attend_warps=warps, attend_registers=registers)
        found[f"attention {tuple(changed.values())}"] = replace(base, **changed)
    found["no overlap"] = replace(base, pdl=False)
    return found


def sweep_few_rows(model: Transformer, count: int) -> dict[str, float]:
    """Microseconds of a step of `count` rows with each variant."""
    times: dict[str, float] = {}
    variants = few_rows_variants(decoding_engine(model, 1).runner.few.config)
    for name, config in variants.items():
        times[name] = few_rows_us(model, count, config)
        print(f"  {times[name]:8.1f} us  {name}", flush=True)
    return times


def few_rows_us(model: Transformer, count: int, config: FewRowsConfig) -> float:
    engine = decoding_engine(model, count)
    engine.runner.few.config, engine.runner.few.sums = config, None
    engine.runner.graphs.captured.clear()
    for _ in range(3):
        engine.step()
    return 1e6 * min(step_seconds(engine) for _ in range(2))


def profile_prefill(model: Transformer, count: int, length: int) -> dict[str, Any]:
    """The same of one step that computes `count` prompts of `length` tokens."""
    engine = Engine(model, EngineConfig(max_running=count, max_seq_len=512, prefill_chunk=16384, prefix_sharing=False))
    prompts = make_prompts(count, [length], model.config.vocab_size, count)
    params = RequestParams(GREEDY, max_new_tokens=1)
    engine.generate(prompts, params)
    torch.cuda.synchronize()
    start = time.perf_counter()
    engine.generate(prompts, params)
    seconds = time.perf_counter() - start
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        engine.generate(prompts, params)
        torch.cuda.synchronize()
    kernels = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    found = [
        {"kernel": event.key[:90], "calls": event.count, "us": event.self_device_time_total} for event in kernels[:15]
    ]
    busy = sum(event.self_device_time_total for event in kernels)
    return {"step_us": 1e6 * seconds, "kernels_us": busy, "kernels": found}


def sweep_matvec(model: Transformer) -> list[dict[str, Any]]:
    """Microseconds of a step at batch 1 with each configuration of the matrix-vector kernels."""
    rows = []
    for tile, warps, pdl in SWEPT:
        engine = decoding_engine(model, 1)
        engine.runner.single.config = replace(engine.runner.single.config, tile=tile, warps=warps, pdl=pdl)
        engine.runner.graphs.captured.clear()
        for _ in range(3):
            engine.step()
        rows.append({"tile": tile, "warps": warps, "pdl": pdl, "step_us": 1e6 * step_seconds(engine)})
        print(rows[-1], flush=True)
    return rows


def note(document: dict[str, Any], name: str, row: dict[str, Any]) -> None:
    """Keep and print one profile."""
    document[name] = row
    print(
        f"{name}: step {row['step_us']:.0f} us, kernels {row['kernels_us']:.0f}, host {row.get('host_cpu_us', 0):.0f}"
    )
    for one in row["kernels"]:
        print(f"  {one['us']:8.1f} us {one['calls']:6.1f}  {one['kernel']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sweep", type=int, nargs="*", default=[], help="numbers of rows whose kernels' tiles to time")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA GPU and none was found; run it on one")
    model = build_model("1b", torch.device("cuda"), torch.bfloat16)
    document: dict[str, Any] = {}
    for count in (1, 64, 256):
        note(document, f"decode {count}", profile_steps(decoding_engine(model, count)))
    plain = without_few_rows(decoding_engine(model, 64))
    note(document, "decode 64 by the model's layers", profile_steps(plain))
    for count, length in ((1, 128), (64, 128), (128, 128)):
        note(document, f"prefill {count}x{length}", profile_prefill(model, count, length))
    for count in arguments.sweep:
        print(f"variants of a step of {count} rows")
        document[f"sweep {count}"] = sweep_matvec(model) if count == 1 else sweep_few_rows(model, count)
    if arguments.out:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
