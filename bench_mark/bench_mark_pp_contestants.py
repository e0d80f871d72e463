"""What bench_mark_pp sets beside each other: our schedules, operation by operation or as CUDA graphs, and torch's.

All run the same blocks with the same kernels and the same fused loss over the same cut of the model; torch's stages are
ours, driven by torch.distributed.pipelining.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from bench_mark.bench_mark_model import SHAPES, load_model_config
from bench_mark.bench_mark_pp_tracer import Tracer
from llm.args import DataConfig, KernelsConfig, ParallelConfig, TrainConfig
from llm.data_loader import Batch
from llm.parallelize import Parallelized, make_forward_loss, parallelize
from llm.transformer import Transformer
from llm.transformer_context import make_context
from llm.transformer_kernels import make_loss
from parallel.mesh import Mesh


@dataclass
class Contestant:
    """One way to run a step; `step(rows, micro_batches)` returns the loss on the last rank and 0.0 elsewhere."""

    name: str
    schedule: str
    chunks: int
    step: Callable[[int, int], float]
    tracer: Tracer | None = None
    config: Callable[[int, int], TrainConfig] | None = None  # what is predicted, by rows and micro-batches
    boundary: Callable[[int], Tensor] | None = None  # what crosses between stages, by rows; empty


class TorchStage(nn.Module):
    """A stage of ours as torch's pipelining takes it: the last one ends at the states that the loss reads."""

    def __init__(self, stage: Transformer, dtype: torch.dtype | None):
        super().__init__()
        self.stage, self.dtype = stage, dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, self.dtype, enabled=self.dtype is not None):
            return self.stage.hidden_states(x, make_context(x))


class Bench:
    """What all contestants share: one model with its weights, and batches by their shape."""

    def __init__(self, mesh: Mesh, model: str, layers: int | None, seq_len: int | None):
        self.mesh, config = mesh, load_model_config(model)
        on_gpu = mesh.device.type == "cuda"
        attention = "triton" if on_gpu else config.attention
        self.model = replace(config, attention=attention, num_layers=layers or config.num_layers)
        self.default_rows, self.seq_len = SHAPES[model][0], seq_len or SHAPES[model][1]
        self.dtype, self.autocast_dtype = ("bfloat16", torch.bfloat16) if on_gpu else ("float32", None)
        self.kernels = KernelsConfig(fused=on_gpu)
        self.batches: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def config(self, schedule: str, chunks: int, graph: bool, rows: int, micro_batches: int) -> TrainConfig:
        parallel = ParallelConfig(dp=1, pp=self.mesh.size("pp"), pp_schedule=schedule, pp_chunks=chunks)
        return TrainConfig(
            name="bench", model=self.model, data=DataConfig(seq_len=self.seq_len), parallel=parallel, dtype=self.dtype,
            kernels=replace(self.kernels, cuda_graph=graph), micro_batch_size=rows,
            global_batch_tokens=rows * micro_batches * self.seq_len,
        )  # fmt: skip

    @cached_property
    def initial(self) -> Transformer:
        """The weights that all start from, drawn on the device: a billion of them by name on the host take long."""
        with torch.device(self.mesh.device):
            model = Transformer(self.model)
        generator = torch.Generator(self.mesh.device).manual_seed(1)
        with torch.no_grad():
            for param in model.parameters():
                param.normal_(std=0.02, generator=generator) if param.ndim > 1 else param.fill_(1.0)
        return model

    def parts(self, config: TrainConfig) -> Parallelized:
        return parallelize(copy.deepcopy(self.initial), config, self.mesh)

    def batch(self, rows: int, micro_batches: int) -> tuple[Tensor, Tensor]:
        """Token ids and targets, each (micro_batches * rows, T)."""
        shape = (2, micro_batches * rows, self.seq_len)
        if shape not in self.batches:
            ids = torch.randint(0, self.model.vocab_size, shape, generator=torch.Generator().manual_seed(0))
            self.batches[shape] = tuple(ids.to(self.mesh.device).unbind())
        return self.batches[shape]

    def ours(self, schedule: str, chunks: int, graph: bool) -> Contestant:
        parts = self.parts(self.config(schedule, chunks, graph, 1, 1))
        forward_loss = make_forward_loss(parts.head_model, make_loss(self.kernels, 0.0), "none")
        tracer = parts.pipeline.runner.observe = Tracer(self.mesh.device)

        def step(rows: int, micro_batches: int) -> float:
            ids, targets = self.batch(rows, micro_batches)
            pairs = zip(ids.split(rows), targets.split(rows), strict=True)
            batches = [Batch(*pair, rows * self.seq_len) for pair in pairs]
            with tracer.step():
                loss, _ = parts.pipeline.accumulate_gradients(batches, ids.numel(), forward_loss)
                parts.model.zero_grad()
            return float(loss) / ids.numel()

        def config(rows: int, micro_batches: int) -> TrainConfig:
            return self.config(schedule, chunks, graph, rows, micro_batches)

        def boundary(rows: int) -> Tensor:
            ids = self.batch(rows, 1)[0]
            return parts.pipeline.boundary(Batch(ids, ids, 0))

        return Contestant(f"{schedule}{' graph' if graph else ''}", schedule, chunks, step, tracer, config, boundary)

    def torchs(self, name: str) -> Contestant:
        """torch.distributed.pipelining over the same weights; zero_bubble is its interleaved one, two stages a rank."""
        from torch.distributed import pipelining

        kinds = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "zero_bubble": "ScheduleInterleavedZeroBubble"}
        kind, chunks = getattr(pipelining, kinds[name]), 2 if name == "zero_bubble" else 1
        kernels = self.kernels
        if name == "zero_bubble":  # torch splits a graph's backward node by node: no node may make both gradients
            kernels = replace(kernels, linear=False, loss=False)
        config = self.config("interleaved" if chunks > 1 else "1f1b", chunks, False, 1, 1)
        parts = self.parts(replace(config, kernels=kernels))
        modules = {stage: TorchStage(model, self.autocast_dtype) for stage, model in parts.pipeline.models.items()}
        is_last, loss = parts.pipeline.last_stage in modules, make_loss(kernels, 0.0)

        def step(rows: int, micro_batches: int) -> float:
            ids, targets = self.batch(rows, micro_batches)
            stages = [self.torch_stage(parts, stage, module, ids[:rows]) for stage, module in modules.items()]

            def loss_of(states: Tensor, targets: Tensor) -> Tensor:
                output = parts.pipeline.head_model.output
                with torch.autocast(states.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
                    if kernels.uses("loss"):
                        return loss(states, output, targets).loss_sum / ids.numel()
                    return loss(output(states), targets).loss_sum / ids.numel()

            given = stages if chunks > 1 else stages[0]
            schedule = kind(given, micro_batches, loss_fn=loss_of, scale_grads=False)
            losses: list[Tensor] = []
            options = {"target": targets, "losses": losses} if is_last else {}
            schedule.step(*([ids] if 0 in modules else []), **options)
            parts.model.zero_grad()
            return float(torch.stack(losses).detach().sum()) if losses else 0.0

        return Contestant(f"torch {name}", name, chunks, step)

    def torch_stage(self, parts: Parallelized, stage: int, module: nn.Module, ids: Tensor) -> Any:
        """With its shapes given: torch would find them by running the stage on meta tensors, which no kernel takes."""
        from torch.distributed.pipelining import PipelineStage

        states = parts.pipeline.boundary(Batch(ids, ids, 0)).requires_grad_()
        ends = stage == parts.pipeline.last_stage and self.kernels.uses("norm") and self.autocast_dtype is not None
        out = states.detach().to(self.autocast_dtype).requires_grad_() if ends else states  # a fused norm's dtype
        return PipelineStage(
            module, stage, parts.pipeline.last_stage + 1, self.mesh.device, input_args=(ids if stage == 0 else states,),
            output_args=(out,), group=self.mesh.group("pp"),
        )  # fmt: skip
