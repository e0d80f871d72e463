"""Launching the attention kernels: tile shapes by device and head_dim, TMA descriptors, grids, and the kernel chosen.

A tensor (B, T, H, D) is described to TMA as (B, H, T, D) with blocks (1, 1, rows, D): reads past T or D give zeros. TMA
needs 16-byte strides and a contiguous last dimension; a tensor without them is copied first.
The host's time counts: a short call ends before the next is queued, so nothing here is computed twice that can be kept.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernel.flash_attention_triton_backward import delta_kernel, key_kernel, query_kernel
from kernel.flash_attention_triton_forward import forward_kernel

LOG2E = 1.4426950408889634
ROW_PADDING = 128  # delta and lse are padded to whole tiles of at most this many rows
NO_MASK, CAUSAL, RANGES = 0, 1, 2  # the BOUNDS of the kernels
SHORT = 2048  # query tokens; swept at 1024 and 4096


@dataclass(frozen=True)
class TileConfig:
    """Tile shape and launch of one kernel; `consumers` > 0 picks the Hopper forward with that many warpgroups."""

    block_m: int
    block_n: int
    warps: int = 8
    stages: int = 2
    consumers: int = 0
    registers: int = 240
    persistent: bool = False
    heads: int = 16  # heads that run side by side, so that their keys stay in L2
    max_registers: int | None = None  # of a thread of the plain kernels: fewer let more blocks share a processor


@dataclass(frozen=True)
class Attention:
    """One call: tensors of the mask (none, or the four of KeyRanges), its kind, offset, scale, softcap, mode.

    deterministic: dQ in a kernel of its own (True), added by the key kernel (False), whichever is faster (None).
    """

    ranges: tuple[Tensor, ...] = ()
    bounds: int = CAUSAL
    q_offset: int = 0
    scale: float = 1.0
    softcap: float = 0.0
    deterministic: bool | None = None


@cache
def capability(device_index: int | None) -> int:
    """Major compute capability; 0 without a GPU."""
    return torch.cuda.get_device_capability(device_index)[0] if torch.cuda.is_available() else 0


@cache
def num_processors(device_index: int | None) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


@cache
def padded_dim(head_dim: int) -> int:
    """The power of two that holds head_dim."""
    return 1 << (head_dim - 1).bit_length()


def num_blocks(length: int, block: int) -> int:
    """triton.cdiv, whose wrapper takes microseconds on the host."""
    return -(-length // block)


def default_config(kind: str, q: Tensor, call: Attention = Attention()) -> TileConfig:
    """The swept choice for `kind` in forward, key (dK, dV and dQ added) and query (dQ alone)."""
    block_d = padded_dim(q.shape[-1])
    if not q.is_cuda:
        return TileConfig(32, 32, 4, 1, heads=1)  # the interpreter: small tiles show every seam
    if q.dtype == torch.float32:
        return TileConfig(32, 32, 4, 2) if block_d >= 128 else TileConfig(64, 32, 4, 2)
    if kind == "forward":
        return default_forward(q, call, block_d)
    if block_d == 256:
        return TileConfig(32, 64, 8, 1)
    if call.softcap:  # tanh needs registers of its own
        return TileConfig(64, 128, 8, 2) if kind == "key" else TileConfig(128, 64, 8, 2)
    if kind == "query":
        return TileConfig(128, 64, 8, 3)
    if block_d == 128 or (q.shape[1] < SHORT and not call.deterministic):
        return TileConfig(64, 128, 8, 3)
    return TileConfig(64, 64, 4, 3)


def splits_backward(q: Tensor, call: Attention) -> bool:
    """Whether dQ has a kernel of its own: on request, and for head_dim 128 on Hopper, where it costs no time."""
    if call.deterministic is not None:
        return call.deterministic
    plain = call.bounds != RANGES and not call.softcap and q.dtype != torch.float32
    return plain and q.is_cuda and padded_dim(q.shape[-1]) == 128 and capability(q.device.index) == 9


def default_forward(q: Tensor, call: Attention, block_d: int) -> TileConfig:
    """Small tiles where the mask cuts many of them (documents), the Hopper kernel where the products dominate."""
    if block_d == 256:
        return TileConfig(128, 64, 8, 2)
    if call.softcap:
        return TileConfig(128, 128, 8, 2)
    if block_d <= 64:
        return TileConfig(64, 128, 4, 2, max_registers=168)
    if call.bounds == RANGES:
        return TileConfig(64, 64, 4, 3)
    if block_d == 128 and q.shape[1] > 64 and capability(q.device.index) == 9:
        return TileConfig(128, 128, 4, 2, consumers=2)
    return TileConfig(128, 128, 8, 3)


def aligned(x: Tensor) -> Tensor:
    """`x` itself when TMA can read it, else a contiguous copy."""
    step = 16 // x.element_size()
    fits = x.stride(-1) == 1 and all(stride % step == 0 for stride in x.stride()[:-1]) and x.data_ptr() % 16 == 0
    return x if fits else x.contiguous()


def describe(x: Tensor, rows: int, kind: type = TensorDescriptor, **layout):
    """A descriptor of (B, T, H, D) as (B, H, T, D), in blocks (1, 1, rows, D).

    Made without its constructor: that checks again, in 15 us, what check_inputs and aligned have seen to.
    """
    B, T, H, D = x.shape
    stride_b, stride_t, stride_h, _ = x.stride()
    descriptor = kind.__new__(kind)
    descriptor.__dict__.update(
        base=x, shape=[B, H, T, D], strides=[stride_b, stride_h, stride_t, 1], block_shape=[1, 1, rows, padded_dim(D)]
    )
    descriptor.__dict__.update(layout)
    return descriptor


def precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def mask_tensors(call: Attention, dual: bool, placeholder: Tensor) -> tuple[Tensor, Tensor, int]:
    """The two arrays a kernel reads, by query or (dual) by key, and their batch stride (0: one row for all)."""
    if call.bounds != RANGES:
        return placeholder, placeholder, 0
    low, high = call.ranges[2:] if dual else call.ranges[:2]
    return low, high, low.stride(0) if low.shape[0] > 1 else 0


def run_forward(q: Tensor, k: Tensor, v: Tensor, call: Attention, config: TileConfig | None = None):
    """(out, lse) of q (B, T, H, D), k and v (B, S, K, D)."""
    q, k, v = aligned(q), aligned(k), aligned(v)
    config = config or default_config("forward", q, call)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
    if config.consumers:
        launch_hopper(q, k, v, (out, lse), call, config)
    else:
        launch_forward(q, k, v, (out, lse), call, config)
    return out, lse


def launch_forward(q: Tensor, k: Tensor, v: Tensor, results, call: Attention, config: TileConfig) -> None:
    out, lse = results
    (B, T, H, D), S = q.shape, k.shape[1]
    low, high, stride = mask_tensors(call, False, lse)
    grid = (num_blocks(T, config.block_m) * B * H,)
    forward_kernel[grid](
        describe(q, config.block_m), describe(k, config.block_n), describe(v, config.block_n), out, lse, low, high,
        out.stride(0), out.stride(1), out.stride(2), stride,
        T, S, H, D, call.q_offset, call.scale * LOG2E, call.softcap,
        GROUP=H // k.shape[2], HEADS_PER_SWIZZLE=config.heads, BOUNDS=call.bounds, SOFTCAP=call.softcap > 0,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_D=padded_dim(D), PRECISION=precision(q),
        WARP_SPECIALIZE=False, num_warps=config.warps, num_stages=config.stages, maxnreg=config.max_registers,
    )  # fmt: skip


@cache
def hopper_kernel():
    """The Gluon kernel and its descriptor class; imported here because Gluon is not there on every platform."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as HopperDescriptor

    from kernel.flash_attention_triton_gluon import forward_kernel_hopper

    return forward_kernel_hopper, HopperDescriptor


@cache
def hopper_layout(dtype: torch.dtype, rows: int, block_d: int):
    """How a tile lies in shared memory."""
    from triton.experimental.gluon import language as gl

    kind = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, block_d], kind)


def launch_hopper(q: Tensor, k: Tensor, v: Tensor, results, call: Attention, config: TileConfig) -> None:
    kernel, kind = hopper_kernel()

    def tiled(x: Tensor, rows: int):
        return describe(x, rows, kind, layout=hopper_layout(x.dtype, rows, padded_dim(x.shape[-1])))

    out, lse = results
    (B, T, H, D), S = q.shape, k.shape[1]
    low, high, stride = mask_tensors(call, False, lse)
    items = num_blocks(T, 64 * config.consumers) * B * H
    grid = (min(items, num_processors(q.device.index)) if config.persistent else items,)
    kernel[grid](
        tiled(q, 64), tiled(k, config.block_n), tiled(v, config.block_n), tiled(out, 64),
        lse, low, high, stride, T, S, H, B * H, call.q_offset, call.scale * LOG2E,
        GROUP=H // k.shape[2], HEADS_PER_SWIZZLE=config.heads, BOUNDS=call.bounds, CONSUMERS=config.consumers,
        BLOCK_N=config.block_n, BLOCK_D=padded_dim(D), STAGES=config.stages, REGISTERS=config.registers,
        num_warps=4,
    )  # fmt: skip


def run_delta(out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor]:
    """delta and lse in log2 units, (B, H, T) padded along T; dlse None: lse has no gradient."""
    B, T, H, D = out.shape
    padded = num_blocks(T, ROW_PADDING) * ROW_PADDING
    delta, lse2 = torch.empty(2, B, H, padded, dtype=torch.float32, device=out.device)
    block = ROW_PADDING if out.is_cuda else 32
    delta_kernel[(padded // block, B * H)](
        out, dout, lse, lse if dlse is None else dlse.contiguous(), delta, lse2,
        *out.stride()[:3], *dout.stride()[:3], T, padded, H, D,
        HAS_DLSE=dlse is not None, BLOCK_M=block, BLOCK_D=padded_dim(D), num_warps=8,
    )  # fmt: skip
    return delta, lse2


def run_backward(saved: list[Tensor | None], call: Attention, key_config=None, query_config=None):
    """(dq, dk, dv) from [q, k, v, out, lse, dout, dlse or None]."""
    q, k, v, out, lse, dout, dlse = saved
    q, k, v, dout = aligned(q), aligned(k), aligned(v), aligned(dout)
    key_config = key_config or default_config("key", q, call)
    query_config = query_config or default_config("query", q, call)
    rows = run_delta(out, lse, dout, dlse)
    dk, dv = torch.empty(k.shape, dtype=k.dtype, device=k.device), torch.empty(k.shape, dtype=k.dtype, device=k.device)
    tensors = (q, k, v, dout)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if splits_backward(q, call):
        launch_key(tensors, rows, (None, dk, dv), call, key_config)
        launch_query(tensors, rows, dq, call, query_config)
        return dq, dk, dv
    sums = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    launch_key(tensors, rows, (sums, dk, dv), call, key_config)
    return torch.mul(sums, call.scale, out=dq), dk, dv


def launch_key(tensors, rows, results, call: Attention, config: TileConfig) -> None:
    """results: the float32 sums of dQ (None: the query kernel computes it), dk, dv."""
    (q, k, v, dout), (delta, lse2), (sums, dk, dv) = tensors, rows, results
    (B, T, H, D), (S, K) = q.shape, k.shape[1:3]
    fused = 0 if sums is None else (2 if capability(q.device.index) >= 9 and q.is_cuda else 1)
    q_tiles = describe(q, config.block_m)
    sums, sum_tiles = (q, q_tiles) if sums is None else (sums, describe(sums, config.block_m))
    first, last, stride = mask_tensors(call, True, delta)
    key_kernel[(B * K, num_blocks(S, config.block_n))](
        q_tiles, describe(k, config.block_n), describe(v, config.block_n),
        describe(dout, config.block_m), sum_tiles, sums, dk, dv, lse2, delta, first, last,
        *sums.stride()[:3], *dk.stride()[:3], stride, T, delta.shape[-1], S, H, D, call.q_offset, call.scale * LOG2E,
        call.scale, call.softcap,
        GROUP=H // K, BOUNDS=call.bounds, SOFTCAP=call.softcap > 0, FUSED=fused,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_D=padded_dim(D), PRECISION=precision(q),
        num_warps=config.warps, num_stages=config.stages, maxnreg=config.max_registers,
    )  # fmt: skip


def launch_query(tensors, rows, dq: Tensor, call: Attention, config: TileConfig) -> None:
    (q, k, v, dout), (delta, lse2) = tensors, rows
    (B, T, H, D), (S, K) = q.shape, k.shape[1:3]
    low, high, stride = mask_tensors(call, False, delta)
    query_kernel[(B * H, num_blocks(T, config.block_m))](
        describe(q, config.block_m), describe(k, config.block_n), describe(v, config.block_n),
        describe(dout, config.block_m), dq, lse2, delta, low, high, *dq.stride()[:3], stride,
        T, delta.shape[-1], S, H, D, call.q_offset, call.scale * LOG2E, call.scale, call.softcap,
        GROUP=H // K, BOUNDS=call.bounds, SOFTCAP=call.softcap > 0, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_D=padded_dim(D), PRECISION=precision(q), num_warps=config.warps, num_stages=config.stages,
        maxnreg=config.max_registers,
    )  # fmt: skip
