"""Context parallelism of our Transformer: each rank takes its tokens of every sequence, attention reaches across.

Outside of attention nothing knows of it: a rank's batch holds the token ids, labels and positions of its share, cut
after labels were shifted and with positions of the whole sequence. Attention is swapped by its seam `attend`, where the
context of the batch carries what the mode needs (parallel/context_parallel): blocks and masks of a ring, or the
context of the whole sequence for gathered keys and Ulysses. A context without a share, as generation builds it, gets
the plain attention.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configs.errors import UserError
from llm.args import TrainConfig
from llm.data_loader import Batch
from llm.loss import IGNORE_INDEX
from llm.parallelize_context_blocks import CPU_RING_BACKENDS, RING_BACKENDS, block_attention, prepare_block
from llm.transformer_attention import prepare_mask
from llm.transformer_context import BlockContext, document_starts
from parallel.collectives_operators import Along, along
from parallel.context_parallel import Ring, ring_attention
from parallel.context_parallel_exchange import gather_keys, heads_for_tokens, spread_kv_heads, tokens_for_heads
from parallel.context_parallel_layout import (
    contiguous_columns,
    padded_length,
    ring_blocks,
    sequence_order,
    zigzag_columns,
)
from parallel.mesh import Mesh


@dataclass(frozen=True)
class GatheredKeys:
    """What a batch's attention needs under cp_mode=all_gather: the mask of this rank's queries over all keys."""

    along: Along
    order: Tensor
    context: BlockContext

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inner: Callable) -> tuple[Tensor, Tensor | None]:
        return inner(q, *gather_keys(k, v, self.along, self.order), self.context)


@dataclass(frozen=True)
class TradedHeads:
    """The same under cp_mode=ulysses: the mask of the whole sequence. The logsumexp of a rank's heads is not sent."""

    along: Along
    context: BlockContext

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inner: Callable) -> tuple[Tensor, None]:
        ranks = self.along.size()
        k, v = spread_kv_heads(k, ranks), spread_kv_heads(v, ranks)
        q, k, v = (heads_for_tokens(x, self.along) for x in (q, k, v))  # (B, T, H/P, D), (B, T, K/P, D)
        return tokens_for_heads(inner(q, k, v, self.context)[0], self.along), None


@dataclass(frozen=True)
class RingShare:
    """The same under cp_mode=ring."""

    ring: Ring

    def attend(self, q: Tensor, k: Tensor, v: Tensor, inner: Callable) -> tuple[Tensor, Tensor]:
        return ring_attention(q, k, v, self.ring)


class ContextAttention(nn.Module):
    """What stands in `attend`: attention over all ranks' keys where the context has a share, else `inner`."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: BlockContext) -> tuple[Tensor, Tensor | None]:
        if ctx.share is None:
            assert not torch.is_grad_enabled(), "training under parallel.cp > 1 needs ContextShards.make_context"
            return self.inner(q, k, v, ctx)
        return ctx.share.attend(q, k, v, self.inner)


class ContextShards:
    """This rank's view of batches under context parallelism: `shard` cuts one, `make_context` is for what it cut."""

    def __init__(self, mesh: Mesh, mode: str, backend: str):
        self.mesh, self.mode, self.backend = mesh, mode, backend
        self.ranks, self.rank = mesh.size("cp"), mesh.rank_in("cp")
        self.along = along(mesh, "cp")
        self.kept: dict[tuple[Any, ...], Tensor] = {}  # indices by length and device: a copy to a GPU takes time

    def multiple(self) -> int:
        """What the length of a sequence is padded to a multiple of."""
        return multiple_of(self.mode, self.ranks)

    def columns_of(self, length: int, device: torch.device | str) -> Tensor:
        """The columns of a sequence that this rank holds, (T / cp,) int64; those from `length` on are padding."""
        return self.columns(padded_length(length, self.multiple()), device)

    def columns(self, num_tokens: int, device: torch.device | str) -> Tensor:
        """The same of a sequence that is padded already."""
        place = contiguous_columns if self.mode == "ulysses" else zigzag_columns
        return self.keep(("columns", num_tokens, device), lambda: place(num_tokens, self.ranks, self.rank))

    def order(self, num_tokens: int, device: torch.device | str) -> Tensor:
        return self.keep(("order", num_tokens, device), lambda: sequence_order(num_tokens, self.ranks))

    def keep(self, key: tuple[Any, ...], make: Callable[[], Tensor]) -> Tensor:
        if key not in self.kept:
            self.kept[key] = make().to(key[-1])
        return self.kept[key]

    def shard(self, batch: Batch) -> Batch:
        """This rank's tokens, labels and positions of a batch (B, T), padded at the end to a multiple that divides.

        doc_ids stay those of the whole sequence, since what a query sees depends on where its document begins. A
        position is the token's place in the whole sequence, or in its document.
        """
        num_tokens = batch.token_ids.shape[1]
        extra = padded_length(num_tokens, self.multiple()) - num_tokens
        columns = self.columns(num_tokens + extra, batch.token_ids.device)
        positions = batch.token_positions
        if positions is None:
            positions = torch.arange(num_tokens, device=batch.token_ids.device)[None]  # (1, T)
        targets = F.pad(batch.targets, (0, extra), value=IGNORE_INDEX)[:, columns]
        cut = Batch(
            token_ids=F.pad(batch.token_ids, (0, extra))[:, columns],
            targets=targets,
            num_targets=int((targets != IGNORE_INDEX).sum()),
            # Padding goes on as a part of the last document; it comes last, so no token sees it.
            doc_ids=None if batch.doc_ids is None else F.pad(batch.doc_ids[None], (0, extra), mode="replicate")[0],
            token_positions=F.pad(positions, (0, extra))[:, columns],
        )
        return cut.pin_memory() if batch.token_ids.is_pinned() else cut

    def make_context(
        self, token_ids: Tensor, token_positions: Tensor | None = None, doc_ids: Tensor | None = None
    ) -> BlockContext:
        """The context of a batch that `shard` made: token_ids (B, T / cp), doc_ids (B, T) of the whole sequence."""
        num_tokens, device = token_ids.shape[1] * self.ranks, token_ids.device
        starts = None if doc_ids is None else document_starts(doc_ids)  # (B, T)
        ctx = BlockContext(token_positions)
        make = {"ring": self.ring_share, "all_gather": self.gathered_keys, "ulysses": self.traded_heads}[self.mode]
        ctx.share = make(ctx, num_tokens, starts, device)
        return ctx

    def ring_share(self, ctx: BlockContext, num_tokens: int, starts: Tensor | None, device: torch.device) -> RingShare:
        columns = self.columns(num_tokens, device)
        intervals = None
        if starts is not None:
            intervals = starts[:, columns], (columns.int() + 1).expand(starts.shape[0], -1)
        blocks = ring_blocks(num_tokens // self.ranks, self.ranks, self.rank, intervals)
        masks = [prepare_block(self.backend, block.mask, device) for block in blocks]
        return RingShare(Ring(self.mesh, blocks, masks, block_attention(self.backend)))

    def gathered_keys(
        self, ctx: BlockContext, num_tokens: int, starts: Tensor | None, device: torch.device
    ) -> GatheredKeys:
        columns = self.columns(num_tokens, device)
        key_hi = columns.int()[None] + 1  # (1, T / cp)
        key_lo = torch.zeros_like(key_hi) if starts is None else starts[:, columns]
        whole = replace(ctx, keys=(key_lo, key_hi.expand(key_lo.shape), num_tokens))
        prepare_mask(self.backend, whole)
        return GatheredKeys(self.along, self.order(num_tokens, device), whole)

    def traded_heads(
        self, ctx: BlockContext, num_tokens: int, starts: Tensor | None, device: torch.device
    ) -> TradedHeads:
        whole = replace(ctx)
        if starts is not None:
            key_hi = torch.arange(1, num_tokens + 1, device=device, dtype=torch.int32).expand(starts.shape)
            whole = replace(ctx, keys=(starts, key_hi, num_tokens))
            prepare_mask(self.backend, whole)
        return TradedHeads(self.along, whole)


def multiple_of(mode: str, ranks: int) -> int:
    return ranks if mode == "ulysses" else 2 * ranks


def check_context(config: TrainConfig, device_type: str = "cuda") -> None:
    """UserError where parallel.cp does not divide what it has to, or meets what it cannot work with."""
    parallel, model = config.parallel, config.model
    multiple = multiple_of(parallel.cp_mode, parallel.cp)
    length = padded_length(config.data.seq_len, multiple)
    if length != config.data.seq_len and not parallel.cp_pad:
        raise UserError(
            f"data.seq_len={config.data.seq_len} must be a multiple of {multiple} for parallel.cp={parallel.cp} and "
            f"cp_mode={parallel.cp_mode}; use {length}, or parallel.cp_pad=true, which pads each sequence to that"
        )
    backends = CPU_RING_BACKENDS if device_type == "cpu" else RING_BACKENDS
    if parallel.cp_mode == "ring" and model.attention not in backends:
        raise UserError(
            f"model.attention={model.attention} gives no logsumexp on a GPU, by which parallel.cp_mode=ring joins "
            f"blocks; use model.attention=triton, or parallel.cp_mode=all_gather or ulysses"
        )
    if config.compile == "model":
        raise UserError("compile=model cannot see through attention over parallel.cp ranks; use compile=block")
    if parallel.cp_mode == "ulysses":
        check_heads(model.num_heads, model.num_kv_heads, parallel.cp, parallel.tp)


def check_heads(num_heads: int, num_kv_heads: int, cp: int, tp: int) -> None:
    """Ulysses shares out the heads that tensor parallelism left on a rank."""
    heads, kv_heads = num_heads // tp, max(1, num_kv_heads // tp)
    if heads % cp or (kv_heads % cp and cp % kv_heads):
        raise UserError(
            f"parallel.cp={cp} with cp_mode=ulysses must divide num_heads / tp = {num_heads} / {tp}, and divide "
            f"num_kv_heads / tp = {kv_heads} or be a multiple of it; use a divisor, or parallel.cp_mode=ring"
        )


def apply_context(model: nn.Module, config: TrainConfig, mesh: Mesh) -> ContextShards | None:
    """Let attention reach across the cp axis, in place; None, with nothing done, where that axis has one rank."""
    if not mesh.is_active("cp"):
        return None
    check_context(config, mesh.device.type)
    for block in model.blocks.values():
        attend = ContextAttention(block.attention.attend)
        if config.compile != "none":
            # A graph break: rings of sends and receives are no part of a compiled block.
            attend.forward = torch.compiler.disable(attend.forward)
        block.attention.attend = attend
    return ContextShards(mesh, config.parallel.cp_mode, config.model.attention)
