"""A micro-batch's forward and backward pass as a CUDA graph: one launch for some thousand, so the host never lags.

The first calls run as they are, on a side stream, so that everything is compiled and allocated; then the pass is
captured over fixed inputs and replayed. Two graphs share one pool: the first writes gradients, the second, captured
when a step has more micro-batches, adds to them. A batch of another shape runs as it is.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from configs.errors import UserError
from llm.args import TrainConfig
from llm.data_loader import Batch
from llm.loss import LossSums
from parallel.mesh import Mesh

WARMUP_CALLS = 3
ForwardLoss = Callable[[Batch], LossSums]


def check_graph(config: TrainConfig, mesh: Mesh) -> None:
    """Refuse what a graph cannot hold."""
    if mesh.device.type != "cuda":
        raise UserError(f"kernels.cuda_graph=true needs a CUDA device, not {mesh.device}; use kernels.cuda_graph=false")
    if mesh.world_size > 1 or config.parallel.force:
        raise UserError(
            f"kernels.cuda_graph=true runs on one rank without forced strategies, not on {mesh.world_size}; "
            f"use kernels.cuda_graph=false"
        )
    if config.model.moe.num_experts:
        raise UserError(
            f"kernels.cuda_graph=true cannot hold moe.num_experts={config.model.moe.num_experts}, whose loads the host "
            f"reads; use kernels.cuda_graph=false"
        )


@dataclass
class Captured:
    """A graph and what it writes."""

    graph: torch.cuda.CUDAGraph
    sums: LossSums


class GraphedMicroBatch:
    """graphed(batch, num_targets) -> LossSums, forward and backward, captured after WARMUP_CALLS calls.

    forward_loss: from a batch on the device to its sums. Gradients lie in fixed buffers, which `param.grad` points at
    after a call.
    """

    def __init__(self, forward_loss: ForwardLoss, parameters: Iterable[Parameter], autocast_dtype: torch.dtype | None):
        self.forward_loss, self.autocast_dtype = forward_loss, autocast_dtype
        self.parameters = [param for param in parameters if param.requires_grad]
        self.side = torch.cuda.Stream()
        self.calls = 0
        self.batch: Batch | None = None  # the fixed inputs
        self.share: Tensor | None = None  # of the loss sum in the step's mean: 1 / num_targets
        self.first: Captured | None = None
        self.adding: Captured | None = None
        self.gradients: list[Tensor | None] = []

    def __call__(self, batch: Batch, num_targets: int) -> LossSums:
        share = torch.full((), 1.0 / max(num_targets, 1), device=batch.token_ids.device)
        adds = any(param.grad is not None for param in self.parameters)
        self.calls += 1
        if self.calls <= WARMUP_CALLS or (self.first is None and adds):
            return self.run_aside(batch, share)
        if self.first is None:
            self.batch, self.share = batch.map(torch.clone), share.clone()
            self.first = self.capture(None)
            self.gradients = [param.grad for param in self.parameters]
        if signature(batch) != signature(self.batch) or (adds and not self.holds_gradients()):
            return self.forward_backward(batch, share)
        if adds and self.adding is None:
            self.adding = self.capture(self.first.graph.pool())
        self.fill(batch, share)
        captured = self.adding if adds else self.first
        captured.graph.replay()
        for param, gradient in zip(self.parameters, self.gradients, strict=True):
            param.grad = gradient
        return captured.sums

    def holds_gradients(self) -> bool:
        """Whether the gradients so far are those of the graph; a pass outside it begins buffers of its own."""
        return all(param.grad is own for param, own in zip(self.parameters, self.gradients, strict=True))

    def forward_backward(self, batch: Batch, share: Tensor) -> LossSums:
        with torch.autocast("cuda", self.autocast_dtype, enabled=self.autocast_dtype is not None):
            sums = self.forward_loss(batch)
        (sums.loss_sum + sums.z_loss_sum).backward(gradient=share)
        return LossSums(sums.loss_sum.detach(), sums.z_loss_sum.detach(), sums.num_targets)

    def run_aside(self, batch: Batch, share: Tensor) -> LossSums:
        """The pass as it is, on the side stream, as PyTorch asks before a capture."""
        current = torch.cuda.current_stream()
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            sums = self.forward_backward(batch, share)
        current.wait_stream(self.side)
        return sums

    def capture(self, pool: tuple[int, int] | None) -> Captured:
        """Record the pass over the fixed inputs; nothing runs yet."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=self.side):
            sums = self.forward_backward(self.batch, self.share)
        return Captured(graph, sums)

    def fill(self, batch: Batch, share: Tensor) -> None:
        """Put a batch where the graph reads it."""
        for name in ("token_ids", "targets", "doc_ids", "token_positions"):
            fixed, given = getattr(self.batch, name), getattr(batch, name)
            if fixed is not None:
                fixed.copy_(given, non_blocking=True)
        self.share.copy_(share)


def signature(batch: Batch) -> tuple:
    """What must be equal for a captured pass to serve a batch."""
    tensors = (batch.token_ids, batch.targets, batch.doc_ids, batch.token_positions)
    return tuple(None if tensor is None else (tuple(tensor.shape), tensor.dtype) for tensor in tensors)
