"""The backward kernels in Triton: delta, then dK and dV by key tile (dQ added on the way or in its own kernel).

With P = exp(S - lse) and the gradients dO of out and dL of lse:  dV = P^T dO,  dS = P * (dO V^T - delta),
dK = scale dS^T Q,  dQ = scale dS K,  delta = rowsum(dO * O) - dL  (Dao, arXiv:2307.08691, with the term of lse added).
The key kernel loops over the query heads of its group, so K and V are never repeated and no sum over heads is left.
`FUSED` adds each tile's dQ to a float32 buffer (five matmuls instead of seven, but the order of the sums varies).
`SUMS` == 2 adds a tile's dK and dV, or the query kernel's dQ, to what earlier calls left there.
"""

import triton
import triton.language as tl

from kernel.flash_attention_triton_forward import LOG2E, query_interval, soften_scores


@triton.jit
def delta_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, delta_ptr, lse2_ptr,
    stride_out_b, stride_out_t, stride_out_h, stride_dout_b, stride_dout_t, stride_dout_h, T, T_PADDED, H, D,
    HAS_DLSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """delta and lse in log2 units, both padded to whole tiles; +inf as the lse of a row without keys gives it P = 0."""
    batch_head = tl.program_id(1).to(tl.int64)
    batch, head = batch_head // H, batch_head % H
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    mask = (rows < T)[:, None] & (dims < D)[None, :]
    rows64 = rows.to(tl.int64)[:, None]
    out_ptr += batch * stride_out_b + head * stride_out_h
    dout_ptr += batch * stride_dout_b + head * stride_dout_h
    out = tl.load(out_ptr + rows64 * stride_out_t + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + rows64 * stride_dout_t + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + batch_head * T + rows, mask=rows < T, other=float("-inf"))
    delta = tl.sum(out * dout, 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + batch_head * T + rows, mask=rows < T, other=0.0)
    empty = lse == float("-inf")
    delta = tl.where(empty, 0.0, delta)
    tl.store(delta_ptr + batch_head * T_PADDED + rows, delta, mask=rows < T_PADDED)
    tl.store(lse2_ptr + batch_head * T_PADDED + rows, tl.where(empty, float("inf"), lse * LOG2E), mask=rows < T_PADDED)


@triton.jit
def visit_query_tiles(
    state, k, v, q_desc, dout_desc, dq_desc, dq_ptr, stride_dq_t, lse2_ptr, delta_ptr, batch, head, begin, end,
    first_query, last_query, T, D, qk_scale, softcap,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, SOFTCAP: tl.constexpr,
    FUSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One run of query tiles folded into state = (dk, dv); everything is transposed, keys are the rows."""
    dk, dv = state
    for start in tl.range(begin, end, BLOCK_M):
        queries = start + tl.arange(0, BLOCK_M)
        q = q_desc.load([batch, head, start, 0]).reshape(BLOCK_M, BLOCK_D)
        lse2 = tl.load(lse2_ptr + queries)
        scores = tl.dot(k, q.T, input_precision=PRECISION)  # (BLOCK_N, BLOCK_M)
        if SOFTCAP:
            scores, tanh = soften_scores(scores, qk_scale, softcap)
            p = tl.exp2(scores - lse2[None, :])
        else:
            p = tl.exp2(scores * qk_scale - lse2[None, :])
        if MASKED:
            p = tl.where((queries[None, :] >= first_query[:, None]) & (queries[None, :] < last_query[:, None]), p, 0.0)
        dout = dout_desc.load([batch, head, start, 0]).reshape(BLOCK_M, BLOCK_D)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
        delta = tl.load(delta_ptr + queries)
        dp = tl.dot(v, dout.T, input_precision=PRECISION)  # (BLOCK_N, BLOCK_M)
        ds = p * (dp - delta[None, :])
        if SOFTCAP:
            ds = ds * (1.0 - tanh * tanh)
        ds = ds.to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)
        if FUSED != 0:
            dq = tl.dot(tl.trans(ds), k, input_precision=PRECISION)  # (BLOCK_M, BLOCK_D)
            if FUSED == 2:  # one bulk reduction of the whole tile
                dq_desc.atomic_add([batch, head, start, 0], dq.reshape(1, 1, BLOCK_M, BLOCK_D))
            else:
                dims = tl.arange(0, BLOCK_D)
                mask = (queries < T)[:, None] & (dims < D)[None, :]
                offsets = queries.to(tl.int64)[:, None] * stride_dq_t + dims[None, :]
                tl.atomic_add(dq_ptr + offsets, dq, mask=mask, sem="relaxed")
    return dk, dv


@triton.jit
def key_interval(first_ptr, last_ptr, key, T, S, q_offset, BOUNDS: tl.constexpr):
    """The queries [first, last) that see the key: the dual of query_interval."""
    if BOUNDS == 2:
        key = tl.minimum(key, S - 1)
        return tl.load(first_ptr + key), tl.load(last_ptr + key)
    if BOUNDS == 1:
        return tl.minimum(tl.maximum(tl.minimum(key, S - 1) - q_offset, 0), T), key * 0 + T
    return key * 0, key * 0 + T


@triton.jit
def key_kernel(
    q_desc, k_desc, v_desc, dout_desc, dq_desc, dq_ptr, dk_ptr, dv_ptr, lse2_ptr, delta_ptr, first_ptr, last_ptr,
    stride_dq_b, stride_dq_t, stride_dq_h, stride_dk_b, stride_dk_t, stride_dk_h, stride_bounds_b,
    T, T_PADDED, S, H, D, q_offset, qk_scale, scale, softcap,
    GROUP: tl.constexpr, BOUNDS: tl.constexpr, SOFTCAP: tl.constexpr, FUSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    # Which keys, and which queries see them.
    num_kv_heads = H // GROUP
    batch_kv = tl.program_id(0)
    batch, kv_head = batch_kv // num_kv_heads, batch_kv % num_kv_heads
    tile_start = tl.program_id(1) * BLOCK_N
    keys = tile_start + tl.arange(0, BLOCK_N)
    last_key = tl.minimum(tile_start + BLOCK_N, S) - 1
    first_ptr += batch.to(tl.int64) * stride_bounds_b
    last_ptr += batch.to(tl.int64) * stride_bounds_b
    first_query, last_query = key_interval(first_ptr, last_ptr, keys, T, S, q_offset, BOUNDS)
    last_query = tl.where(keys < S, last_query, 0)  # rows past the end would add inf * 0 to dq
    begin, whole_end = key_interval(first_ptr, last_ptr, tile_start, T, S, q_offset, BOUNDS)
    whole_begin, end = key_interval(first_ptr, last_ptr, last_key, T, S, q_offset, BOUNDS)
    begin = begin // BLOCK_M * BLOCK_M
    end = tl.maximum(end, begin)
    if tile_start + BLOCK_N > S:
        whole_begin = end
    whole_begin = tl.minimum(
        begin + tl.cdiv(whole_begin - begin, BLOCK_M) * BLOCK_M, begin + tl.cdiv(end - begin, BLOCK_M) * BLOCK_M
    )
    whole_end = tl.maximum(begin + (tl.maximum(whole_end, begin) - begin) // BLOCK_M * BLOCK_M, whole_begin)
    if BOUNDS != 2:
        whole_end = tl.maximum(end, whole_begin)

    # Three runs of query tiles for every query head of the group.
    k = k_desc.load([batch, kv_head, tile_start, 0]).reshape(BLOCK_N, BLOCK_D)
    v = v_desc.load([batch, kv_head, tile_start, 0]).reshape(BLOCK_N, BLOCK_D)
    state = (tl.zeros([BLOCK_N, BLOCK_D], tl.float32), tl.zeros([BLOCK_N, BLOCK_D], tl.float32))
    for member in tl.range(0, GROUP):
        head = kv_head * GROUP + member
        row_lse2 = lse2_ptr + (batch * H + head).to(tl.int64) * T_PADDED
        row_delta = delta_ptr + (batch * H + head).to(tl.int64) * T_PADDED
        row_dq = dq_ptr + batch.to(tl.int64) * stride_dq_b + head.to(tl.int64) * stride_dq_h
        state = visit_query_tiles(
            state, k, v, q_desc, dout_desc, dq_desc, row_dq, stride_dq_t, row_lse2, row_delta, batch, head,
            begin, whole_begin, first_query, last_query, T, D, qk_scale, softcap,
            BLOCK_M, BLOCK_N, BLOCK_D, True, SOFTCAP, FUSED, PRECISION,
        )  # fmt: skip
        state = visit_query_tiles(
            state, k, v, q_desc, dout_desc, dq_desc, row_dq, stride_dq_t, row_lse2, row_delta, batch, head,
            whole_begin, whole_end, first_query, last_query, T, D, qk_scale, softcap,
            BLOCK_M, BLOCK_N, BLOCK_D, False, SOFTCAP, FUSED, PRECISION,
        )  # fmt: skip
        if BOUNDS == 2:
            state = visit_query_tiles(
                state, k, v, q_desc, dout_desc, dq_desc, row_dq, stride_dq_t, row_lse2, row_delta, batch, head,
                whole_end, end, first_query, last_query, T, D, qk_scale, softcap,
                BLOCK_M, BLOCK_N, BLOCK_D, True, SOFTCAP, FUSED, PRECISION,
            )  # fmt: skip
    dk, dv = state

    # Store.
    dims = tl.arange(0, BLOCK_D)
    offsets = batch.to(tl.int64) * stride_dk_b + kv_head.to(tl.int64) * stride_dk_h
    offsets += keys.to(tl.int64)[:, None] * stride_dk_t + dims[None, :]
    mask = (keys < S)[:, None] & (dims < D)[None, :]
    dk = dk * scale
    if SUMS == 2:
        dk += tl.load(dk_ptr + offsets, mask=mask, other=0.0)
        dv += tl.load(dv_ptr + offsets, mask=mask, other=0.0)
    tl.store(dk_ptr + offsets, dk.to(dk_ptr.dtype.element_ty), mask=mask)
    tl.store(dv_ptr + offsets, dv.to(dv_ptr.dtype.element_ty), mask=mask)


@triton.jit
def query_tile_gradient(
    dq, q, dout, lse2, delta, k_desc, v_desc, batch, kv_head, begin, end, low, high, qk_scale, softcap,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One run of key tiles added to dq."""
    for start in tl.range(begin, end, BLOCK_N):
        k = k_desc.load([batch, kv_head, start, 0]).reshape(BLOCK_N, BLOCK_D)
        v = v_desc.load([batch, kv_head, start, 0]).reshape(BLOCK_N, BLOCK_D)
        scores = tl.dot(q, k.T, input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
        if SOFTCAP:
            scores, tanh = soften_scores(scores, qk_scale, softcap)
            p = tl.exp2(scores - lse2[:, None])
        else:
            p = tl.exp2(scores * qk_scale - lse2[:, None])
        if MASKED:
            keys = start + tl.arange(0, BLOCK_N)
            p = tl.where((keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None]), p, 0.0)
        dp = tl.dot(dout, v.T, input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        if SOFTCAP:
            ds = ds * (1.0 - tanh * tanh)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def query_kernel(
    q_desc, k_desc, v_desc, dout_desc, dq_ptr, lse2_ptr, delta_ptr, low_ptr, high_ptr,
    stride_dq_b, stride_dq_t, stride_dq_h, stride_bounds_b, T, T_PADDED, S, H, D, q_offset, qk_scale, scale, softcap,
    GROUP: tl.constexpr, BOUNDS: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """dQ by query tile, the same sums in the same order in every run."""
    batch_head = tl.program_id(0)
    batch, head = batch_head // H, batch_head % H
    kv_head = head // GROUP
    tile_start = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_M
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

    q = q_desc.load([batch, head, tile_start, 0]).reshape(BLOCK_M, BLOCK_D)
    dout = dout_desc.load([batch, head, tile_start, 0]).reshape(BLOCK_M, BLOCK_D)
    lse2 = tl.load(lse2_ptr + batch_head.to(tl.int64) * T_PADDED + rows)
    delta = tl.load(delta_ptr + batch_head.to(tl.int64) * T_PADDED + rows)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if BOUNDS == 2:
        dq = query_tile_gradient(
            dq, q, dout, lse2, delta, k_desc, v_desc, batch, kv_head, begin, whole_begin, low, high, qk_scale, softcap,
            BLOCK_N, BLOCK_D, True, SOFTCAP, PRECISION,
        )  # fmt: skip
    dq = query_tile_gradient(
        dq, q, dout, lse2, delta, k_desc, v_desc, batch, kv_head, whole_begin, whole_end, low, high, qk_scale, softcap,
        BLOCK_N, BLOCK_D, False, SOFTCAP, PRECISION,
    )  # fmt: skip
    dq = query_tile_gradient(
        dq, q, dout, lse2, delta, k_desc, v_desc, batch, kv_head, whole_end, end, low, high, qk_scale, softcap,
        BLOCK_N, BLOCK_D, True, SOFTCAP, PRECISION,
    )  # fmt: skip

    dims = tl.arange(0, BLOCK_D)
    offsets = batch.to(tl.int64) * stride_dq_b + head.to(tl.int64) * stride_dq_h
    offsets += rows.to(tl.int64)[:, None] * stride_dq_t + dims[None, :]
    mask = (rows < T)[:, None] & (dims < D)[None, :]
    dq = dq * scale
    if SUMS == 2:
        dq += tl.load(dq_ptr + offsets, mask=mask, other=0.0)
    tl.store(dq_ptr + offsets, dq.to(dq_ptr.dtype.element_ty), mask=mask)
