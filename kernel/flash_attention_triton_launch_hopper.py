"""Launching the warp-specialised kernels for Hopper (Gluon); imported only where they run.

Their descriptors also say how a tile lies in shared memory; a result's plays no part where it joins sums. The number of
consumer warpgroups (64 rows each) fixes the tile that a block owns: of queries in the forward and in the dQ kernel, of
keys in the kernel of dK and dV.
"""

from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernel.flash_attention_triton_gluon import forward_kernel_hopper
from kernel.flash_attention_triton_gluon_backward import key_kernel_hopper, query_kernel_hopper
from kernel.flash_attention_triton_launch import (
    LOG2E,
    Attention,
    TileConfig,
    describe,
    mask_tensors,
    num_blocks,
    num_processors,
    padded_dim,
)
from kernel.launch_cache import cached

ROWS = 64  # of a consumer warpgroup


@cache
def layout(dtype: torch.dtype, rows: int, block_d: int) -> gl.NVMMASharedLayout:
    """How a tile of a (B, H, T, D) tensor lies in shared memory."""
    kind = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, block_d], kind)


@cache
def row_layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)


def tiled(x: Tensor, rows: int) -> TensorDescriptor:
    return describe(x, rows, TensorDescriptor, layout=layout(x.dtype, rows, padded_dim(x.shape[-1])))


def describe_rows(rows: Tensor, length: int) -> TensorDescriptor:
    """delta and lse, (2, B, H, T padded), as (2, B H, T padded) in blocks of `length` numbers."""
    _, B, H, padded = rows.shape
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.__dict__.update(
        base=rows, shape=[2, B * H, padded], strides=[B * H * padded, padded, 1], block_shape=[1, 1, length],
        layout=row_layout(),
    )  # fmt: skip
    return descriptor


def launch_forward(q: Tensor, k: Tensor, v: Tensor, results, call: Attention, config: TileConfig) -> None:
    out, lse = results
    (B, T, H, D), S = q.shape, k.shape[1]
    low, high, stride = mask_tensors(call, False, lse)
    items = num_blocks(T, ROWS * config.consumers) * B * H
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    args = (
        tiled(q, ROWS), tiled(k, config.block_n), tiled(v, config.block_n), tiled(q if call.sums else out, ROWS),
        counter, out, *out.stride()[:3], lse, lse.stride(1), low, high, stride, T, S, H, D, B * H, call.q_offset,
        call.scale * LOG2E,
    )  # fmt: skip
    constants = dict(
        GROUP=H // k.shape[2], HEADS_PER_SWIZZLE=config.heads, BOUNDS=call.bounds, CONSUMERS=config.consumers,
        BLOCK_N=config.block_n, BLOCK_D=padded_dim(D), STAGES=config.stages, REGISTERS=config.registers,
        SUMS=call.sums,
    )  # fmt: skip
    cached(forward_kernel_hopper).launch((min(items, num_processors(q.device.index)),), args, constants, num_warps=4)


def launch_key(tensors, rows: Tensor, results, call: Attention, config: TileConfig) -> None:
    """dK and dV; results: None (dQ has a kernel of its own), dk, dv."""
    (q, k, v, dout), (_, dk, dv) = tensors, results
    (B, T, H, D), (S, K) = q.shape, k.shape[1:3]
    first, last, stride = mask_tensors(call, True, rows)
    args = (
        tiled(q, config.block_m), tiled(k, ROWS), tiled(v, ROWS), tiled(dout, config.block_m),
        describe_rows(rows, config.block_m), *(tiled(k if call.sums else x, ROWS) for x in (dk, dv)),
        dk, dv, *dk.stride()[:3], first, last, stride, T, S, K, D, B * K, call.q_offset, call.scale * LOG2E, call.scale,
    )  # fmt: skip
    constants = dict(
        GROUP=H // K, HEADS_PER_SWIZZLE=config.heads, BOUNDS=call.bounds, CONSUMERS=config.consumers,
        BLOCK_M=config.block_m, BLOCK_D=padded_dim(D), STAGES=config.stages, REGISTERS=config.registers,
        SUMS=call.sums,
    )  # fmt: skip
    cached(key_kernel_hopper).launch((num_blocks(S, ROWS * config.consumers) * B * K,), args, constants, num_warps=4)


def launch_query(tensors, rows: Tensor, dq: Tensor, call: Attention, config: TileConfig) -> None:
    (q, k, v, dout), (delta, lse2) = tensors, rows.unbind()
    (B, T, H, D), S = q.shape, k.shape[1]
    low, high, stride = mask_tensors(call, False, rows)
    args = (
        tiled(q, ROWS), tiled(k, config.block_n), tiled(v, config.block_n), tiled(dout, ROWS),
        tiled(q if call.sums else dq, ROWS), dq, *dq.stride()[:3], lse2, delta, low, high, stride,
        T, rows.shape[-1], S, H, D, B * H, call.q_offset, call.scale * LOG2E, call.scale,
    )  # fmt: skip
    constants = dict(
        GROUP=H // k.shape[2], HEADS_PER_SWIZZLE=config.heads, BOUNDS=call.bounds, CONSUMERS=config.consumers,
        BLOCK_N=config.block_n, BLOCK_D=padded_dim(D), STAGES=config.stages, REGISTERS=config.registers,
        SUMS=call.sums,
    )  # fmt: skip
    cached(query_kernel_hopper).launch((num_blocks(T, ROWS * config.consumers) * B * H,), args, constants, num_warps=4)
