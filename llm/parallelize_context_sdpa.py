"""torch's flash kernel for CPUs as a ring's blocks, so that context parallelism needs no Triton (model.attention=sdpa).

F.scaled_dot_product_attention gives no logsumexp, the operations beneath it do. Their backward is FlashAttention-2's:
it makes the probabilities from whatever logsumexp it is given, so with out and lse of the whole sequence it gives a
block's gradients at once, and forward does not run twice. On a GPU there is no such pair for every mask.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llm.transformer_context import BlockContext
from llm.transformer_layers import at_least_float32
from parallel.context_parallel_blocks import Joined, Rows, Sums

KERNELS = "_scaled_dot_product_flash_attention_for_cpu"


@dataclass(frozen=True)
class SdpaMask:
    """A block's mask as the kernel takes it: causal, or what is added to scores (B or 1, 1, T, S), or neither."""

    is_causal: bool = False
    bias: Tensor | None = None  # float32: 0 or -inf
    blind: Tensor | None = None  # (B or 1, 1, T): rows that see no key of the block

    @staticmethod
    def of(kind: str, dense: Tensor | None) -> "SdpaMask":
        """`dense` (B or 1, 1, T, S) says of "intervals" what each query sees."""
        if kind != "intervals":
            return SdpaMask(is_causal=kind == "causal")
        bias = torch.zeros(dense.shape, device=dense.device).masked_fill_(~dense, -torch.inf)
        return SdpaMask(bias=bias, blind=~dense.any(-1))

    def bias_for(self, q: Tensor) -> Tensor | None:
        return None if self.bias is None else self.bias.to(q.dtype)


def sdpa_mask(kind: str, ctx: BlockContext) -> SdpaMask:
    """From a context whose mask has been prepared for SDPA."""
    return SdpaMask.of(kind, ctx.mask)


def heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, H, T, D), and k and v repeated to its heads (B, H, S, D): not every version of the kernel shares them."""
    groups = q.shape[2] // k.shape[2]
    return q.transpose(1, 2), *(x.repeat_interleave(groups, dim=2).transpose(1, 2) for x in (k, v))


class SdpaBlock:
    """BlockAttention of the CPU's flash kernel."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: SdpaMask, joined: Joined) -> None:
        run = getattr(torch.ops.aten, KERNELS)
        out, lse = run(*heads_first(q, k, v), 0.0, mask.is_causal, attn_mask=mask.bias_for(q))
        lse = at_least_float32(lse)  # (B, H, T)
        if mask.blind is not None:
            lse = lse.masked_fill(mask.blind, -torch.inf)
        joined.add(out.transpose(1, 2), lse)

    def prepare_rows(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """dout and out (B, H, T, D) in the kernel's dtype, and lse (B, H, T), 0 where a row sees nothing at all."""
        out, lse = rows.out.to(rows.dout.dtype), rows.lse
        return rows.dout.transpose(1, 2), out.transpose(1, 2), lse.masked_fill(lse == -torch.inf, 0.0)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, rows: Any, mask: SdpaMask, dq: Sums, arrive: Callable[[], Sums]
    ) -> None:
        run = getattr(torch.ops.aten, f"{KERNELS}_backward")
        dout, out, lse = rows
        gradients = run(dout, *heads_first(q, k, v), out, lse, 0.0, mask.is_causal, attn_mask=mask.bias_for(q))
        dq_part, *dkv = (gradient.transpose(1, 2) for gradient in gradients)  # (B, T, H, D), (B, S, H, D)
        dq.add(dq_part)
        B, S, K, D = k.shape
        arrive().add(*(part.reshape(B, S, K, -1, D).sum(3) for part in dkv))
