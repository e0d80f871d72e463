"""Launching the attention kernels: tile shapes by device and head_dim, TMA descriptors, grids, and the kernel chosen.

A tensor (B, T, H, D) is described to TMA as (B, H, T, D) with blocks (1, 1, rows, D): reads past T or D give zeros. TMA
needs 16-byte strides and a contiguous last dimension; a tensor without them is copied first.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernel.flash_attention_triton_backward import delta_kernel, key_kernel, query_kernel
from kernel.flash_attention_triton_forward import forward_kernel

LOG2E = 1.4426950408889634
ROW_PADDING = 128  # delta and lse are padded to whole tiles of at most this many rows
NO_MASK, CAUSAL, RANGES = 0, 1, 2  # the BOUNDS of the kernels


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
    """One call: tensors of the mask (none, or the four of KeyRanges), its kind, offset, scale, softcap, mode."""

    ranges: tuple[Tensor, ...] = ()
    bounds: int = CAUSAL
    q_offset: int = 0
    scale: float = 1.0
    softcap: float = 0.0
    deterministic: bool = False


@cache
def is_hopper(device_index: int | None) -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device_index)[0] == 9


def default_config(kind: str, q: Tensor, call: Attention = Attention()) -> TileConfig:
    """The swept choice for `kind` in forward, key (dK, dV and dQ added) and query (dQ alone)."""
    block_d = triton.next_power_of_2(q.shape[-1])
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
    if block_d == 128 and kind == "key":
        return TileConfig(64, 128, 8, 3)
    return TileConfig(64, 64, 4, 2 if kind == "query" else 3)


def default_forward(q: Tensor, call: Attention, block_d: int) -> TileConfig:
    """Small tiles where the mask cuts many of them (documents), the Hopper kernel where the products dominate."""
    if block_d == 256:
        return TileConfig(128, 64, 8, 2)
    if call.softcap:
        return TileConfig(128, 128, 8, 2)
    if block_d <= 64:
        return TileConfig(64, 128, 4, 2)
    if call.bounds == RANGES:
        return TileConfig(64, 64, 4, 3)
    if block_d == 128 and q.shape[1] > 64 and is_hopper(q.device.index):
        return TileConfig(128, 128, 4, 2, consumers=2)
    return TileConfig(128, 128, 8, 3)


def aligned(x: Tensor) -> Tensor:
    """`x` itself when TMA can read it, else a contiguous copy."""
    step = 16 // x.element_size()
    fits = x.stride(-1) == 1 and all(stride % step == 0 for stride in x.stride()[:-1]) and x.data_ptr() % 16 == 0
    return x if fits else x.contiguous()


def describe(x: Tensor, rows: int, layout=None):
    """A descriptor of (B, T, H, D) as (B, H, T, D), in blocks (1, 1, rows, D); Gluon's where `layout` makes one."""
    x = x.permute(0, 2, 1, 3)
    block = [1, 1, rows, triton.next_power_of_2(x.shape[-1])]
    if layout is None:
        return TensorDescriptor(x, list(x.shape), list(x.stride()), block)
    return layout(x, block)


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
    grid = (triton.cdiv(T, config.block_m) * B * H,)
    forward_kernel[grid](
        describe(q, config.block_m), describe(k, config.block_n), describe(v, config.block_n), out, lse, low, high,
        out.stride(0), out.stride(1), out.stride(2), stride,
        T, S, H, D, call.q_offset, call.scale * LOG2E, call.softcap,
        GROUP=H // k.shape[2], HEADS_PER_SWIZZLE=config.heads, BOUNDS=call.bounds, SOFTCAP=call.softcap > 0,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_D=triton.next_power_of_2(D), PRECISION=precision(q),
        WARP_SPECIALIZE=False, num_warps=config.warps, num_stages=config.stages, maxnreg=config.max_registers,
    )  # fmt: skip


def launch_hopper(q: Tensor, k: Tensor, v: Tensor, results, call: Attention, config: TileConfig) -> None:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as HopperDescriptor

    from kernel.flash_attention_triton_gluon import forward_kernel_hopper

    def layout(x: Tensor, block: list[int]) -> HopperDescriptor:
        kind = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
        shared = gl.NVMMASharedLayout.get_default_for(block, kind)
        return HopperDescriptor(x, list(x.shape), list(x.stride()), block, shared)

    out, lse = results
    (B, T, H, D), S = q.shape, k.shape[1]
    low, high, stride = mask_tensors(call, False, lse)
    items = triton.cdiv(T, 64 * config.consumers) * B * H
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    grid = (min(items, processors) if config.persistent else items,)
    forward_kernel_hopper[grid](
        describe(q, 64, layout), describe(k, config.block_n, layout), describe(v, config.block_n, layout),
        describe(out, 64, layout), lse, low, high, stride, T, S, H, B * H, call.q_offset, call.scale * LOG2E,
        GROUP=H // k.shape[2], HEADS_PER_SWIZZLE=config.heads, BOUNDS=call.bounds, CONSUMERS=config.consumers,
        BLOCK_N=config.block_n, BLOCK_D=triton.next_power_of_2(D), STAGES=config.stages, REGISTERS=config.registers,
        num_warps=4,
    )  # fmt: skip


def run_delta(out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor]:
    """delta and lse in log2 units, (B, H, T) padded along T."""
    B, T, H, D = out.shape
    padded = triton.cdiv(T, ROW_PADDING) * ROW_PADDING
    delta = torch.empty(B, H, padded, dtype=torch.float32, device=out.device)
    lse2 = torch.empty_like(delta)
    block = ROW_PADDING if out.is_cuda else 32
    delta_kernel[(padded // block, B * H)](
        out, dout, lse, dlse, delta, lse2, *out.stride()[:3], *dout.stride()[:3], T, padded, H, D,
        BLOCK_M=block, BLOCK_D=triton.next_power_of_2(D), num_warps=8,
    )  # fmt: skip
    return delta, lse2


def run_backward(saved: list[Tensor], call: Attention, key_config=None, query_config=None):
    """(dq, dk, dv) from [q, k, v, out, lse, dout, dlse]."""
    q, k, v, out, lse, dout, dlse = saved
    q, k, v, dout = aligned(q), aligned(k), aligned(v), aligned(dout)
    key_config = key_config or default_config("key", q, call)
    query_config = query_config or default_config("query", q, call)
    rows = run_delta(out, lse, dout, dlse.contiguous())
    dk, dv = torch.empty(k.shape, dtype=k.dtype, device=k.device), torch.empty(k.shape, dtype=k.dtype, device=k.device)
    tensors = (q, k, v, dout)
    if call.deterministic:
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        launch_key(tensors, rows, (dq, dk, dv), call, key_config)
        launch_query(tensors, rows, dq, call, query_config)
        return dq, dk, dv
    sums = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    launch_key(tensors, rows, (sums, dk, dv), call, key_config)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return torch.mul(sums, call.scale, out=dq), dk, dv


def launch_key(tensors, rows, results, call: Attention, config: TileConfig) -> None:
    (q, k, v, dout), (delta, lse2), (dq, dk, dv) = tensors, rows, results
    (B, T, H, D), (S, K) = q.shape, k.shape[1:3]
    fused = 0 if call.deterministic else (2 if q.is_cuda and torch.cuda.get_device_capability(q.device)[0] >= 9 else 1)
    first, last, stride = mask_tensors(call, True, delta)
    key_kernel[(B * K, triton.cdiv(S, config.block_n))](
        describe(q, config.block_m), describe(k, config.block_n), describe(v, config.block_n),
        describe(dout, config.block_m), describe(dq, config.block_m), dq, dk, dv, lse2, delta, first, last,
        *dq.stride()[:3], *dk.stride()[:3], stride, T, delta.shape[-1], S, H, D, call.q_offset, call.scale * LOG2E,
        call.scale, call.softcap,
        GROUP=H // K, BOUNDS=call.bounds, SOFTCAP=call.softcap > 0, FUSED=fused,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_D=triton.next_power_of_2(D), PRECISION=precision(q),
        num_warps=config.warps, num_stages=config.stages, maxnreg=config.max_registers,
    )  # fmt: skip


def launch_query(tensors, rows, dq: Tensor, call: Attention, config: TileConfig) -> None:
    (q, k, v, dout), (delta, lse2) = tensors, rows
    (B, T, H, D), (S, K) = q.shape, k.shape[1:3]
    low, high, stride = mask_tensors(call, False, delta)
    query_kernel[(B * H, triton.cdiv(T, config.block_m))](
        describe(q, config.block_m), describe(k, config.block_n), describe(v, config.block_n),
        describe(dout, config.block_m), dq, lse2, delta, low, high, *dq.stride()[:3], stride,
        T, delta.shape[-1], S, H, D, call.q_offset, call.scale * LOG2E, call.scale, call.softcap,
        GROUP=H // K, BOUNDS=call.bounds, SOFTCAP=call.softcap > 0, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_D=triton.next_power_of_2(D), PRECISION=precision(q), num_warps=config.warps, num_stages=config.stages,
        maxnreg=config.max_registers,
    )  # fmt: skip
