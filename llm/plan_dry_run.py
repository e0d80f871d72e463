"""The real strategies on a fake process group: one step of a model without memory, as one rank of thousands.

torch's fake backend answers every collective at once and sends nothing; on the meta device tensors have shapes and no
values. So the code that runs is the code of a real run, and its log says what it would have sent.
"""

from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from configs.errors import UserError
from llm.args import ModelConfig
from llm.loss import CrossEntropyLoss
from llm.optimizer import OptimizerConfig, build_optimizer
from llm.parallelize import is_kept_by_autocast
from llm.transformer import RoPE, Transformer
from parallel.collectives import all_gather
from parallel.cost_model_traffic import DataLayout, Traffic
from parallel.ddp import DataParallel, DdpSettings
from parallel.fsdp import FsdpSettings
from parallel.fsdp_init import apply_fsdp
from parallel.mesh import Mesh, make_mesh
from parallel.mesh_degrees import Degrees
from parallel.sharded_optimizer import Zero1Settings, apply_zero1

META = torch.device("meta")


def dry_run_traffic(
    model: ModelConfig, optimizer: OptimizerConfig, layout: DataLayout, degrees: Degrees, seq_len: int
) -> list[Traffic]:
    """What rank 0 logs in one optimizer step, one sequence a micro-batch; `degrees` are resolved.

    Raises UserError inside a process that is a rank already.
    """
    if dist.is_initialized():
        raise UserError("a dry run needs a process without a process group; start llm.plan without torchrun")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world_size = degrees.grid().size
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        mesh = make_mesh(degrees, META, 0)
        return one_step(meta_model(model), optimizer, layout, mesh, seq_len)
    finally:
        dist.destroy_process_group()


class MetaDevice(TorchFunctionMode):
    """What torch does not offer on the meta device: autocast's effect on a linear layer, and values where a model asks.

    A linear layer's input is cast to the dtype of its weight; experts are chosen equally often.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.bincount:
            experts, chosen = kwargs["minlength"], args[0].numel()
            return torch.tensor([chosen // experts + (index < chosen % experts) for index in range(experts)])
        if func is functional.linear and args[0].dtype != args[1].dtype:
            args = (args[0].to(args[1].dtype), *args[1:])
        return func(*args, **(kwargs or {}))


def meta_model(config: ModelConfig) -> Transformer:
    with META:
        model = Transformer(config)
    model.rope = RoPE(config.head_dim, config.rope_theta, config.rope_scaling)  # its table is a value, not a weight
    return model


def apply_layout(model: nn.Module, layout: DataLayout, mesh: Mesh) -> Any:
    """The strategy of a layout, as llm/parallelize chooses it; shards are left without initial values."""
    reduce_dtype = None if layout.reduce_dtype is None else getattr(torch, layout.reduce_dtype)
    sizes = layout.bucket_bytes, layout.first_bucket_bytes
    if layout.zero == 0:
        return DataParallel(model, mesh, DdpSettings("bucketed" if layout.bucketed else "naive", *sizes, reduce_dtype))
    if layout.zero == 1:
        return apply_zero1(model, mesh, Zero1Settings(*sizes, reduce_dtype))
    settings = FsdpSettings(
        reshard_after_forward=layout.zero == 3,
        param_dtype=None if layout.param_dtype is None else getattr(torch, layout.param_dtype),
        keep_dtype=is_kept_by_autocast,
        reduce_dtype=reduce_dtype,
        reduce_each_micro_batch=layout.reduce_each_micro_batch,
    )
    return apply_fsdp(model, mesh, settings, units=list(model.blocks.values()), fill=lambda *shard: None)


def one_step(
    model: Transformer, optimizer_config: OptimizerConfig, layout: DataLayout, mesh: Mesh, seq_len: int
) -> list[Traffic]:
    """The collectives of llm/training_step in its order, without the values that decide about a step."""
    strategy = apply_layout(model, layout, mesh)
    if optimizer_config.name == "adamw":
        optimizer_config = OptimizerConfig(
            name="sgd", weight_decay=0.0
        )  # sends the same, and has a thousandth of the operations
    optimizer = strategy.shard_optimizer(build_optimizer(model.named_parameters(), optimizer_config))
    model.rope.to(META)
    mesh.log.drain(0)
    all_gather(torch.zeros(3, dtype=torch.int64), mesh, "dp_cp")
    token_ids = torch.zeros(1, seq_len, dtype=torch.int64, device=META)
    loss = CrossEntropyLoss()
    for micro_batch in range(layout.micro_batches):
        strategy.begin_micro_batch(last=micro_batch == layout.micro_batches - 1)
        with MetaDevice():
            logits = model(token_ids)
        loss(logits, token_ids).loss_sum.backward()
    strategy.finish_gradients()
    strategy.gradient_norm()
    optimizer.step()
    lines = mesh.log.drain(1)
    return [Traffic(*(line[field] for field in ("op", "axis", "dtype", "ranks", "calls", "bytes"))) for line in lines]
