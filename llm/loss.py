"""Cross-entropy as sums over target tokens, with z-loss (PaLM, Chowdhery et al. 2022): exact under any micro-batching.

The caller divides by the number of target tokens of the global batch, known before the first backward pass; a mean per
micro-batch would weigh tokens by how the batch was cut. For backward only the logits and their logsumexp are kept, no
N x V probabilities, and rows go in chunks that stay in the cache. Logits of any float dtype; arithmetic in float32
(float64 for float64). N = B*T rows, V vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from configs.errors import UserError
from llm.transformer_layers import Linear
from llm.transformer_linear import is_plain

IGNORE_INDEX = -100
CPU_CHUNK_ELEMENTS = 1 << 17  # 512 KiB of float32: in the cache of one core
GPU_CHUNK_ELEMENTS = 1 << 26  # bounds the float32 copies of bfloat16 logits to 256 MiB


class LossSums(NamedTuple):
    """Sums over the target tokens of one call; add them over micro-batches and ranks, then divide by num_targets."""

    loss_sum: Tensor  # -sum of log p(target), scalar, differentiable
    z_loss_sum: Tensor  # z_loss * sum of logsumexp^2, scalar, differentiable
    num_targets: Tensor  # int64 scalar


class CrossEntropyLoss(nn.Module):
    """logits (..., V), targets (...) int64 -> LossSums; targets equal to ignore_index count nowhere.

    Raises for a target outside 0..V-1 (on a CPU an IndexError or RuntimeError of gather, on a GPU its assertion).
    """

    def __init__(self, ignore_index: int = IGNORE_INDEX, z_loss: float = 0.0):
        super().__init__()
        self.ignore_index = ignore_index
        self.z_loss = z_loss

    def forward(self, logits: Tensor, targets: Tensor) -> LossSums:
        rows, targets = flatten(logits, targets)
        loss_sum, z_loss_sum, _ = SummedCrossEntropy.apply(rows, targets, self.ignore_index, self.z_loss)
        return LossSums(loss_sum, z_loss_sum, (targets != self.ignore_index).sum())


class FusedCrossEntropyLoss(nn.Module):
    """The output layer and the loss as one operation that never holds the logits (kernel/cross_entropy.py).

    Takes the states (B, T, C) that the output layer reads, the layer itself, and targets (B, T) int64. Both sums share
    one gradient, which loss_sum carries: add them up and differentiate that, as the training step does.
    """

    def __init__(self, ignore_index: int = IGNORE_INDEX, z_loss: float = 0.0, chunk_bytes: int = 1 << 28):
        super().__init__()
        self.ignore_index, self.z_loss, self.chunk_bytes = ignore_index, z_loss, chunk_bytes

    def forward(self, states: Tensor, output: Linear, targets: Tensor) -> LossSums:
        from kernel.cross_entropy import linear_cross_entropy

        if not is_plain(output.matmul) or output.bias is not None:
            raise UserError(
                "kernels.loss=true reads the output layer's weight itself, which has a bias or another matmul (LoRA, "
                "FP8) here; use kernels.loss=false"
            )
        rows, targets = states.reshape(-1, states.shape[-1]), targets.reshape(-1)
        if torch.is_autocast_enabled(rows.device.type):
            rows = rows.to(torch.get_autocast_dtype(rows.device.type))
        loss_sum, z_loss_sum = linear_cross_entropy(rows, output.weight, targets, self.options())
        return LossSums(loss_sum, z_loss_sum, (targets != self.ignore_index).sum())

    def options(self) -> Any:
        """The kernel's settings, LossOptions."""
        from kernel.cross_entropy import LossOptions

        # A weight that FSDP gathered in bfloat16 must not have its gradient summed in it, chunk by chunk.
        return LossOptions(self.ignore_index, self.z_loss, chunk_bytes=self.chunk_bytes, accumulate=torch.float32)


@torch.no_grad()
def token_losses(logits: Tensor, targets: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """-log p(target) of each token: logits (..., V), targets (...) -> (...), 0 where ignored; no gradient."""
    rows, flat_targets = flatten(logits, targets)
    return row_losses(rows, flat_targets, row_logsumexp(rows), ignore_index).view(targets.shape)


class SummedCrossEntropy(torch.autograd.Function):
    """logits (N, V), targets (N,) -> loss sum, z-loss sum, lse (N,); the last is there to be kept, not to be used."""

    @staticmethod
    def forward(logits: Tensor, targets: Tensor, ignore_index: int, z_loss: float) -> tuple[Tensor, Tensor, Tensor]:
        lse = row_logsumexp(logits)  # (N,)
        loss_sum = row_losses(logits, targets, lse, ignore_index).sum()
        z_loss_sum = z_loss * torch.where(targets != ignore_index, lse.square(), 0.0).sum()
        return loss_sum, z_loss_sum, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        logits, targets, ctx.ignore_index, ctx.z_loss = inputs
        lse = output[2]
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(logits, targets, lse)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, grad_z_loss: Tensor, _: Any) -> tuple[Tensor, None, None, None]:
        """d/dlogits = p (grad_loss + 2 z lse grad_z_loss) - onehot grad_loss, one N x V tensor in the logits' dtype."""
        logits, targets, lse = ctx.saved_tensors
        counted = targets != ctx.ignore_index
        scale = torch.where(counted, grad_loss + 2 * ctx.z_loss * lse * grad_z_loss, 0.0)  # (N,)
        index = torch.where(counted, targets, 0)[:, None]  # (N, 1)
        # The target's entry is made on its own and written over: adding to a rounded p would lose it where p is near 1.
        at_target = softmax_rows(logits.gather(1, index), lse, scale)  # (N, 1)
        at_target = at_target - torch.where(counted, grad_loss, 0.0)[:, None]
        gradient = scaled_softmax(logits, lse, scale)  # (N, V)
        return gradient.scatter_(1, index, at_target.to(gradient.dtype)), None, None, None


def flatten(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(..., V) and (...) -> (N, V) and (N,)."""
    assert logits.shape[:-1] == targets.shape, f"logits {tuple(logits.shape)} for targets {tuple(targets.shape)}"
    return logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)


def row_losses(logits: Tensor, targets: Tensor, lse: Tensor, ignore_index: int) -> Tensor:
    """lse - logit of the target, 0 where ignored: (N,)."""
    counted = targets != ignore_index
    at_target = logits.gather(1, torch.where(counted, targets, 0)[:, None])[:, 0]  # (N,)
    return torch.where(counted, lse - at_target.to(lse.dtype), 0.0)


def row_logsumexp(logits: Tensor) -> Tensor:
    """logsumexp of each row, at least float32: (N, V) -> (N,)."""
    chunks = logits.split(chunk_rows(logits))
    return torch.cat([torch.logsumexp(chunk.to(working_dtype(chunk)), dim=-1) for chunk in chunks])


def scaled_softmax(logits: Tensor, lse: Tensor, scale: Tensor) -> Tensor:
    """softmax of each row times its scale, in the logits' dtype: (N, V)."""
    rows = chunk_rows(logits)
    if rows >= logits.shape[0]:
        return softmax_rows(logits, lse, scale).to(logits.dtype)
    result = torch.empty_like(logits)
    pieces = (result.split(rows), logits.split(rows), lse.split(rows), scale.split(rows))
    for out, chunk, chunk_lse, chunk_scale in zip(*pieces, strict=True):
        out.copy_(softmax_rows(chunk, chunk_lse, chunk_scale))
    return result


def softmax_rows(logits: Tensor, lse: Tensor, scale: Tensor) -> Tensor:
    """exp(logits - lse) * scale, at least float32: (n, m) with lse and scale (n,)."""
    # Cast first: an operation on two dtypes is not vectorised on a CPU.
    return (logits.to(lse.dtype) - lse[:, None]).exp_().mul_(scale[:, None])


def working_dtype(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def chunk_rows(logits: Tensor) -> int:
    """Rows taken at once: all of them under torch.compile, which fuses the operations and needs no cache blocking."""
    if torch.compiler.is_compiling():
        return max(1, logits.shape[0])
    elements = GPU_CHUNK_ELEMENTS if logits.is_cuda else CPU_CHUNK_ELEMENTS
    return max(1, elements // logits.shape[1])
