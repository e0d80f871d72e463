"""One layout of bench_mark_plan: its config, its mesh over the ranks, and its training step, measured."""

import copy
import gc
import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from configs.errors import UserError
from configs.loader import load_config
from llm.args import DataConfig, KernelsConfig, ModelConfig, ParallelConfig, TrainConfig
from llm.data_loader import Batch
from llm.metrics_memory import PeakMemory, graph_bytes, held_tensors
from llm.parallelize import make_forward_loss, parallelize
from llm.schedule import ScheduleConfig
from llm.training_step import TrainingStep, rows_of_rank
from llm.transformer import Transformer
from llm.transformer_init import initialise
from llm.transformer_kernels import make_loss
from parallel.collectives import all_reduce_max, barrier
from parallel.mesh import Mesh, make_mesh

WINDOW = 2  # steps between two looks at the clock, so that the host may run ahead as in training


@dataclass
class Bench:
    """What all layouts share: a model with its weights, and one global batch."""

    model: ModelConfig
    mesh: Mesh
    batch: int  # sequences of a data rank under plain dp
    seq_len: int
    kernels: str
    attention: str
    compile: str
    graph: bool = False  # of pipelines: operations as CUDA graphs

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.mesh.device.type == "cuda" else "float32"

    @property
    def sequences(self) -> int:
        return self.batch * self.mesh.world_size

    def config(self, text: str) -> TrainConfig:
        """From "tp=2,micro=4": fields of ParallelConfig, and the sequences of a micro-batch."""
        given = dict(OmegaConf.to_container(OmegaConf.from_dotlist(text.split(","))))
        micro = given.pop("micro", None)
        parallel = load_config(ParallelConfig, OmegaConf.create(given))
        degrees = parallel.degrees().resolve(self.mesh.world_size)
        if self.sequences % degrees.dp:
            raise UserError(f"{text}: dp={degrees.dp} must divide the {self.sequences} sequences of the global batch")
        on_gpu = self.mesh.device.type == "cuda"
        kernels = KernelsConfig(fused=True) if self.kernels == "fused" else KernelsConfig(optimizer=on_gpu)
        kernels = replace(kernels, cuda_graph=self.graph and degrees.pp > 1)
        config = TrainConfig(
            name="benchmark", dtype=self.dtype, model=replace(self.model, attention=self.attention),
            micro_batch_size=micro or self.sequences // degrees.dp, compile=self.compile,
            global_batch_tokens=self.sequences * self.seq_len, data=DataConfig(seq_len=self.seq_len), kernels=kernels,
            schedule=ScheduleConfig(name="constant", warmup_steps=0), parallel=parallel,
        )  # fmt: skip
        config.grad_accum_steps(degrees.dp)
        return config

    @cached_property
    def initial(self) -> Transformer:
        """The weights that all start from, on the CPU: drawing them takes seconds."""
        model = Transformer(replace(self.model, attention=self.attention))
        initialise(model, seed=0)
        return model

    @cached_property
    def tokens(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.model.vocab_size, (self.sequences, self.seq_len + 1), generator=generator)

    def micro_batches(self, config: TrainConfig, mesh: Mesh) -> list[Batch]:
        rows = rows_of_rank(self.sequences, mesh)
        own = self.tokens[rows.start : rows.stop].split(config.micro_batch_size)
        return [Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), ids[:, 1:].numel()) for ids in own]


def default_layouts(ranks: int, batch: int) -> list[str]:
    """Each strategy alone over all ranks; a pipeline takes the batch in four micro-batches a rank, or as many as go."""
    micro = max(1, batch // 4)
    return [
        f"dp={ranks}", f"dp={ranks},zero=1", f"dp={ranks},zero=3", f"dp=1,tp={ranks}",
        f"dp=1,pp={ranks},micro={micro}", f"dp=1,pp={ranks},pp_schedule=zero_bubble,micro={micro}", f"dp=1,cp={ranks}",
    ]  # fmt: skip


@dataclass
class Measured:
    """What one layout's step was seen to need on this rank."""

    layout: str
    config: TrainConfig
    mesh: Mesh
    micro_batches: int
    peak_bytes: int
    graph_bytes: int = 0  # of these what lies free in the graphs' pools
    seconds: list[float] = field(default_factory=list)  # of a step, until the last rank was done
    host_seconds: list[float] = field(default_factory=list)  # of a step, until this rank's host had issued it
    comm: list[dict[str, Any]] = field(default_factory=list)  # the log's lines of one timed step
    losses: list[float] = field(default_factory=list)


def measure(bench: Bench, text: str, steps: int, warmup: int) -> Measured:
    """Build a layout, warm it up, look at its memory, time it, and let it go again."""
    config, device = bench.config(text), bench.mesh.device
    degrees = config.parallel.degrees()
    mesh = make_mesh(degrees, device, bench.mesh.local_rank)
    others = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    others_graphs = graph_bytes(device)
    model = copy.deepcopy(bench.initial).to(device)
    parts = parallelize(model, config, mesh)
    loss = make_loss(config.kernels, config.z_loss)
    forward_loss = make_forward_loss(parts.head_model, loss, parts.compile, parts.shards)
    training_step, batches = TrainingStep(config, mesh, parts, forward_loss), bench.micro_batches(config, mesh)
    found = Measured(text, config, mesh, len(batches), 0)
    for index in range(warmup):
        result = training_step.run(index, batches)
        found.losses.append(result.mean_losses(mesh)[0])
    gc.collect()
    held = [*held_tensors(model, parts.optimizer), *(t for b in batches for t in (b.token_ids, b.targets))]
    with PeakMemory(device, held, mesh.peer_bytes) as memory:
        training_step.run(warmup, batches)
    found.graph_bytes = graph_bytes(device) - others_graphs
    found.peak_bytes = memory.peak_bytes - others + found.graph_bytes
    del held  # or what it names would stay on the device beside the next layout
    mesh.log.drain(0)
    for _ in range(max(1, steps // WINDOW)):
        taken, issued = window_s(training_step, batches, mesh)
        found.seconds.append(taken / WINDOW)
        found.host_seconds.append(issued / WINDOW)
        found.comm = [scaled(line) for line in mesh.log.drain(0) if line["axis"] != "world"]
    del training_step, parts, model, forward_loss
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def window_s(training_step: TrainingStep, batches: list[Batch], mesh: Mesh) -> tuple[float, float]:
    """Seconds of WINDOW steps, until all ranks are done, and until this rank's host had issued them."""
    barrier(mesh, "world")
    began = time.perf_counter()
    for index in range(WINDOW):
        training_step.run(index, batches)
    issued = time.perf_counter() - began
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)
    own = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    return float(all_reduce_max(own, mesh, "world")), issued


def scaled(line: dict[str, Any]) -> dict[str, Any]:
    """A line of the log as one step's; every step sends the same."""
    summed = ("calls", "bytes", "seconds", "exposed_seconds")
    per_step = {key: line[key] // WINDOW if key in ("calls", "bytes") else line[key] / WINDOW for key in summed}
    return {key: value for key, value in line.items() if key != "step"} | per_step
