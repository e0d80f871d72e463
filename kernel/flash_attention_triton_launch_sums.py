"""Attention over keys that come in several calls, each of which goes on from what the earlier ones left.

A softmax over some keys is known by its out and lse, so the forward kernel begins with them where it would begin with
nothing, and leaves them as they are after its keys: no call has a result of its own that would have to be joined. So
too for gradients, which the backward kernels add to float32 sums. What a call reads and writes besides its inputs is
one pass over the rows that it has. docs/context_parallel.md has the counts, parallel/context_parallel the user.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernel.flash_attention_triton_launch import (
    Attention,
    aligned,
    choose_backward,
    hopper,
    launch_forward,
    launch_key,
    launch_query,
    run_delta,
    run_forward,
    tuned_config,
)

BEGIN, GO_ON = 1, 2  # Attention.sums
Qkv = tuple[Tensor, Tensor, Tensor]  # q (B, T, H, D), k and v (B, S, K, D)


def forward_sums(qkv: Qkv, out: Tensor, lse: Tensor, first: bool, call: Attention) -> None:
    """Join the keys k, v to out (B, T, H, D) and lse (B, H, T) of the queries q, float32, in place.

    `first`: there were no keys before, so what out and lse hold does not count. Both may be those of some rows of
    more, as out[:, rows] and lse[:, :, rows] are. A row that has seen no key gets out 0 and lse -inf.
    """
    q, k, v = map(aligned, qkv)
    config = tuned_config("forward", (q, k), call, lambda tile: run_forward(q, k, v, call, tile))
    launch = hopper().launch_forward if config.consumers else launch_forward
    launch(q, k, v, (out, lse), replace(call, sums=BEGIN if first else GO_ON), config)


@dataclass(frozen=True)
class BackwardRows:
    """What the backward kernels take of some queries, once for all calls: out, dout (B, T, H, D), lse, delta's rows."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    delta: Tensor


def backward_rows(out: Tensor, lse: Tensor, dout: Tensor) -> BackwardRows:
    """From out, lse (B, H, T) and dout of the softmax over the keys of all calls."""
    lse, dout = lse.contiguous(), aligned(dout)
    return BackwardRows(out, lse, dout, run_delta(out, lse, dout, None))


def backward_sums(
    qkv: Qkv, rows: BackwardRows, dq: Tensor, first: bool, arrive: Callable[[], tuple[Tensor, Tensor, bool]],
    call: Attention,
) -> None:  # fmt: skip
    """Add to dq (B, T, H, D), then to dk and dv (B, S, K, D), all float32, what the keys of this call give.

    `first`: dq holds nothing yet. arrive() gives dk, dv, which have the same strides, and the same of them; it is
    called when the kernel of dq is queued, so that sums may be on their way until then. Where one kernel makes all
    three (by atomics, not on Hopper) they are needed before it.
    """
    q, k, v = map(aligned, qkv)
    tensors = (q, k, v, rows.dout)
    saved = [q, k, v, rows.out, rows.lse, rows.dout, None]
    key_config, query_config = choose_backward(saved, call, None, None)
    launch_keys = hopper().launch_key if key_config.consumers else launch_key
    apart = call.deterministic or key_config.consumers > 0
    part = None if apart else torch.zeros(dq.shape, dtype=torch.float32, device=dq.device)
    if apart:
        launch = hopper().launch_query if query_config.consumers else launch_query
        launch(tensors, rows.delta, dq, replace(call, sums=BEGIN if first else GO_ON), query_config)
    dk, dv, empty = arrive()
    launch_keys(tensors, rows.delta, (part, dk, dv), replace(call, sums=BEGIN if empty else GO_ON), key_config)
    if part is not None and first:
        torch.mul(part, call.scale, out=dq)
    elif part is not None:
        dq.add_(part, alpha=call.scale)
