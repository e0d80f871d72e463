"""The contestants of bench_mark_fsdp: one model, one loss and one optimizer under each way of sharding.

"bare" is the step on one device without any wrapper. FSDP2 is torch's fully_shard as a user sets it up: a unit a block
and one for the rest, fused AdamW over DTensors, torch's clipping. Its policy would cast whatever tensors a block is
given, RoPE's tables among them, to bfloat16: fewer bytes and another result. Only "fsdp2-cast" lets it.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from llm.args import DataConfig, KernelsConfig, ParallelConfig, TrainConfig
from llm.cost_model import Workload
from llm.data_loader import Batch
from llm.metrics_memory import held_tensors
from llm.optimizer import OptimizerConfig, build_optimizer
from llm.parallelize import Parallelized, apply_compile, make_forward_loss, parallelize
from llm.schedule import ScheduleConfig
from llm.training_step import TrainingStep
from llm.transformer import Transformer
from llm.transformer_init import initialise
from llm.transformer_kernels import apply_kernels, make_loss
from parallel.activation_checkpointing import make_checkpoint
from parallel.fsdp import FsdpSettings
from parallel.fsdp_init import apply_fsdp
from parallel.mesh import Mesh

VARIANTS = (
    "bare",
    "zero1",
    "zero1-peer",
    "zero2",
    "zero3",
    "zero2-all",
    "zero3-all",
    "fsdp2-zero2",
    "fsdp2-zero3",
    "fsdp2-cast",
)


@dataclass
class Contestant:
    """A training step that can be taken again and again, and what it was seen to need."""

    name: str
    step: Callable[[], Tensor]  # takes one optimizer step, returns this rank's share of the loss, on the device
    tensors: Callable[[], Iterable[Tensor]]  # what it holds between steps
    config: TrainConfig
    seconds: list[float] = field(default_factory=list)
    host_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    profile: dict[str, Any] = field(default_factory=dict)
    comm: list[dict[str, Any]] = field(default_factory=list)  # the log's lines of the timed steps


@dataclass(frozen=True)
class Setup:
    """What all contestants share."""

    work: Workload
    mesh: Mesh
    kernels: KernelsConfig
    checkpointing: str = "none"
    optimizer: str = "adamw"

    def config(self, parallel: ParallelConfig) -> TrainConfig:
        work = self.work
        decay = 0.0 if self.optimizer == "sgd" else 0.1
        return TrainConfig(
            name="benchmark", dtype=work.dtype, model=work.model, compile=work.compile,
            micro_batch_size=work.micro_batch_size,
            global_batch_tokens=work.tokens * self.mesh.world_size, data=DataConfig(seq_len=work.seq_len),
            schedule=ScheduleConfig(name="constant", warmup_steps=0), kernels=self.kernels, seed=0,
            parallel=replace(parallel, activation_checkpointing=self.checkpointing),
            optimizer=OptimizerConfig(name=self.optimizer, weight_decay=decay),
        )  # fmt: skip

    def batch(self) -> Batch:
        """This rank's windows, of its own."""
        generator = torch.Generator().manual_seed(self.mesh.rank)
        shape = (self.work.micro_batch_size, self.work.seq_len + 1)
        token_ids = torch.randint(self.work.model.vocab_size, shape, generator=generator)
        return Batch(token_ids[:, :-1].contiguous(), token_ids[:, 1:].contiguous(), self.work.tokens).to(
            self.mesh.device
        )

    @cached_property
    def initial(self) -> Transformer:
        """The weights that all start from, on the CPU: drawing them takes seconds."""
        model = Transformer(self.work.model)
        initialise(model, seed=0)
        return model

    def model(self) -> Transformer:
        return copy.deepcopy(self.initial).to(self.mesh.device)


def build(name: str, setup: Setup) -> Contestant:
    """The contestant of one of VARIANTS."""
    if name.startswith("fsdp2"):
        return torch_fsdp(name, setup)
    if name == "bare":
        return ours(name, setup, setup.config(ParallelConfig()), alone(setup.mesh))
    zero = int(name.removeprefix("zero")[0])
    transport = "peer" if name.endswith("-peer") else "backend"
    return ours(name, setup, setup.config(ParallelConfig(zero=zero, force=True, transport=transport)), setup.mesh)


def alone(mesh: Mesh) -> Mesh:
    """A mesh of this rank only, so that nothing is communicated."""
    return Mesh(0, 0, 1, mesh.device, "none", {})


def ours(name: str, setup: Setup, config: TrainConfig, mesh: Mesh) -> Contestant:
    """The step of llm.training. "-all" gathers every parameter in bfloat16, as FSDP2 does, norms and embedding too."""
    model = setup.model()
    parts = gather_all(model, config, mesh) if name.endswith("-all") else parallelize(model, config, mesh)
    forward_loss = make_forward_loss(model, make_loss(config.kernels, config.z_loss), parts.compile)
    training_step, batch = TrainingStep(config, mesh, parts, forward_loss), setup.batch()
    alone_share = 1 / setup.work.tokens

    def step() -> Tensor:
        return training_step.run(0, [batch]).loss_sum * alone_share

    def tensors() -> list[Tensor]:
        shards = [shard.local for shard in getattr(parts.strategy, "all_shards", [])]
        gradients = [param.grad for param in parts.strategy.parameters if param.grad is not None]
        return [*held_tensors(model, parts.optimizer), *shards, *gradients, batch.token_ids, batch.targets]

    return Contestant(name, step, tensors, config)


def gather_all(model: nn.Module, config: TrainConfig, mesh: Mesh) -> Parallelized:
    apply_kernels(model, config.kernels, mesh.device)
    for block in model.blocks.values():
        block.checkpoint = make_checkpoint(config.parallel.activation_checkpointing)
    compiled = apply_compile(model, config.compile, mesh.device)
    settings = FsdpSettings(
        reshard_after_forward=config.parallel.zero == 3,
        param_dtype=torch.bfloat16 if config.dtype == "bfloat16" else None,
        keep_dtype=lambda name, param: False,
    )
    strategy = apply_fsdp(model, mesh, settings, model.blocks.values())
    optimizer = build_optimizer(model.named_parameters(), config.optimizer, config.kernels.uses("optimizer"))
    return Parallelized(model, strategy.shard_optimizer(optimizer), strategy, compiled)


def torch_fsdp(name: str, setup: Setup) -> Contestant:
    """torch.distributed.fsdp.fully_shard on the same model, kernels and batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    config, mesh = setup.config(ParallelConfig(zero=2 if name.endswith("2") else 3)), setup.mesh
    model = setup.model()
    apply_kernels(model, config.kernels, mesh.device)
    for block in model.blocks.values():
        block.checkpoint = make_checkpoint(setup.checkpointing)
    compiled = apply_compile(model, config.compile, mesh.device)
    bfloat16 = config.dtype == "bfloat16"
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if bfloat16 else {}
    policy = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=name == "fsdp2-cast")
    options = {
        "mesh": init_device_mesh(mesh.device.type, (mesh.world_size,)),
        "mp_policy": policy,
        "reshard_after_forward": config.parallel.zero == 3,
    }
    for block in model.blocks.values():
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch_optimizer(model, config.optimizer)
    forward_loss, batch = make_forward_loss(model, make_loss(config.kernels, 0.0), compiled), setup.batch()

    def step() -> Tensor:
        with torch.autocast(mesh.device.type, torch.bfloat16, enabled=bfloat16):
            loss = forward_loss(batch).loss_sum / setup.work.tokens
        loss.backward()  # it averages over the ranks
        # No look at the norm: the host need not wait for the device, as in ours.
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def tensors() -> list[Tensor]:
        held = held_tensors(model, optimizer)
        return [*(getattr(tensor, "_local_tensor", tensor) for tensor in held), batch.token_ids, batch.targets]

    return Contestant(name, step, tensors, config)


def torch_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW with the groups of llm.optimizer, torch's fused update."""
    params = list(model.parameters())
    groups = [
        {"params": [param for param in params if param.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
