"""How the contestants of bench_mark_ddp and bench_mark_fsdp are measured: memory of one warm step, then time.

Contestants take turns, which a drift hits alike. A turn is a block of steps, at whose end alone the host waits for the
device: within one it may run ahead, as it does in training.
"""

import gc
import time
from collections.abc import Callable
from typing import Any

import torch

from bench_mark.bench_mark_fsdp_contestants import Contestant
from llm.metrics_memory import PeakMemory
from parallel.collectives import barrier
from parallel.mesh import Mesh

ADDS_UP = ("calls", "bytes", "seconds", "exposed_seconds")  # fields of the log's lines that grow with every step


def prepare(build: Callable[[], Contestant], mesh: Mesh, warmup: int) -> Contestant:
    """A contestant that has warmed up, with the peak memory of one step; what others hold is not counted."""
    held_by_others = torch.cuda.memory_allocated(mesh.device) if mesh.device.type == "cuda" else 0
    read_by_others = mesh.peer_bytes
    contestant = build()
    for _ in range(warmup):
        contestant.losses.append(contestant.step().item())
    gc.collect()
    with PeakMemory(mesh.device, contestant.tensors(), mesh.peer_bytes - read_by_others) as memory:
        contestant.losses.append(contestant.step().item())
    contestant.peak_bytes = memory.peak_bytes - held_by_others
    return contestant


def take_turns(contestants: list[Contestant], mesh: Mesh, steps: int, block: int) -> None:
    """At least `steps` steps of each, in blocks: a block's seconds and lines of the log are its mean step's."""
    for _ in range(0, steps, block):
        for contestant in contestants:
            barrier(mesh, "world")
            mesh.log.drain(0)
            began = time.perf_counter()
            losses = [contestant.step() for _ in range(block)]
            contestant.host_seconds.append((time.perf_counter() - began) / block)  # until the steps were issued
            contestant.losses += torch.stack(losses).tolist()  # waits for the device
            contestant.seconds.append((time.perf_counter() - began) / block)
            if mesh.device.type == "cuda":  # ZeRO-1's last gathers are under way still: not beside the next contestant
                torch.cuda.synchronize(mesh.device)
            lines = mesh.log.drain(0)
            contestant.comm.append([{k: v / block if k in ADDS_UP else v for k, v in line.items()} for line in lines])


def loss_difference(rows: list[dict[str, Any]], ranks: int) -> float:
    """The largest relative difference between the contestants' first two losses.

    Beside other ranks "bare" sees less data, so it is left out.
    """
    compared = [row["losses"][:2] for row in rows if ranks == 1 or row["variant"] != "bare"]
    return max((abs(a - b) / b for losses in compared for a, b in zip(losses, compared[0], strict=True)), default=0.0)
