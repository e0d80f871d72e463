"""Launching the attention kernels: tile shapes by device and head_dim, TMA descriptors, grids, and the kernel chosen.

A tensor (B, T, H, D) is described to TMA as (B, H, T, D) with blocks (1, 1, rows, D): reads past T or D give zeros. TMA
needs 16-byte strides and a contiguous last dimension; a tensor without them is copied first.
The host's time counts: a short call ends before the next is queued, so nothing here is computed twice that can be kept.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernel.flash_attention_triton_backward import delta_kernel, key_kernel, query_kernel
from kernel.flash_attention_triton_forward import forward_kernel
from kernel.flash_attention_triton_tuning import shared_tuner, tuned_tile
from kernel.launch_cache import cached

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
    heads: int = 16  # heads that run side by side, so that their keys stay in L2
    max_registers: int | None = None  # of a thread of the plain kernels: fewer let more blocks share a processor


@dataclass(frozen=True)
class Attention:
    """One call: tensors of the mask (none, or the four of KeyRanges), its kind, offset, scale, softcap, mode.

    deterministic: dQ in a kernel of its own, as on Hopper always, instead of added up by the plain key kernel.
    sums: 0 where a call's results are its own; else results are float32 and joined to what is there (launch_sums):
    1 begins them, 2 goes on.
    """

    ranges: tuple[Tensor, ...] = ()
    bounds: int = CAUSAL
    q_offset: int = 0
    scale: float = 1.0
    softcap: float = 0.0
    deterministic: bool = False
    sums: int = 0


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
    """The swept choice for `kind`: forward, key (dK and dV; plain kernel: dQ added) and query (dQ alone)."""
    block_d = padded_dim(q.shape[-1])
    if not q.is_cuda:
        return TileConfig(32, 32, 4, 1, heads=1)  # the interpreter: small tiles show every seam
    if q.dtype == torch.float32:
        return TileConfig(32, 32, 4, 2) if block_d >= 128 else TileConfig(64, 32, 4, 2)
    if runs_on_hopper(q, call):
        return default_hopper(kind, q, call, block_d)
    if kind == "forward":
        return default_forward(q, call, block_d)
    if block_d == 256:
        return TileConfig(32, 64, 8, 1)
    if call.softcap:  # tanh needs registers of its own
        return TileConfig(64, 128, 8, 2) if kind == "key" else TileConfig(128, 64, 8, 2)
    if kind == "query":
        return TileConfig(128, 64, 8, 3)
    return TileConfig(64, 128, 8, 3) if block_d == 128 else TileConfig(64, 64, 4, 3)


def tuned_config(kind: str, qk: tuple[Tensor, Tensor], call: Attention, run: Callable) -> TileConfig:
    """The choice that was timed on this device and kept, where there is one, else the default."""
    default, tuner = default_config(kind, qk[0], call), shared_tuner()
    return tuned_tile(kind, qk, call, default, run) if tuner.stored or tuner.times_calls else default


def runs_on_hopper(q: Tensor, call: Attention) -> bool:
    """Whether the warp-specialised kernels take the call: 16-bit inputs, head_dim 64 to 128, no softcap."""
    return capability(q.device.index) == 9 and padded_dim(q.shape[-1]) in (64, 128) and not call.softcap


def default_hopper(kind: str, q: Tensor, call: Attention, block_d: int) -> TileConfig:
    """The tiles of the warp-specialised kernels; the plain forward where its smaller blocks of threads win.

    Narrow tiles where a mask from arrays cuts many of them (documents).
    """
    if kind == "forward":
        if block_d == 64 or q.shape[1] <= 64:
            return TileConfig(64, 128, 4, 2)
        return TileConfig(128, 64, 4, 3, 2) if call.bounds == RANGES else TileConfig(128, 128, 4, 2, 2)
    if kind == "key":
        return TileConfig(64, 128, 4, 2, 2) if block_d == 128 else TileConfig(64, 192, 4, 2, 3, registers=160)
    if block_d == 128 and call.bounds == RANGES:
        return TileConfig(192, 64, 4, 2, 3, registers=160)
    return TileConfig(128, 128, 4, 2 if block_d == 128 else 3, 2)


def default_forward(q: Tensor, call: Attention, block_d: int) -> TileConfig:
    """Small tiles where the mask cuts many of them (documents)."""
    if block_d == 256:
        return TileConfig(128, 64, 8, 2)
    if call.softcap:
        return TileConfig(128, 128, 8, 2)
    if block_d <= 64:
        return TileConfig(64, 128, 4, 2)
    return TileConfig(64, 64, 4, 3) if call.bounds == RANGES else TileConfig(128, 128, 8, 3)


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
    config = config or tuned_config("forward", (q, k), call, lambda tile: run_forward(q, k, v, call, tile))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
    if config.consumers:
        hopper().launch_forward(q, k, v, (out, lse), call, config)
    else:
        launch_forward(q, k, v, (out, lse), call, config)
    return out, lse


def launch_forward(q: Tensor, k: Tensor, v: Tensor, results, call: Attention, config: TileConfig) -> None:
    out, lse = results
    (B, T, H, D), S = q.shape, k.shape[1]
    low, high, stride = mask_tensors(call, False, lse)
    args = (
        describe(q, config.block_m), describe(k, config.block_n), describe(v, config.block_n), out, lse, low, high,
        out.stride(0), out.stride(1), out.stride(2), lse.stride(1), stride,
        T, S, H, D, call.q_offset, call.scale * LOG2E, call.softcap,
    )  # fmt: skip
    constants = dict(
        GROUP=H // k.shape[2], HEADS_PER_SWIZZLE=config.heads, BOUNDS=call.bounds, SOFTCAP=call.softcap > 0,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_D=padded_dim(D), PRECISION=precision(q), SUMS=call.sums,
    )  # fmt: skip
    cached(forward_kernel).launch((num_blocks(T, config.block_m) * B * H,), args, constants, **options(config))


def options(config: TileConfig) -> dict[str, int | None]:
    """What Triton takes beside the arguments of a plain kernel."""
    return {"num_warps": config.warps, "num_stages": config.stages, "maxnreg": config.max_registers}


def hopper():
    """The launcher of the Gluon kernels, imported here because Gluon is not there on every platform."""
    from kernel import flash_attention_triton_launch_hopper

    return flash_attention_triton_launch_hopper


def run_delta(out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """(2, B, H, T padded): delta, and lse in log2 units; dlse None: lse has no gradient."""
    B, T, H, D = out.shape
    padded = num_blocks(T, ROW_PADDING) * ROW_PADDING
    rows = torch.empty(2, B, H, padded, dtype=torch.float32, device=out.device)
    delta, lse2 = rows.unbind()
    block = ROW_PADDING if out.is_cuda else 32
    args = (
        out, dout, lse, lse if dlse is None else dlse.contiguous(), delta, lse2,
        *out.stride()[:3], *dout.stride()[:3], T, padded, H, D,
    )  # fmt: skip
    constants = {"HAS_DLSE": dlse is not None, "BLOCK_M": block, "BLOCK_D": padded_dim(D)}
    cached(delta_kernel).launch((padded // block, B * H), args, constants, num_warps=8)
    return rows


def run_backward(saved: list[Tensor | None], call: Attention, key_config=None, query_config=None):
    """(dq, dk, dv) from [q, k, v, out, lse, dout, dlse or None]."""
    q, k, v, out, lse, dout, dlse = saved
    q, k, v, dout = aligned(q), aligned(k), aligned(v), aligned(dout)
    key_config, query_config = choose_backward(saved, call, key_config, query_config)
    rows = run_delta(out, lse, dout, dlse)
    dk, dv = torch.empty(k.shape, dtype=k.dtype, device=k.device), torch.empty(k.shape, dtype=k.dtype, device=k.device)
    tensors = (q, k, v, dout)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if call.deterministic or key_config.consumers:
        launch = hopper().launch_key if key_config.consumers else launch_key
        launch(tensors, rows, (None, dk, dv), call, key_config)
        launch = hopper().launch_query if query_config.consumers else launch_query
        launch(tensors, rows, dq, call, query_config)
        return dq, dk, dv
    sums = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    launch_key(tensors, rows, (sums, dk, dv), call, key_config)
    return torch.mul(sums, call.scale, out=dq), dk, dv


def choose_backward(saved: list[Tensor | None], call: Attention, key_config, query_config):
    """The tiles of both kernels; one is timed beside the default of the other."""
    q, k = saved[:2]
    if key_config is None:
        other = query_config or default_config("query", q, call)
        key_config = tuned_config("key", (q, k), call, lambda tile: run_backward(saved, call, tile, other))
    if query_config is None:
        query_config = tuned_config("query", (q, k), call, lambda tile: run_backward(saved, call, key_config, tile))
    return key_config, query_config


def launch_key(tensors, rows, results, call: Attention, config: TileConfig) -> None:
    """results: the float32 sums of dQ (None: the query kernel computes it), dk, dv."""
    (q, k, v, dout), (delta, lse2), (sums, dk, dv) = tensors, rows, results
    (B, T, H, D), (S, K) = q.shape, k.shape[1:3]
    fused = 0 if sums is None else (2 if capability(q.device.index) >= 9 and q.is_cuda else 1)
    q_tiles = describe(q, config.block_m)
    sums, sum_tiles = (q, q_tiles) if sums is None else (sums, describe(sums, config.block_m))
    first, last, stride = mask_tensors(call, True, delta)
    args = (
        q_tiles, describe(k, config.block_n), describe(v, config.block_n),
        describe(dout, config.block_m), sum_tiles, sums, dk, dv, lse2, delta, first, last,
        *sums.stride()[:3], *dk.stride()[:3], stride, T, delta.shape[-1], S, H, D, call.q_offset, call.scale * LOG2E,
        call.scale, call.softcap,
    )  # fmt: skip
    constants = dict(
        GROUP=H // K, BOUNDS=call.bounds, SOFTCAP=call.softcap > 0, FUSED=fused,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_D=padded_dim(D), PRECISION=precision(q), SUMS=call.sums,
    )  # fmt: skip
    cached(key_kernel).launch((B * K, num_blocks(S, config.block_n)), args, constants, **options(config))


def launch_query(tensors, rows, dq: Tensor, call: Attention, config: TileConfig) -> None:
    (q, k, v, dout), (delta, lse2) = tensors, rows
    (B, T, H, D), (S, K) = q.shape, k.shape[1:3]
    low, high, stride = mask_tensors(call, False, delta)
    args = (
        describe(q, config.block_m), describe(k, config.block_n), describe(v, config.block_n),
        describe(dout, config.block_m), dq, lse2, delta, low, high, *dq.stride()[:3], stride,
        T, delta.shape[-1], S, H, D, call.q_offset, call.scale * LOG2E, call.scale, call.softcap,
    )  # fmt: skip
    constants = dict(
        GROUP=H // K, BOUNDS=call.bounds, SOFTCAP=call.softcap > 0,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_D=padded_dim(D), PRECISION=precision(q), SUMS=call.sums,
    )  # fmt: skip
    cached(query_kernel).launch((B * H, num_blocks(T, config.block_m)), args, constants, **options(config))
