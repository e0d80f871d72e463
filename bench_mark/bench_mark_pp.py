"""Pipeline schedules beside torch.distributed.pipelining: forward and backward of one step, no optimizer.

A rank's idle share is what its step lasts beyond the dearest rank's work on inputs that are there already. Predicted is
the same from FLOPs alone (parallel/cost_model_pipeline over llm's stage_costs), so it knows no messages and no
overheads. Steps of all contestants alternate; all must agree on the loss. The last line is one JSON document.

    torchrun --nproc-per-node=2 -m bench_mark.bench_mark_pp                       # gloo on CPUs, nccl on GPUs
    torchrun --nproc-per-node=4 -m bench_mark.bench_mark_pp --model 1b --micro-batches 4,16
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench_mark.bench_mark_model import SHAPES, load_model_config
from bench_mark.bench_mark_model_report import facts
from configs.run_dir import write_json_atomic
from llm.args import DataConfig, HardwareConfig, ParallelConfig, TrainConfig
from llm.data_loader import Batch
from llm.hardware import detect_hardware
from llm.loss import CrossEntropyLoss
from llm.parallelize import Parallelized, make_forward_loss, parallelize
from llm.parallelize_pipeline import stage_costs, stage_pieces
from llm.transformer import Transformer
from llm.transformer_context import make_context
from llm.transformer_init import initialise
from parallel.collectives import all_reduce_max, all_reduce_sum, barrier
from parallel.cost_model_pipeline import PipelineShape, predict_pipeline
from parallel.mesh import Mesh, close_mesh, init_mesh, read_ranks
from parallel.mesh_degrees import Degrees
from parallel.pipeline_schedules_simulation import Durations

OURS = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1))
COLUMNS = f"{'variant':20} {'m':>3} {'step':>10} {'idle predicted':>15} {'idle measured':>14} {'ratio':>6} {'loss':>10}"


@dataclass
class Contestant:
    """One way to run a step: `step()` returns the loss on the last rank and 0.0 elsewhere."""

    name: str
    micro_batches: int
    step: Callable[[], float]
    predicted_idle: float | None
    work: Callable[[], None] | None  # this rank's stages on inputs that are there


class TorchStage(nn.Module):
    """A stage of ours as torch's pipelining takes it."""

    def __init__(self, stage: Transformer, dtype: torch.dtype | None):
        super().__init__()
        self.stage, self.dtype = stage, dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, self.dtype, enabled=self.dtype is not None):
            return self.stage(x, make_context(x))


class Bench:
    """What all contestants share: one model, one batch cut into micro-batches."""

    def __init__(self, args: argparse.Namespace, mesh: Mesh):
        self.mesh, self.model = mesh, load_model_config(args.model)
        shape = SHAPES[args.model]
        self.rows, self.seq_len = args.micro_batch or shape[0], args.seq_len or shape[1]
        self.dtype = "bfloat16" if mesh.device.type == "cuda" else "float32"
        self.autocast_dtype = torch.bfloat16 if mesh.device.type == "cuda" else None

    def config(self, schedule: str, chunks: int) -> TrainConfig:
        parallel = ParallelConfig(dp=1, pp=self.mesh.size("pp"), pp_schedule=schedule, pp_chunks=chunks)
        data = DataConfig(seq_len=self.seq_len)
        return TrainConfig(name="bench", model=self.model, data=data, parallel=parallel, dtype=self.dtype)

    @cached_property
    def initial(self) -> Transformer:
        """The weights that all start from, on the CPU: drawing them takes seconds."""
        model = Transformer(self.model)
        initialise(model, seed=0)
        return model

    def parts(self, schedule: str, chunks: int) -> Parallelized:
        config, model = self.config(schedule, chunks), copy.deepcopy(self.initial)
        return parallelize(model.to(self.mesh.device), config, self.mesh)

    def batch(self, micro_batches: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        shape = (2, micro_batches * self.rows, self.seq_len)
        ids = torch.randint(0, self.model.vocab_size, shape, generator=generator)
        return tuple(ids.to(self.mesh.device).unbind())

    def predicted_idle(self, schedule: str, chunks: int, micro_batches: int) -> float:
        """The share of the step that the dearest rank does not work, from FLOPs."""
        ranks = self.mesh.size("pp")
        costs = stage_costs(self.model, self.seq_len)
        scale = [sum(costs[piece] for piece in part) for part in stage_pieces(self.model, self.seq_len, ranks * chunks)]
        tokens = (self.rows * self.seq_len,) * micro_batches
        shape = PipelineShape(ranks, schedule, chunks, tokens, self.model.d_model, "float32")
        total = predict_pipeline(shape, Durations(), scale).total
        return 1 - micro_batches * 3 * max(sum(scale[rank::ranks]) for rank in range(ranks)) / total

    def ours(self, schedule: str, chunks: int, micro_batches: int) -> Contestant:
        parts = self.parts(schedule, chunks)
        forward_loss = make_forward_loss(parts.head_model, CrossEntropyLoss(), "none")
        ids, targets = self.batch(micro_batches)
        pairs = zip(ids.split(self.rows), targets.split(self.rows), strict=True)
        batches = [Batch(*pair, self.rows * self.seq_len) for pair in pairs]

        def step() -> float:
            loss, _ = parts.pipeline.accumulate_gradients(batches, ids.numel(), forward_loss)
            parts.model.zero_grad()
            return float(loss) / ids.numel()

        def work() -> None:
            for batch in batches:
                for stage, model in parts.pipeline.models.items():
                    is_first = model.embedding is not None
                    x = None if is_first else parts.pipeline.boundary(batch).normal_().requires_grad_()
                    if model.output is not None:
                        with parts.pipeline.autocast():
                            forward_loss(batch, x).loss_sum.backward()
                        continue
                    out = parts.pipeline.run_stage(stage, x, batch)
                    out.backward(torch.ones_like(out))
            parts.model.zero_grad()

        timed = work if schedule != "zero_bubble" else None  # its backward leaves W to the schedule
        return Contestant(schedule, micro_batches, step, self.predicted_idle(schedule, chunks, micro_batches), timed)

    def torchs(self, name: str, micro_batches: int) -> Contestant:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        parts = self.parts("1f1b", 1)  # the same cut and weights
        rank, ranks = self.mesh.rank_in("pp"), self.mesh.size("pp")
        module = TorchStage(parts.pipeline.models[rank], self.autocast_dtype)
        stage = PipelineStage(module, rank, ranks, self.mesh.device, group=self.mesh.group("pp"))
        ids, targets = self.batch(micro_batches)

        def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum") / ids.numel()

        kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[name]
        schedule = kind(stage, micro_batches, loss_fn=loss_of, scale_grads=False)

        def step() -> float:
            losses: list[Tensor] = []
            given = {"target": targets, "losses": losses} if rank == ranks - 1 else {}
            schedule.step(*([ids] if rank == 0 else []), **given)
            module.zero_grad()
            return float(torch.stack(losses).detach().sum()) if losses else 0.0

        return Contestant(f"torch {name}", micro_batches, step, None, None)


def seconds_of(call: Callable[[], Any], mesh: Mesh) -> tuple[float, Any]:
    """Seconds until all ranks are done, and this rank's result."""
    barrier(mesh, "pp")
    began = time.perf_counter()
    result = call()
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()
    own = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    return float(all_reduce_max(own, mesh, "pp")), result


def measure(contestants: list[Contestant], mesh: Mesh, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Steps of all contestants in turn, and of our stages alone between them."""
    seconds: dict[int, list[float]] = {index: [] for index in range(len(contestants))}
    alone: dict[int, list[float]] = {index: [] for index in range(len(contestants))}
    losses: dict[int, float] = {}
    for turn in range(args.warmup + args.steps):
        for index, contestant in enumerate(contestants):
            taken, losses[index] = seconds_of(contestant.step, mesh)
            if turn >= args.warmup:
                seconds[index].append(taken)
            if contestant.work is not None:
                taken, _ = seconds_of(contestant.work, mesh)
                if turn >= args.warmup:
                    alone[index].append(taken)
    rows = []
    work_s = {c.micro_batches: statistics.median(alone[i]) for i, c in enumerate(contestants) if c.name == "1f1b"}
    for index, contestant in enumerate(contestants):
        step_s = statistics.median(seconds[index])
        own = statistics.median(alone[index]) if alone[index] else work_s[contestant.micro_batches]
        idle, predicted = 1 - own / step_s, contestant.predicted_idle
        loss = float(all_reduce_sum(torch.tensor(losses[index], dtype=torch.float64), mesh, "pp"))
        rows.append({
            "variant": contestant.name, "micro_batches": contestant.micro_batches, "step_s": step_s,
            "predicted_idle": predicted, "idle": idle, "ratio": None if not predicted else idle / predicted,
            "loss": loss, "seconds": seconds[index],
        })  # fmt: skip
    return rows


def show(row: dict[str, Any]) -> str:
    predicted, ratio = ("–" if row[key] is None else f"{row[key]:.3f}" for key in ("predicted_idle", "ratio"))
    return (
        f"{row['variant']:20} {row['micro_batches']:>3} {row['step_s'] * 1e3:>7.1f} ms {predicted:>15} "
        f"{row['idle']:>14.3f} {ratio:>6} {row['loss']:>10.5f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="mew-1m", choices=sorted(SHAPES))
    parser.add_argument("--micro-batches", default="2,8")
    parser.add_argument("--micro-batch", type=int, default=None)
    parser.add_argument("--seq-len", type=int, default=None)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    mesh = init_mesh(args.device, degrees=Degrees(pp=read_ranks()[1]))
    if mesh.world_size == 1:
        print("a pipeline needs two ranks or more: torchrun --nproc-per-node=2 -m bench_mark.bench_mark_pp")
        return
    bench = Bench(args, mesh)
    contestants = []
    for count in map(int, args.micro_batches.split(",")):
        contestants += [bench.ours(schedule, chunks, count) for schedule, chunks in OURS]
        contestants += [bench.torchs(name, count) for name in ("gpipe", "1f1b")]
    rows = measure(contestants, mesh, args)
    if mesh.is_main:
        hardware = detect_hardware(HardwareConfig(), mesh.device, dtype=bench.dtype)
        known = facts(hardware, bench.dtype) | {"model": args.model, "ranks": mesh.world_size, "backend": mesh.backend}
        print(" · ".join(str(known[key]) for key in ("hardware", "dtype", "torch", "commit", "model", "ranks")))
        print(COLUMNS, *map(show, rows), sep="\n")
        device = mesh.device.type
        write_json_atomic(args.out or f"bench_mark/results/pp_{device}.json", known | {"rows": rows})
        print(json.dumps(known | {"rows": rows}))
    close_mesh(mesh)


if __name__ == "__main__":
    main()
