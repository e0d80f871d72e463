"""The contestants of bench_mark_ddp: one step under our strategies, and under torch's DistributedDataParallel.

torch's has the same model, kernels, loss, clipping and optimizer as ours, so that what differs is how gradients travel.
"""

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench_mark.bench_mark_fsdp_contestants import Contestant, Setup, alone, ours
from configs.errors import UserError
from llm.args import ParallelConfig
from llm.data_loader import Batch
from llm.metrics_memory import held_tensors
from llm.optimizer import build_optimizer, clipped_step
from llm.parallelize import ForwardLoss, apply_compile, make_forward_loss
from llm.transformer_kernels import apply_kernels, make_loss
from parallel.clipping import gradient_norm


def parse_variant(name: str) -> tuple[str, float, str | None]:
    """ "bucketed-5-bf16" -> kind, megabytes of a bucket, reduction dtype; UserError for anything unknown."""
    kind, *options = name.split("-")
    known = {"bare": 0, "naive": 0, "bucketed": 1, "peer": 1, "torch": 1}
    reduce_dtype = "bfloat16" if options[1:] == ["bf16"] and kind in ("bucketed", "peer") else None
    try:
        megabytes = float(options[0]) if options else 25.0
    except ValueError:
        megabytes = -1.0
    if kind not in known or len(options) - (reduce_dtype is not None) > known[kind] or megabytes <= 0:
        raise UserError(
            f"--variants: {name!r} is unknown; use bare, naive, bucketed-MB, peer-MB, torch-MB, or bucketed-MB-bf16"
        )
    return kind, megabytes, reduce_dtype


def build(name: str, setup: Setup) -> Contestant:
    """The contestant of a variant's name."""
    kind, megabytes, reduce_dtype = parse_variant(name)
    if kind == "bare":
        return ours(name, setup, setup.config(ParallelConfig()), alone(setup.mesh))
    mode = "naive" if kind == "naive" else "bucketed"
    parallel = ParallelConfig(
        ddp_mode=mode, bucket_mb=megabytes, reduce_dtype=reduce_dtype, force=True,
        transport="peer" if kind == "peer" else "backend",
    )  # fmt: skip
    if kind == "torch":
        return torch_ddp(name, setup, parallel)
    return ours(name, setup, setup.config(parallel), setup.mesh)


class WithLoss(nn.Module):
    """A model and its loss as one module, so that torch's DDP may wrap both: batch -> the sum of its losses."""

    def __init__(self, model: nn.Module, forward_loss: ForwardLoss):
        super().__init__()
        self.model, self.forward_loss = model, forward_loss

    def forward(self, batch: Batch) -> Tensor:
        return self.forward_loss(batch).loss_sum


def torch_ddp(name: str, setup: Setup, parallel: ParallelConfig) -> Contestant:
    """torch's DDP as a user sets it up, gradients as views into its buckets."""
    config, mesh = setup.config(parallel), setup.mesh
    model = setup.model()
    apply_kernels(model, config.kernels, mesh.device)
    compiled = apply_compile(model, config.compile, mesh.device)
    forward_loss, batch = make_forward_loss(model, make_loss(config.kernels, 0.0), compiled), setup.batch()
    module = WithLoss(model, forward_loss)
    wrapped = DistributedDataParallel(module, bucket_cap_mb=parallel.bucket_mb, gradient_as_bucket_view=True)
    optimizer = build_optimizer(model.named_parameters(), config.optimizer, config.kernels.uses("optimizer"))
    parameters = list(model.parameters())

    def step() -> Tensor:
        with torch.autocast(mesh.device.type, torch.bfloat16, enabled=config.dtype == "bfloat16"):
            loss = wrapped(batch) / setup.work.tokens
        loss.backward()  # it averages over the ranks
        # No look at the norm: the host need not wait for the device, as in ours.
        clipped_step(optimizer, parameters, gradient_norm(parameters), config.optimizer.clip_norm)
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def tensors() -> list[Tensor]:
        return [*held_tensors(model, optimizer), batch.token_ids, batch.targets]

    return Contestant(name, step, tensors, config)
