"""Tokens cross in chunks, so that one chunk's transfer runs beside another chunk's product (Wang et al. 2023).

Columns start the gathers of all chunks and multiply each as it comes; rows start a chunk's reduce-scatter as soon as it
is multiplied. Backward mirrors both, and the weights' gradients, which need no transfer, run beside the last one. What
stays exposed is the first gather and the last scatter.

A cut stream of `chunks` pieces holds m tokens of every chunk on each rank, so a chunk's gather is a run of tokens in
their order and products write where they belong: no copy puts chunks together. Transfers run on a side stream of the
mesh; a compiled block breaks at each of these layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from configs.errors import UserError
from parallel.collectives import start_all_gather, start_reduce_scatter
from parallel.collectives_pending import Pending
from parallel.mesh import Mesh

STREAM = "tensor"
# Takes weights, the rows (N, in) that they read and their outputs' gradients (N, out), to make the weights' later.
Later = Callable[[Sequence[Tensor], Tensor, Sequence[Tensor]], None]


@dataclass(frozen=True, eq=False)
class Chunks:
    """How tokens cross: over which axis, in how many pieces; `later`: weight gradients are not made in backward."""

    mesh: Mesh
    axis: str
    count: int
    later: Later | None = None

    @property
    def ranks(self) -> int:
        return self.mesh.size(self.axis)

    def start_gathers(self, x: Tensor) -> tuple[Tensor, list[Pending]]:
        """x (n, C) of every rank -> (count, P m, C), whose chunk j is there when the j-th transfer is over."""
        pieces = x.contiguous().view(self.count, -1, x.shape[-1])  # (count, m, C)
        full = x.new_empty(self.count, self.ranks * pieces.shape[1], x.shape[-1])
        pairs = zip(pieces, full, strict=True)
        return full, [start_all_gather(p, self.mesh, self.axis, out.view(-1), STREAM) for p, out in pairs]

    def start_scatter(self, chunk: Tensor, out: Tensor) -> Pending:
        """(P m, C) summed over the ranks, of which this one's m rows go to `out` (m, C)."""
        return start_reduce_scatter(chunk.view(-1), self.mesh, self.axis, out.view(-1), STREAM)

    def puts_aside(self, x: Tensor, weights: Sequence[Tensor]) -> bool:
        """Whether `later` takes these weights' gradients: not where backward ends, which gives nothing first."""
        return self.later is not None and x.requires_grad and all(weight.requires_grad for weight in weights)

    def split(self, x: Tensor) -> Tensor:
        """Rows (N, ...) as (count, N / count, ...)."""
        return x.reshape(self.count, -1, x.shape[-1])


def product_dtype(x: Tensor) -> torch.dtype:
    """What autocast, where it is on, would multiply in."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class GatheredProducts(torch.autograd.Function):
    """x (B, T/P, C), columns (out/P, C), as many biases or None -> outputs (B, T, out/P).

    `learning`: the weights whose gradients are put aside; they go in unseen by autograd, or their hooks would fire.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, chunks: Chunks, learning: Sequence[Tensor], *parameters: Tensor | None):
        count = len(parameters) // 2
        weights, biases = parameters[:count], parameters[count:]
        dtype = product_dtype(x)
        full, pendings = chunks.start_gathers(x.to(dtype).reshape(-1, x.shape[-1]))
        matrices = [weight.to(dtype) for weight in weights]
        outputs = [full.new_empty(*full.shape[:2], len(weight)) for weight in weights]
        for index, pending in enumerate(pendings):
            pending.wait()
            for matrix, bias, out in zip(matrices, biases, outputs, strict=True):
                torch.mm(full[index], matrix.t(), out=out[index])
                if bias is not None:
                    out[index] += bias.to(dtype)
        ctx.save_for_backward(full, *matrices)
        ctx.chunks, ctx.learning, ctx.shape, ctx.dtype = chunks, learning, x.shape, x.dtype
        ctx.kinds = [None if parameter is None else parameter.dtype for parameter in parameters]
        B, tokens, _ = x.shape
        return tuple(out.view(B, tokens * chunks.ranks, -1) for out in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor):
        full, *matrices = ctx.saved_tensors
        chunks, count = ctx.chunks, len(matrices)
        split = [chunks.split(gradient) for gradient in gradients]  # (count, P m, out)
        dx = full.new_empty(chunks.count, full.shape[1] // chunks.ranks, full.shape[2])
        pendings = []
        for index in range(chunks.count):
            dchunk = torch.mm(split[0][index], matrices[0])  # (P m, C)
            for gradient, matrix in zip(split[1:], matrices[1:], strict=True):
                dchunk.addmm_(gradient[index], matrix)
            pendings.append(chunks.start_scatter(dchunk, dx[index]))
        rows = full.view(-1, full.shape[-1])
        flat = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
        if ctx.learning:
            chunks.later(ctx.learning, rows, flat)
            dweights = [None] * count
        else:
            dweights = [torch.mm(g.t(), rows).to(kind) for g, kind in zip(flat, ctx.kinds[:count], strict=True)]
        dbiases = [
            None if kind is None else g.sum(0, dtype=kind) for g, kind in zip(flat, ctx.kinds[count:], strict=True)
        ]
        for pending in pendings:
            pending.wait()
        return dx.view(ctx.shape).to(ctx.dtype), None, None, *dweights, *dbiases


class ScatteredProduct(torch.autograd.Function):
    """x (B, T, in/P), rows (C, in/P) -> the sum over ranks as the cut stream has it, (B, T/P, C).

    `learning` as in GatheredProducts.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, chunks: Chunks, learning: Sequence[Tensor]) -> Tensor:
        dtype = product_dtype(x)
        pieces, matrix = chunks.split(x.to(dtype)), weight.to(dtype)
        y = pieces.new_empty(chunks.count, pieces.shape[1] // chunks.ranks, len(weight))
        pendings = [chunks.start_scatter(torch.mm(p, matrix.t()), out) for p, out in zip(pieces, y, strict=True)]
        ctx.save_for_backward(pieces, matrix)
        ctx.chunks, ctx.learning, ctx.shape, ctx.kinds = chunks, learning, x.shape, (x.dtype, weight.dtype)
        for pending in pendings:
            pending.wait()
        return y.view(x.shape[0], x.shape[1] // chunks.ranks, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor):
        pieces, matrix = ctx.saved_tensors
        full, pendings = ctx.chunks.start_gathers(gradient.reshape(-1, gradient.shape[-1]))
        dx = torch.empty_like(pieces)
        for index, pending in enumerate(pendings):
            pending.wait()
            torch.mm(full[index], matrix, out=dx[index])
        rows, flat = pieces.view(-1, pieces.shape[-1]), full.view(-1, full.shape[-1])
        if ctx.learning:
            ctx.chunks.later(ctx.learning, rows, [flat])
            dweight = None
        else:
            dweight = torch.mm(flat.t(), rows).to(ctx.kinds[1])
        return dx.view(ctx.shape).to(ctx.kinds[0]), dweight, None, None


@dataclass(frozen=True, eq=False)
class OverlappedColumns:
    """An attention's or feed-forward's `project`, and a Linear's `matmul`, in chunks."""

    chunks: Chunks
    plain: tuple[Callable, ...]  # matmuls that are nothing but a product

    @torch.compiler.disable
    def __call__(self, x: Tensor, layers: Sequence[Any]) -> list[Tensor]:
        for layer in layers:
            check_plain(layer.matmul, self.plain)
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        learning = weights if self.chunks.puts_aside(x, weights) else []
        seen = [weight.detach() for weight in learning] or weights
        return list(GatheredProducts.apply(x, self.chunks, learning, *seen, *biases))


@dataclass(frozen=True, eq=False)
class OverlappedRow:
    """A Linear's `matmul` in chunks, the bias added once."""

    chunks: Chunks

    @torch.compiler.disable
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        learning = [weight] if self.chunks.puts_aside(x, [weight]) else []
        y = ScatteredProduct.apply(x, weight.detach() if learning else weight, self.chunks, learning)
        return y if bias is None else y + bias.to(y.dtype)


def check_plain(matmul: Callable, plain: tuple[Callable, ...]) -> None:
    if matmul not in plain:
        raise UserError(
            f"parallel.tp_chunks cannot cut the products of {getattr(matmul, '__name__', type(matmul).__name__)} into "
            f"chunks; use parallel.tp_chunks=1"
        )
