"""The attention backends as a ring's blocks: masks in each backend's form, and gradients given the whole's out and lse.

The Triton kernels go on from the out, lse and sums of the blocks before (kernel/flash_attention_triton_launch_sums).
torch's CPU kernel (parallelize_context_sdpa) is joined to them; eager and mock are too, and go through autograd
(parallel/context_parallel_blocks.DifferentiableBlock).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llm.parallelize_context_sdpa import SdpaBlock, sdpa_mask
from llm.transformer_attention import BACKENDS, prepare_mask
from llm.transformer_context import BlockContext
from parallel.context_parallel_blocks import BlockAttention, DifferentiableBlock, Joined, Rows, Sums
from parallel.context_parallel_layout import BlockMask, Intervals

RING_BACKENDS = ("triton", "mock", "eager")  # those that give a logsumexp on every device
CPU_RING_BACKENDS = (*RING_BACKENDS, "sdpa")


@dataclass(frozen=True)
class TritonMask:
    """A block's mask as the kernels take it: NO_MASK, CAUSAL or RANGES, and the four tensors of the latter."""

    bounds: int
    ranges: tuple[Tensor, ...] = ()


class TritonBlock:
    """BlockAttention of our Triton kernels."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: TritonMask, joined: Joined) -> None:
        from kernel.flash_attention_triton_launch_sums import forward_sums

        forward_sums((q, k, v), joined.out, joined.lse, joined.empty, self.call(q, mask))

    def prepare_rows(self, rows: Rows) -> Any:
        from kernel.flash_attention_triton_launch_sums import backward_rows

        return backward_rows(rows.out, rows.lse, rows.dout)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, rows: Any, mask: TritonMask, dq: Sums, arrive: Callable[[], Sums]
    ) -> None:
        from kernel.flash_attention_triton_launch_sums import backward_sums

        def key_sums() -> tuple[Tensor, Tensor, bool]:
            sums = arrive()
            return *sums.tensors, sums.empty

        backward_sums((q, k, v), rows, *dq.tensors, dq.empty, key_sums, self.call(q, mask))

    def call(self, q: Tensor, mask: TritonMask) -> Any:
        from kernel.flash_attention_triton_launch import Attention

        return Attention(mask.ranges, mask.bounds, 0, 1.0 / math.sqrt(q.shape[-1]))


def block_attention(backend: str) -> BlockAttention:
    """A backend as the blocks of a ring."""
    own = {"triton": TritonBlock, "sdpa": SdpaBlock}
    return own[backend]() if backend in own else DifferentiableBlock(BACKENDS[backend])


def prepare_block(backend: str, mask: BlockMask, device: torch.device) -> Any:
    """A block's mask in the form that the backend's block_attention takes, once for all layers."""
    if backend == "triton":
        return triton_mask(mask)
    ctx = BlockContext(torch.empty(0), keys=(*as_intervals(mask, device), mask.num_keys))
    prepare_mask(backend, ctx)
    return sdpa_mask(mask.kind, ctx) if backend == "sdpa" else ctx


def triton_mask(mask: BlockMask) -> TritonMask:
    from kernel.flash_attention_ranges import ranges_from_keys
    from kernel.flash_attention_triton_launch import CAUSAL, NO_MASK, RANGES

    if mask.kind != "intervals":
        return TritonMask(CAUSAL if mask.kind == "causal" else NO_MASK)
    ranges = ranges_from_keys(*mask.intervals, mask.num_keys)
    return TritonMask(RANGES, (ranges.key_lo, ranges.key_hi, ranges.query_lo, ranges.query_hi))


def as_intervals(mask: BlockMask, device: torch.device) -> Intervals:
    """Any mask as intervals (B or 1, T)."""
    if mask.kind == "intervals":
        return mask.intervals
    queries = torch.arange(mask.num_queries, device=device, dtype=torch.int32)[None]
    zeros = torch.zeros_like(queries)
    return zeros, (queries + 1 if mask.kind == "causal" else zeros + mask.num_keys)
