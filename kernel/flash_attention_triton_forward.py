"""The forward kernel in Triton: online softmax over key tiles, O(T) memory (Dao, FlashAttention-2, arXiv:2307.08691).

Every mask of this project is an interval: query t sees the keys low(t) <= s < high(t), both rising with t. Then a tile
of queries has three runs of key tiles: cut by low, seen whole, cut by high; only the first and last compare positions.
Tiles come through TMA descriptors, which return zeros outside the tensor, so any T, S and head_dim are in bounds.
Scores are kept in units of log2, so that the exponential is one exp2 and the scale is part of its multiply-add.
A softmax over keys that come in several calls goes on where it stopped, from out and lse so far (SUMS == 2).
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def soften_scores(scores, qk_scale, softcap):
    """softcap * tanh(scores / softcap) in log2 units, where `scores` are raw products and qk_scale holds log2(e)."""
    ratio = scores * (qk_scale / (LOG2E * softcap))
    tanh = 1.0 - 2.0 / (tl.exp2(ratio * (2.0 * LOG2E)) + 1.0)
    return tanh * (softcap * LOG2E), tanh


@triton.jit
def query_interval(low_ptr, high_ptr, row, T, S, q_offset, BOUNDS: tl.constexpr):
    """The keys [low, high) that the query `row` sees: 0 no mask, 1 causal, 2 from the arrays of KeyBounds."""
    if BOUNDS == 2:
        row = tl.minimum(row, T - 1)
        return tl.load(low_ptr + row), tl.load(high_ptr + row)
    if BOUNDS == 1:
        return row * 0, tl.maximum(tl.minimum(row + q_offset + 1, S), 0)
    return row * 0, row * 0 + S


@triton.jit
def visit_key_tiles(
    state, q, k_desc, v_desc, batch, kv_head, begin, end, low, high, qk_scale, softcap,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One run of key tiles folded into state = (acc, row_max, row_sum)."""
    acc, row_max, row_sum = state
    for start in tl.range(begin, end, BLOCK_N):
        k = k_desc.load([batch, kv_head, start, 0]).reshape(BLOCK_N, BLOCK_D)
        scores = tl.dot(q, k.T, input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
        scale = qk_scale
        if SOFTCAP:
            scores, _ = soften_scores(scores, qk_scale, softcap)
            scale = 1.0
        if MASKED:
            keys = start + tl.arange(0, BLOCK_N)
            scores = tl.where((keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None]), scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        shift = new_max
        if MASKED:  # a row that has seen no key yet: -inf - -inf would be nan
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(scores * scale - shift[:, None])
        alpha = tl.exp2(row_max - shift)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = v_desc.load([batch, kv_head, start, 0]).reshape(BLOCK_N, BLOCK_D)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def forward_kernel(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, low_ptr, high_ptr,
    stride_out_b, stride_out_t, stride_out_h, stride_lse, stride_bounds_b, T, S, H, D, q_offset, qk_scale, softcap,
    GROUP: tl.constexpr, HEADS_PER_SWIZZLE: tl.constexpr, BOUNDS: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    # Which tile: long ones first, and a few heads at a time, so that their keys and values stay in L2.
    num_tiles = tl.cdiv(T, BLOCK_M)
    pid = tl.program_id(0)
    group_size = HEADS_PER_SWIZZLE * num_tiles
    first_head = (pid // group_size) * HEADS_PER_SWIZZLE
    heads_here = tl.minimum(HEADS_PER_SWIZZLE, tl.num_programs(0) // num_tiles - first_head)
    within = pid % group_size
    batch_head = first_head + within % heads_here
    tile_start = (num_tiles - 1 - within // heads_here) * BLOCK_M
    batch, head = batch_head // H, batch_head % H
    kv_head = head // GROUP

    # Which keys: begin..end in all, whole_begin..whole_end without comparing positions.
    rows = tile_start + tl.arange(0, BLOCK_M)
    last_row = tl.minimum(tile_start + BLOCK_M, T) - 1
    low_ptr += batch.to(tl.int64) * stride_bounds_b
    high_ptr += batch.to(tl.int64) * stride_bounds_b
    low, high = query_interval(low_ptr, high_ptr, rows, T, S, q_offset, BOUNDS)
    begin, whole_end = query_interval(low_ptr, high_ptr, tile_start, T, S, q_offset, BOUNDS)
    whole_begin, end = query_interval(low_ptr, high_ptr, last_row, T, S, q_offset, BOUNDS)
    end = tl.maximum(end, begin)
    whole_begin = tl.minimum(begin + tl.cdiv(whole_begin - begin, BLOCK_N) * BLOCK_N, end)
    whole_end = tl.maximum(begin + (tl.maximum(whole_end, begin) - begin) // BLOCK_N * BLOCK_N, whole_begin)

    # The three runs, from nothing or from what earlier calls left: out, whose weights sum to 1, and lse.
    out_ptr += batch.to(tl.int64) * stride_out_b + head.to(tl.int64) * stride_out_h
    lse_ptr += batch_head.to(tl.int64) * stride_lse
    q = q_desc.load([batch, head, tile_start, 0]).reshape(BLOCK_M, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if SUMS == 2:
        dims = tl.arange(0, BLOCK_D)
        offsets = rows.to(tl.int64)[:, None] * stride_out_t + dims[None, :]
        acc = tl.load(out_ptr + offsets, mask=(rows < T)[:, None] & (dims < D)[None, :], other=0.0)
        row_max = tl.load(lse_ptr + rows, mask=rows < T, other=float("-inf")) * LOG2E
        row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)
    state = (acc, row_max, row_sum)
    if BOUNDS == 2:
        state = visit_key_tiles(
            state, q, k_desc, v_desc, batch, kv_head, begin, whole_begin, low, high, qk_scale, softcap,
            BLOCK_N, BLOCK_D, True, SOFTCAP, PRECISION,
        )  # fmt: skip
    state = visit_key_tiles(
        state, q, k_desc, v_desc, batch, kv_head, whole_begin, whole_end, low, high, qk_scale, softcap,
        BLOCK_N, BLOCK_D, False, SOFTCAP, PRECISION,
    )  # fmt: skip
    state = visit_key_tiles(
        state, q, k_desc, v_desc, batch, kv_head, whole_end, end, low, high, qk_scale, softcap,
        BLOCK_N, BLOCK_D, True, SOFTCAP, PRECISION,
    )  # fmt: skip
    acc, row_max, row_sum = state

    # out = acc / row_sum and lse = ln(row_sum) + row_max ln 2; a row without keys has row_sum 0: out 0, lse -inf.
    empty = row_sum == 0.0
    acc = acc * (1.0 / tl.where(empty, 1.0, row_sum))[:, None]
    lse = tl.where(empty, float("-inf"), (row_max + tl.log2(tl.where(empty, 1.0, row_sum))) / LOG2E)
    tl.store(lse_ptr + rows, lse, mask=rows < T)
    dims = tl.arange(0, BLOCK_D)
    offsets = rows.to(tl.int64)[:, None] * stride_out_t + dims[None, :]
    tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=(rows < T)[:, None] & (dims < D)[None, :])
