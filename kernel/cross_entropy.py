"""The output layer and its softmax cross-entropy as one operation that never holds the N x V logits.

Rows go in chunks: logits = x W^T by cuBLAS, one Triton kernel that turns them in place into their gradient, then
dx = dlogits W and dW += dlogits^T x. So the gradients exist after forward (as in Liger, Hsu et al. 2024), and the
number of target tokens must be known before: `num_targets` is what the sums will be divided by. On a vocabulary
shard `vocab_offset` says where it starts and `combine(lse, target_logit)` makes both global, once a chunk; each rank
then has its rows' part of dx, which the caller sums over the shards.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from configs.errors import UserError
from kernel.cross_entropy_kernels import RowTiles, add_product, default_rows, loss_kernel, run_rows, scale_
from kernel.operator_inputs import check_tensors, is_traced

Combine = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
CHUNK_BYTES = 1 << 28  # of logits at a time: long products stay efficient, and 256 MiB is little beside a model


@dataclass(frozen=True)
class LossOptions:
    """What the loss is and how it is computed.

    num_targets: the gradients are made for sums divided by it, 1 where None; another divisor costs a pass over them.
    vocab_size: of the whole vocabulary; columns at or beyond it (padding) have probability 0. combine takes and returns
    lse and the target's logit (rows,) float32, the latter 0 where the target lies on another shard.
    accumulate: dtype in which dW is summed over chunks, the weight's where None. rows: tiles of the Triton kernel.
    """

    ignore_index: int = -100
    z_loss: float = 0.0
    num_targets: int | None = None
    vocab_offset: int = 0
    vocab_size: int | None = None
    combine: Combine | None = None
    chunk_bytes: int = CHUNK_BYTES
    accumulate: torch.dtype | None = None
    rows: RowTiles | None = None

    @property
    def made_for(self) -> float:
        """The gradient of the loss sum that the returned gradients belong to."""
        return 1.0 / max(self.num_targets, 1) if self.num_targets is not None else 1.0


def linear_cross_entropy_reference(
    x: Tensor, weight: Tensor, targets: Tensor, options: LossOptions = LossOptions()
) -> tuple[Tensor, Tensor]:
    """The same in plain PyTorch with all logits in memory, on a whole vocabulary; both sums are differentiable."""
    logits = torch.nn.functional.linear(x, weight.to(x.dtype))[:, : options.vocab_size]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counted = targets != options.ignore_index
    lse = torch.logsumexp(logits, dim=-1)
    target_logit = logits.gather(1, torch.where(counted, targets, 0)[:, None])[:, 0]
    loss_sum = torch.where(counted, lse - target_logit, 0.0).sum()
    return loss_sum, options.z_loss * torch.where(counted, lse.square(), 0.0).sum()


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, options: LossOptions = LossOptions()
) -> tuple[Tensor, Tensor]:
    """x (N, C), weight (V, C) in x's dtype or float32, targets (N,) int64 -> loss_sum, z_loss_sum, float32 scalars.

    The sum of -log p(target) over target tokens and z_loss times that of lse^2. Both share one gradient, which loss_sum
    carries: z_loss_sum has none of its own, and their sum is what to differentiate. dW comes in the weight's dtype.
    Raises UserError for dtypes, devices, strides or sizes that the kernels do not take; a target outside the
    vocabulary adds lse alone.
    """
    check_inputs(x, weight, targets, options)
    needs = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (x, weight)]
    if not is_traced(x):
        return EagerLoss.apply(x, weight, targets, options, needs)
    if options.combine is not None:
        return apply_outside_graph(x, weight, targets, options, needs)
    integers = [options.ignore_index, options.num_targets or 0, options.vocab_offset, options.vocab_size or 0]
    integers += [options.chunk_bytes, int(options.accumulate == torch.float32), *map(int, needs)]
    sums, _, _ = loss_op(x, weight, targets, integers, options.z_loss)
    return sums[0], sums[1].detach()


@torch.compiler.disable
def apply_outside_graph(*arguments: Any) -> tuple[Tensor, Tensor]:
    """A callable such as `combine` cannot be part of an operator: the compiled graph breaks here."""
    return EagerLoss.apply(*arguments)


def check_inputs(x: Tensor, weight: Tensor, targets: Tensor, options: LossOptions) -> None:
    check_tensors("cross_entropy", loss_kernel, x=x, weight=weight)
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or targets.shape != x.shape[:1]:
        shapes = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}"
        raise UserError(f"cross_entropy: {shapes} must be (N, C), (V, C) and (N,); flatten them")
    if x.numel() == 0 or weight.numel() == 0:
        raise UserError(f"cross_entropy: x {tuple(x.shape)} and weight {tuple(weight.shape)} may not be empty; skip it")
    if weight.dtype not in (x.dtype, torch.float32):
        raise UserError(f"cross_entropy: weight of {weight.dtype} must be {x.dtype} as x is, or float32; cast it")
    if targets.dtype != torch.int64 or targets.device != x.device:
        kind = f"{targets.dtype} on {targets.device}"
        raise UserError(f"cross_entropy: targets of {kind} must be int64 on {x.device}; convert them")
    if not (x.is_contiguous() and weight.is_contiguous() and targets.is_contiguous()):
        raise UserError("cross_entropy: x, weight and targets must be contiguous; call .contiguous() first")


class EagerLoss(torch.autograd.Function):
    """The loop without the dispatcher's Python layers; the gradients wait in ctx and are handed out once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, options: LossOptions, needs: list[bool]):
        sums, dx, dweight = run_chunks(x, weight, targets, options, needs)
        ctx.gradients, ctx.made_for = [dx, dweight], options.made_for
        loss_sum, z_loss_sum = sums
        ctx.mark_non_differentiable(z_loss_sum)
        return loss_sum, z_loss_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor, _: Any):
        assert ctx.gradients is not None, "the gradients of this loss were handed out; run forward again"
        gradients, ctx.gradients = ctx.gradients, None
        scaled = [None if x is None else scale_(x, dloss, ctx.made_for) for x in gradients]
        return *scaled, None, None, None


@torch.library.custom_op("mew::linear_cross_entropy", mutates_args=())
def loss_op(
    x: Tensor, weight: Tensor, targets: Tensor, integers: list[int], z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    """integers: ignore_index, num_targets, vocab_offset, vocab_size, chunk_bytes, float32 sums, dx and dW wanted."""
    options, needs = unpack(integers, z_loss)
    sums, dx, dweight = run_chunks(x, weight, targets, options, needs)
    empty = [tensor.new_empty(0) if g is None else g for tensor, g in ((x, dx), (weight, dweight))]
    return torch.stack(sums), *empty


def unpack(integers: list[int], z_loss: float) -> tuple[LossOptions, list[bool]]:
    ignore_index, num_targets, vocab_offset, vocab_size, chunk_bytes, wide, *needs = integers
    options = LossOptions(
        ignore_index, z_loss, num_targets or None, vocab_offset, vocab_size or None, None, chunk_bytes,
        torch.float32 if wide else None,
    )  # fmt: skip
    return options, [bool(need) for need in needs]


@loss_op.register_fake
def _(x, weight, targets, integers, z_loss):
    dx, dweight = (t.new_empty(t.shape if need else 0) for t, need in zip((x, weight), integers[-2:], strict=True))
    return x.new_empty(2, dtype=torch.float32), dx, dweight


def save_gradients(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.made_for, ctx.needs = unpack(inputs[3], inputs[4])[0].made_for, inputs[3][-2:]


def propagate(ctx: Any, dsums: Tensor, _dx: Tensor, _dweight: Tensor):
    factor = dsums[0] / ctx.made_for
    both = zip(ctx.saved_tensors, ctx.needs, strict=True)
    return *((g * factor).to(g.dtype) if need else None for g, need in both), None, None, None


loss_op.register_autograd(propagate, setup_context=save_gradients)


def chunk_rows(num_rows: int, num_columns: int, itemsize: int, chunk_bytes: int) -> int:
    """Rows of a chunk: as many multiples of 128 as fit into chunk_bytes, fewer where the last would be under half."""
    most = max(128, chunk_bytes // (num_columns * itemsize) // 128 * 128)
    if 0 < num_rows % most < most / 2:
        chunks = -(-num_rows // most)
        most = -(-num_rows // (128 * chunks)) * 128
    return min(num_rows, most)


def run_chunks(
    x: Tensor, weight: Tensor, targets: Tensor, options: LossOptions, needs: list[bool]
) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
    """[loss sum, z-loss sum], dx and dW (None where not needed) of x (N, C) and weight (V, C)."""
    (N, C), V = x.shape, weight.shape[0]
    matrix = weight.to(x.dtype)  # itself where the dtypes are one
    rows = chunk_rows(N, V, x.element_size(), options.chunk_bytes)
    logits = torch.empty(rows, V, dtype=x.dtype, device=x.device)
    statistics = torch.empty(4, N, dtype=torch.float32, device=x.device)  # lse, target logit, loss, z of each row
    dx = torch.empty_like(x) if needs[0] else None
    dweight = torch.empty(V, C, dtype=options.accumulate or weight.dtype, device=x.device) if needs[1] else None
    for first in range(0, N, rows):
        chunk, here = logits[: min(rows, N - first)], slice(first, min(first + rows, N))
        torch.mm(x[here], matrix.t(), out=chunk)
        differentiate_rows(chunk, targets[here], statistics[:, here], options, any(needs))
        if dx is not None:
            torch.mm(chunk, matrix, out=dx[here])
        if dweight is not None:
            add_product(dweight, chunk.t(), x[here], first == 0)
    del logits
    sums = (
        statistics[2:].sum(dim=1, dtype=torch.float64).float()
    )  # one number of each row: the sum's rounding alone shows
    return list(sums.unbind()), dx, None if dweight is None else dweight.to(weight.dtype)


def differentiate_rows(
    chunk: Tensor, targets: Tensor, statistics: Tensor, options: LossOptions, gradient: bool
) -> None:
    """Fill the statistics (4, n) of a chunk of logits (n, V) and, if wanted, turn it into its gradient."""
    V = chunk.shape[1]
    valid = V if options.vocab_size is None else max(0, min(V, options.vocab_size - options.vocab_offset))
    numbers = (valid, options.vocab_offset, options.ignore_index, options.z_loss, options.made_for)
    tiles = options.rows or default_rows(V)
    if options.combine is None:
        run_rows(chunk, targets, statistics, numbers, (True, gradient), tiles)
        return
    run_rows(chunk, targets, statistics, numbers, (True, False), tiles)
    lse, target_logit = options.combine(statistics[0].contiguous(), statistics[1].contiguous())
    statistics[0].copy_(lse)
    statistics[1].copy_(target_logit)
    run_rows(chunk, targets, statistics, numbers, (False, gradient), tiles)
