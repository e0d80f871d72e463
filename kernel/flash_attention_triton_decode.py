"""Attention of a few new tokens over a cache of keys and values, contiguous or paged, for generation.

flash_attention_decode(q, k_cache, v_cache, cache_lens, block_table) -> (out, lse). The lengths stay on the device: no
synchronisation, a grid that depends on shapes alone, so the call can be captured in a CUDA graph and replayed with
other lengths, tables and contents. The caches already hold the T new tokens: query t of row b is token
cache_lens[b] - T + t of its sequence and sees the tokens up to itself. No gradient: training uses flash_attention.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from configs.errors import UserError
from kernel.flash_attention_triton import DTYPES, HEAD_DIMS
from kernel.flash_attention_triton_decode_kernels import merge_kernel, split_kernel
from kernel.flash_attention_triton_launch import LOG2E, num_blocks, num_processors, padded_dim, precision
from kernel.flash_attention_triton_tuning import Tuner, make_key, shared_tuner
from kernel.launch_cache import cached
from kernel.operator_inputs import is_interpreted, is_traced

MIN_ROWS = 16  # of a tile of queries: the least that tl.dot takes
MAX_ROWS = 64
MIN_PAGE_SIZE = 16
MERGED_AT_ONCE = 4096  # numbers of parts: 32 a thread, all asked for before the first is needed
MOST_PART_BYTES = 2**28  # so many new tokens fill the device without cutting keys
# The cost of a plan (chunks_aimed_at), set so that the order of the first sweep on an H200 comes out (docs/kernels.md).
START_TILES, FEW_WAVES, LOST, MOST_WAVES = 2, 0.6, 0.35, 8
WHOLE_TILES = 8  # a sequence of at most so many tiles is not cut where the batch alone fills the device


@dataclass(frozen=True)
class DecodeOptions:
    """scale: of the scores, 1/sqrt(D) unless given; softcap: 0 for none; window: the last so many keys, own included.

    max_length: no sequence is longer, which the caller may know; by default what the cache or the table holds. It
    bounds the number of chunks, and lengths above it are cut to it. split_keys: keys a chunk, a multiple of the tile; a
    row's result then depends on its own sequence alone, to the last bit, where the plan looks at all of them otherwise.
    """

    scale: float | None = None
    softcap: float = 0.0
    window: int | None = None
    max_length: int | None = None
    split_keys: int | None = None


@dataclass(frozen=True)
class DecodeConfig:
    """Keys a tile, warps, pipeline stages, and the programs that a processor holds at once."""

    block_n: int
    warps: int
    stages: int
    programs: int


def flash_attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_lens: Tensor,
    block_table: Tensor | None = None,
    options: DecodeOptions = DecodeOptions(),
) -> tuple[Tensor, Tensor]:
    """Attention of q (B, T, H, D), the last T tokens of each sequence, over its cache_lens (B,) int32 tokens.

    Contiguous: k_cache, v_cache (B, S, K, D). Paged: (pages, page_size, K, D) with block_table (B, pages a sequence)
    int32, whose entries are read only where a sequence has tokens. Returns out (B, T, H, D) like q and lse (B, H, T)
    float32; a query without keys (length 0, or fewer tokens than T) gets out 0 and lse -inf. Any T runs; up to
    T * H / K = 64 (float32: 16) the cache is read once. Raises UserError for what the kernels cannot run.
    """
    check_decode_inputs(q, k_cache, v_cache, cache_lens, block_table)
    scale = 1.0 / math.sqrt(q.shape[-1]) if options.scale is None else options.scale
    check_decode_options(options, scale)
    window = 0 if options.window is None else options.window
    held = k_cache.shape[1] if block_table is None else block_table.shape[1] * k_cache.shape[1]
    max_length = held if options.max_length is None else min(options.max_length, held)
    split_keys = options.split_keys or 0
    if is_traced(q):
        integers = [window, max_length, split_keys]
        return flash_attention_decode_op(
            q, k_cache, v_cache, cache_lens, block_table, integers, [scale, options.softcap]
        )
    cache = DecodeCache(k_cache, v_cache, cache_lens, block_table)
    return run_decode(q, cache, DecodeCall(scale, options.softcap, window, max_length, split_keys))


@dataclass(frozen=True)
class DecodeCache:
    """What lies on the device: keys, values, lengths (B,), and the table (B, pages a sequence) of a paged cache."""

    k: Tensor
    v: Tensor
    lens: Tensor
    table: Tensor | None


@dataclass(frozen=True)
class DecodeCall:
    """Plain numbers of one call; window 0: none; split_keys 0: chunks as the plan finds best."""

    scale: float
    softcap: float
    window: int
    max_length: int
    split_keys: int = 0


def check_decode_inputs(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, table: Tensor | None) -> None:
    """One line for each rule that the kernels rely on; what lies on the device (lengths, page numbers) is not read."""
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or k.stride() != v.stride():
        shapes = f"q {tuple(q.shape)}, k_cache {tuple(k.shape)}, v_cache {tuple(v.shape)}"
        raise UserError(f"{shapes}: decode takes q (B, T, H, D) and caches of one 4-d shape and strides; reshape them")
    if min(q.shape) == 0 or min(k.shape) == 0:
        raise UserError(f"q {tuple(q.shape)}, k_cache {tuple(k.shape)}: no dimension may be 0; skip the call")
    if q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise UserError(
            f"q {tuple(q.shape)}, k_cache {tuple(k.shape)}: D must be equal and the cache's heads divide those of q; "
            "reshape them"
        )
    if q.shape[3] not in HEAD_DIMS:
        raise UserError(f"head_dim={q.shape[3]} has no kernel; use one of {', '.join(map(str, HEAD_DIMS))}")
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise UserError(f"dtypes {q.dtype}, {k.dtype}, {v.dtype} must be one of bfloat16, float16, float32; cast them")
    if lens.shape != q.shape[:1] or lens.dtype not in (torch.int32, torch.int64) or not lens.is_contiguous():
        raise UserError(f"cache_lens {tuple(lens.shape)} {lens.dtype} must be ({q.shape[0]},) int32; make it so")
    check_table(q, k, table)
    tensors = [q, k, v, lens] + ([] if table is None else [table])
    if any(x.device != q.device for x in tensors):
        raise UserError(f"devices {', '.join(str(x.device) for x in tensors)} must be one; move the tensors together")
    if not (q.is_cuda or is_interpreted(split_kernel)):
        raise UserError("flash_attention_decode needs a CUDA device; use attention=sdpa on CPU, or TRITON_INTERPRET=1")
    if q.stride(-1) != 1 or k.stride(-1) != 1:
        raise UserError("the last dimension of q and the caches must be contiguous; call .contiguous() first")
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise UserError("flash_attention_decode has no gradient; call it under torch.no_grad(), or use flash_attention")


def check_table(q: Tensor, k: Tensor, table: Tensor | None) -> None:
    if table is None:
        if k.shape[0] != q.shape[0]:
            raise UserError(
                f"k_cache {tuple(k.shape)} must have the {q.shape[0]} rows of q; give block_table if it is paged"
            )
        return
    if table.dim() != 2 or table.shape[0] != q.shape[0] or table.dtype != torch.int32 or table.stride(-1) != 1:
        shape = tuple(table.shape)
        raise UserError(f"block_table {shape} {table.dtype} must be ({q.shape[0]}, pages) int32; make it so")
    if table.shape[1] == 0 or k.shape[1] < MIN_PAGE_SIZE or k.shape[1] & (k.shape[1] - 1):
        raise UserError(f"page_size={k.shape[1]} must be a power of two of at least {MIN_PAGE_SIZE}; use such pages")


def check_decode_options(options: DecodeOptions, scale: float) -> None:
    if not scale > 0 or options.softcap < 0:
        raise UserError(f"scale={scale} must be above 0 and softcap={options.softcap} at least 0; use such values")
    for name in ("window", "max_length", "split_keys"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"{name}={value} must be at least 1; use None for no limit")


@torch.library.custom_op("mew::flash_attention_decode", mutates_args=())
def flash_attention_decode_op(
    q: Tensor, k: Tensor, v: Tensor, lens: Tensor, table: Tensor | None, integers: list[int], floats: list[float]
) -> tuple[Tensor, Tensor]:
    """integers: window (0: none), max_length, split_keys (0: none); floats: scale, softcap."""
    return run_decode(q, DecodeCache(k, v, lens, table), DecodeCall(*floats, *integers))


@flash_attention_decode_op.register_fake
def _(q, k, v, lens, table, integers, floats):
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), lse


def default_decode_config(q: Tensor, rows: int = MIN_ROWS) -> DecodeConfig:
    """For tiles of `rows` query rows; keys and values of a tile are 32 KiB at most.

    With 16 rows three programs fit the shared memory of a processor of Hopper (72 KB each), with more rows two.
    """
    if not q.is_cuda:
        return DecodeConfig(16, 4, 1, 3)  # the interpreter: small tiles show every seam
    bytes_a_key = padded_dim(q.shape[-1]) * q.element_size()
    block_n = max(16, min(128, 16384 // bytes_a_key))
    if q.dtype == torch.float32:  # no tensor cores: eight warps hold the operands in registers, four spill
        return DecodeConfig(block_n, 8, 2, 2)
    return DecodeConfig(block_n, 4, 3, 3 if rows == MIN_ROWS else 2)


def choose_config(q: Tensor, cache: DecodeCache, call: DecodeCall, tuner: Tuner) -> DecodeConfig:
    """The tuned configuration for this device, cache and amount of keys, or the default."""
    (B, T, H, _), (page_size, K) = q.shape, cache.k.shape[1:3]
    kind = "contiguous" if cache.table is None else f"pages of {page_size}"
    rows = row_tile(T * H // K, q.dtype)
    key = make_key("decode", q, f"{kind}, rows of {rows}", B * call.max_length)
    return tuner.choose(key, default_decode_config(q, rows), lambda config: run_decode(q, cache, call, config))


def row_tile(num_rows: int, dtype: torch.dtype) -> int:
    """Rows of a tile of queries for `num_rows` query heads of one kv head over all new tokens."""
    most = MIN_ROWS if dtype == torch.float32 else MAX_ROWS  # float32 spills with more
    return max(MIN_ROWS, min(most, 1 << (num_rows - 1).bit_length()))


def run_decode(
    q: Tensor, cache: DecodeCache, call: DecodeCall, config: DecodeConfig | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of checked inputs: the chunks, then their merge."""
    config = config or choose_config(q, cache, call, shared_tuner())
    (B, T, H, D), K = q.shape, cache.k.shape[2]
    block_m, block_d = row_tile(T * H // K, q.dtype), padded_dim(D)
    side_by_side = K * num_blocks(T * H // K, block_m)
    num_chunks, items = chunk_counts(q, side_by_side, call, config)
    whole = runs_whole(q, side_by_side, call, config)
    chunk_tiles = num_blocks(call.split_keys, config.block_n) if call.split_keys else 0
    if whole:  # twice as many programs at once, of half the shared memory, for sequences of a few tiles
        num_chunks, items, config = 1, B, replace(config, block_n=min(config.block_n, 64))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    # Aiming at one chunk, the plan cuts no sequence.
    num_parts = items if num_chunks > 1 else 0
    parts = torch.empty(num_parts, T, H, D, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(num_parts, T, H, dtype=torch.float32, device=q.device)
    numbers = (B, T, H, D, call.max_length, call.window, num_chunks)
    block_b = max(64, 1 << (B - 1).bit_length())
    table = cache.lens if cache.table is None else cache.table
    args = (
        q, cache.k, cache.v, cache.lens, table, out, lse, parts, part_lse,
        *q.stride()[:3], *cache.k.stride()[:3], table.stride(0), *numbers, call.scale * LOG2E, call.softcap,
    )  # fmt: skip
    constants = dict(
        GROUP=H // K, PAGE_SIZE=0 if cache.table is None else cache.k.shape[1], WINDOW=call.window > 0,
        SOFTCAP=call.softcap > 0, BLOCK_B=block_b, BLOCK_M=block_m, BLOCK_N=config.block_n, BLOCK_D=block_d,
        PRECISION=precision(q), STAGES=config.stages, WHOLE=whole, CHUNK_TILES=chunk_tiles,
    )  # fmt: skip
    cached(split_kernel).launch((side_by_side, items), args, constants, num_warps=config.warps)
    if whole:
        return out, lse
    constants = dict(
        WINDOW=call.window > 0,
        BLOCK_B=block_b,
        BLOCK_N=config.block_n,
        BLOCK_C=MERGED_AT_ONCE // block_d if q.is_cuda else 2,
        BLOCK_D=block_d,
        CHUNK_TILES=chunk_tiles,
    )
    args = (cache.lens, parts, part_lse, out, lse, *numbers)
    cached(merge_kernel).launch((T * H, B), args, constants, num_warps=4)
    return out, lse


def runs_whole(q: Tensor, side_by_side: int, call: DecodeCall, config: DecodeConfig) -> bool:
    """Whether every sequence is one program a kv head, without plan and merge: many sequences, and none long.

    A plan in every program and a second kernel cost more than even shares gain where a program has a few tiles.
    """
    if call.split_keys:
        return call.max_length <= call.split_keys
    slots = decode_slots(q, config)
    return q.shape[0] * side_by_side >= slots and call.max_length <= WHOLE_TILES * config.block_n


def decode_slots(q: Tensor, config: DecodeConfig) -> int:
    """Programs that run at once."""
    return (num_processors(q.device.index) if q.is_cuda else 8) * config.programs


def chunk_counts(q: Tensor, side_by_side: int, call: DecodeCall, config: DecodeConfig) -> tuple[int, int]:
    """(chunks that the plan aims at over all sequences, the most that it can make), for each kv head."""
    B, tiles = q.shape[0], num_blocks(call.max_length, config.block_n)
    if call.split_keys:
        chunks = B * num_blocks(tiles, num_blocks(call.split_keys, config.block_n))
        return max(chunks, 2), chunks
    slots = decode_slots(q, config)
    num_chunks = chunks_aimed_at(B, side_by_side, tiles, slots)
    if 4 * (num_chunks + B) * q[0].numel() > MOST_PART_BYTES:
        num_chunks = 1
    return num_chunks, min(num_chunks + B, B * tiles)


@lru_cache(maxsize=1024)
def chunks_aimed_at(B: int, side_by_side: int, tiles: int, slots: int) -> int:
    """The number of chunks, for each of `side_by_side`, that costs least if all B sequences have `tiles` tiles.

    The device runs `slots` programs at once, so a plan takes waves of them. A chunk costs its tiles and START_TILES for
    its start and its part of the merge; fewer programs than FEW_WAVES of a wave do not fill the memory's rate; of the
    places that a last wave leaves empty, the share LOST is lost, since the programs beside them run the faster.
    """

    def cost(num_chunks: int) -> float:
        chunks = num_blocks(tiles, num_blocks(B * tiles, num_chunks))  # of a sequence
        waves = B * chunks * side_by_side / slots
        return (tiles / chunks + START_TILES) * (max(waves, FEW_WAVES) + LOST * (math.ceil(waves) - waves))

    return min((max(1, slots * half // (2 * side_by_side)) for half in range(1, 2 * MOST_WAVES + 1)), key=cost)
