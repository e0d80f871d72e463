"""FlashAttention in Triton, forward and backward, as one differentiable operator (Dao, arXiv:2307.08691).

flash_attention(q, k, v, mask) -> (out, lse): nothing of size T x S is kept, keys and values are not repeated for
grouped heads, lse has a gradient of its own so that partial results can be merged. On Hopper the forward is the
warp-specialised kernel of flash_attention_triton_gluon; elsewhere the plain one. Eager calls go through a plain
autograd.Function; torch.compile sees one node of torch.library, whose Python layers cost an eager call 300 us.
Without a GPU it runs under Triton's interpreter (TRITON_INTERPRET=1), as CI does.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from configs.errors import UserError
from kernel.flash_attention_ranges import KeyRanges, cu_seqlens_ranges, document_ranges, offset_ranges
from kernel.flash_attention_triton_forward import forward_kernel
from kernel.flash_attention_triton_launch import CAUSAL, NO_MASK, RANGES, Attention, run_backward, run_forward
from kernel.operator_inputs import is_interpreted, is_traced

HEAD_DIMS = (32, 64, 80, 96, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class AttentionMask:
    """Which keys a query sees; `ranges` (built once a batch) wins over the fields it was built from.

    q_offset: position of the first query among the keys, S - T unless given. window: the last so many keys, its own
    included. doc_ids (B, T): a document is a run of equal ids. cu_seqlens (documents + 1,) int32: packed (1, N, H, D).
    """

    causal: bool = True
    window: int | None = None
    q_offset: int | None = None
    doc_ids: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    ranges: KeyRanges | None = None


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask = AttentionMask(),
    scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of q (B, T, H, D) over k, v (B, S, K, D), or packed (N, H, D): out like q, lse (B, H, T) float32.

    A query that sees no key gets out 0, lse -inf and gradient 0. Raises UserError for what the kernels cannot run.
    """
    packed = q.dim() == 3
    if packed:
        q, k, v = q[None], k[None], v[None]
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    check_inputs(q, k, v, scale, softcap)
    ranges, bounds, q_offset = resolve_mask(mask, q, k)
    if is_traced(q):
        integers = [bounds, q_offset, int(deterministic)]
        out, lse = flash_attention_forward(q, k, v, ranges, integers, [scale, softcap])
    else:
        call = Attention(tuple(ranges), bounds, q_offset, scale, softcap, deterministic)
        out, lse = EagerAttention.apply(q, k, v, call)
    return (out[0] if packed else out), lse


def check_inputs(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float) -> None:
    """One line for each rule that the kernels rely on."""
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise UserError(f"{shapes}: attention takes q (B, T, H, D) and k, v of one shape (B, S, K, D); reshape them")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise UserError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must agree in B and D; reshape them")
    if min(q.shape) == 0 or min(k.shape) == 0:
        raise UserError(f"q {tuple(q.shape)}, k {tuple(k.shape)}: no dimension may be 0; skip the call")
    if q.shape[2] % k.shape[2]:
        raise UserError(f"num_kv_heads={k.shape[2]} must divide num_heads={q.shape[2]}; use a divisor")
    if q.shape[3] not in HEAD_DIMS:
        raise UserError(f"head_dim={q.shape[3]} has no kernel; use one of {', '.join(map(str, HEAD_DIMS))}")
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise UserError(f"dtypes {q.dtype}, {k.dtype}, {v.dtype} must be one of bfloat16, float16, float32; cast them")
    if not (q.device == k.device == v.device):
        raise UserError(f"devices {q.device}, {k.device}, {v.device} must be one; move q, k and v together")
    if not (q.is_cuda or is_interpreted(forward_kernel)):
        raise UserError(
            "attention=triton needs a CUDA device; use attention=sdpa on CPU, or TRITON_INTERPRET=1 to test"
        )
    if q.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
        raise UserError("the last dimension of q, k and v must be contiguous; call .contiguous() first")
    if not scale > 0 or softcap < 0:
        raise UserError(f"scale={scale} must be above 0 and softcap={softcap} at least 0; use such values")


def resolve_mask(mask: AttentionMask, q: Tensor, k: Tensor) -> tuple[list[Tensor], int, int]:
    """The mask as the kernels take it: (the four arrays of KeyRanges or none, kind, offset)."""
    (B, T), S = q.shape[:2], k.shape[1]
    q_offset = S - T if mask.q_offset is None else mask.q_offset
    ranges = mask.ranges
    if ranges is None and mask.doc_ids is not None:
        ranges = document_ranges(mask.doc_ids, mask.causal, mask.window)
    elif ranges is None and mask.cu_seqlens_q is not None:
        cu_seqlens_k = mask.cu_seqlens_q if mask.cu_seqlens_k is None else mask.cu_seqlens_k
        ranges = cu_seqlens_ranges(mask.cu_seqlens_q, cu_seqlens_k, T, S, mask.causal, mask.window)
    elif ranges is None and mask.window is not None:
        ranges = offset_ranges((1, T, S), q_offset, mask.causal, mask.window, q.device)
    if ranges is None:
        return [], CAUSAL if mask.causal else NO_MASK, q_offset
    shape = tuple(ranges.key_lo.shape)
    if shape not in ((B, T), (1, T)) or ranges.query_lo.shape[-1] != S:
        raise UserError(f"mask of shape {shape} must be ({B} or 1, {T}) over {S} keys; build it for this batch")
    return [ranges.key_lo, ranges.key_hi, ranges.query_lo, ranges.query_hi], RANGES, 0


class EagerAttention(torch.autograd.Function):
    """The kernels without the dispatcher's Python layers, which cost the host more than the launches do."""

    @staticmethod
    def forward(ctx, q, k, v, call):
        out, lse = run_forward(q, k, v, call)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call  # its ranges are integers, no part of the graph
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        return *run_backward([q, k, v, out, lse, dout, dlse], ctx.call), None


@torch.library.custom_op("mew::flash_attention_forward", mutates_args=())
def flash_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, ranges: list[Tensor], integers: list[int], floats: list[float]
) -> tuple[Tensor, Tensor]:
    """integers: bounds, q_offset, deterministic; floats: scale, softcap."""
    return run_forward(q, k, v, make_call(ranges, integers, floats))


@torch.library.custom_op("mew::flash_attention_backward", mutates_args=())
def flash_attention_backward(
    saved: list[Tensor], ranges: list[Tensor], integers: list[int], floats: list[float]
) -> tuple[Tensor, Tensor, Tensor]:
    """saved: q, k, v, out, lse, dout, dlse."""
    return run_backward(saved, make_call(ranges, integers, floats))


def make_call(ranges: list[Tensor], integers: list[int], floats: list[float]) -> Attention:
    return Attention(tuple(ranges), integers[0], integers[1], floats[0], floats[1], bool(integers[2]))


@flash_attention_forward.register_fake
def _(q, k, v, ranges, integers, floats):
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), lse


@flash_attention_backward.register_fake
def _(saved, ranges, integers, floats):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in saved[:3])


def save_inputs(ctx, inputs, output) -> None:
    q, k, v, ranges, ctx.integers, ctx.floats = inputs
    ctx.save_for_backward(q, k, v, *output, *ranges)


def propagate(ctx, dout: Tensor, dlse: Tensor):
    q, k, v, out, lse, *ranges = ctx.saved_tensors
    saved = [q, k, v, out, lse, dout, dlse]
    dq, dk, dv = flash_attention_backward(saved, ranges, ctx.integers, ctx.floats)
    return dq, dk, dv, [None] * len(ranges), None, None


flash_attention_forward.register_autograd(propagate, setup_context=save_inputs)
