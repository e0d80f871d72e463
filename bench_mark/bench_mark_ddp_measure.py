"""How the contestants of bench_mark_ddp are measured: memory of one warm step each, then steps that alternate."""

import gc
import time
from typing import Any

import torch

from bench_mark.bench_mark_ddp_contestants import build
from bench_mark.bench_mark_fsdp_contestants import Contestant, Setup
from llm.metrics_memory import PeakMemory
from parallel.collectives import barrier


def measure(setup: Setup, names: list[str], steps: int, warmup: int) -> list[Contestant]:
    """Build and warm up each contestant, see its peak memory, then time steps in turn, which a drift hits alike."""
    mesh, contestants = setup.mesh, []
    on_gpu = mesh.device.type == "cuda"
    for name in names:
        held_by_others = torch.cuda.memory_allocated(mesh.device) if on_gpu else 0
        contestant = build(name, setup)
        for _ in range(warmup):
            contestant.losses.append(contestant.step().item())
        gc.collect()
        with PeakMemory(mesh.device, contestant.tensors()) as memory:
            contestant.losses.append(contestant.step().item())
        contestant.peak_bytes = memory.peak_bytes - held_by_others
        contestants.append(contestant)
    for _ in range(steps):
        for contestant in contestants:
            barrier(mesh, "world")
            mesh.log.drain(0)
            began = time.perf_counter()
            loss = contestant.step().item()  # waits for the device
            contestant.seconds.append(time.perf_counter() - began)
            contestant.losses.append(loss)
            contestant.comm.append(mesh.log.drain(0))
    return contestants


def loss_difference(rows: list[dict[str, Any]], ranks: int) -> float:
    """The largest relative difference between the contestants' first two losses.

    Beside other ranks "bare" sees less data, so it is left out.
    """
    compared = [row["losses"][:2] for row in rows if ranks == 1 or row["variant"] != "bare"]
    return max((abs(a - b) / b for losses in compared for a, b in zip(losses, compared[0], strict=True)), default=0.0)
