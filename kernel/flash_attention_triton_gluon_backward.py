"""The backward kernels for Hopper in Triton's Gluon layer: dK and dV by key tile, dQ by query tile.

As in the forward, a producer warp keeps rings of tiles full through TMA and each consumer warpgroup owns 64 rows: of
keys in `key_kernel_hopper` (everything transposed, so that P^T and dS^T go from registers into the next product), of
queries in `query_kernel_hopper`. Tiles that none of its rows sees it hands back unread. No warpgroup needs another's
tile and no sum is atomic, so every run gives the same bits. One warpgroup's exponentials run beside the other's
products; a product left in flight over the end of a loop makes ptxas (CUDA 12.8) serialise all of them (C7512).
The maths is that of flash_attention_triton_backward; after FlashAttention-3 (arXiv:2407.08608), which adds dQ up
atomically in one kernel: five products instead of our seven. With SUMS, gradients are float32 and go past shared
memory, from registers: begun (1), or added to what is there (2).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernel.flash_attention_triton_gluon import (
    ROWS,
    find_interval,
    find_tile,
    key_tiles,
    load_sums,
    skip_tiles,
    store_sums,
)


@gluon.jit
def find_seers(first_ptr, last_ptr, key, T, S, q_offset, BOUNDS: gl.constexpr):
    """The queries [first, last) that see a key: the dual of find_interval."""
    if BOUNDS == 2:
        key = gl.minimum(key, S - 1)
        return gl.load(first_ptr + key), gl.load(last_ptr + key)
    if BOUNDS == 1:
        return gl.minimum(gl.maximum(gl.minimum(key, S - 1) - q_offset, 0), T), key * 0 + T
    return key * 0, key * 0 + T


@gluon.jit
def find_key_tile(index, S, K, num_kv_heads, HEADS_PER_SWIZZLE: gl.constexpr, BLOCK_N: gl.constexpr):
    """(batch, kv head, first key) of a block: early keys, which most queries see, first; a few heads share L2."""
    num_tiles = gl.cdiv(S, BLOCK_N)
    group_size = HEADS_PER_SWIZZLE * num_tiles
    first_head = (index // group_size) * HEADS_PER_SWIZZLE
    heads_here = gl.minimum(HEADS_PER_SWIZZLE, num_kv_heads - first_head)
    within = index % group_size
    batch_kv = first_head + within % heads_here
    return batch_kv // K, batch_kv % K, (within // heads_here) * BLOCK_N


@gluon.jit
def query_tiles(first_ptr, last_ptr, batch, tile_start, T, S, q_offset, stride_bounds_b, BOUNDS: gl.constexpr,
                BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):  # fmt: skip
    """(first query, number of query tiles) of a tile of keys."""
    first_ptr += batch.to(gl.int64) * stride_bounds_b
    last_ptr += batch.to(gl.int64) * stride_bounds_b
    last_key = gl.minimum(tile_start + BLOCK_N, S) - 1
    begin = find_seers(first_ptr, last_ptr, tile_start, T, S, q_offset, BOUNDS)[0] // BLOCK_M * BLOCK_M
    end = find_seers(first_ptr, last_ptr, last_key, T, S, q_offset, BOUNDS)[1]
    return begin, gl.cdiv(gl.maximum(end - begin, 0), BLOCK_M)


@gluon.jit
def produce_queries(
    q_desc, k_desc, v_desc, dout_desc, rows_desc, k_tiles, v_tiles, q_tiles, dout_tiles, lse_rows, delta_rows,
    kv_full, q_full, q_empty, dout_full, dout_empty, first_ptr, last_ptr, stride_bounds_b, T, S, K, num_kv_heads,
    q_offset, GROUP: gl.constexpr, HEADS_PER_SWIZZLE: gl.constexpr, BOUNDS: gl.constexpr, CONSUMERS: gl.constexpr,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The producer of the key kernel: K and V once, then Q with lse and dO with delta for each head of the group."""
    BLOCK_N: gl.constexpr = CONSUMERS * ROWS
    batch, kv_head, tile_start = find_key_tile(gl.program_id(0), S, K, num_kv_heads, HEADS_PER_SWIZZLE, BLOCK_N)
    begin, count = query_tiles(
        first_ptr, last_ptr, batch, tile_start, T, S, q_offset, stride_bounds_b, BOUNDS, BLOCK_M, BLOCK_N
    )
    for part in gl.static_range(CONSUMERS):
        row = tile_start + part * ROWS
        mbarrier.expect(kv_full.index(part), 2 * k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [batch, kv_head, row, 0], kv_full.index(part), k_tiles.index(part))
        tma.async_copy_global_to_shared(v_desc, [batch, kv_head, row, 0], kv_full.index(part), v_tiles.index(part))
    for step in range(GROUP * count):
        head = kv_head * GROUP + step // count
        query = begin + step % count * BLOCK_M
        batch_head = batch * (K * GROUP) + head
        slot = step % STAGES
        phase = ((step // STAGES) & 1) ^ 1
        mbarrier.wait(q_empty.index(slot), phase)
        mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes + BLOCK_M * 4)
        tma.async_copy_global_to_shared(q_desc, [batch, head, query, 0], q_full.index(slot), q_tiles.index(slot))
        tma.async_copy_global_to_shared(rows_desc, [1, batch_head, query], q_full.index(slot), lse_rows.index(slot))
        mbarrier.wait(dout_empty.index(slot), phase)
        mbarrier.expect(dout_full.index(slot), dout_desc.block_type.nbytes + BLOCK_M * 4)
        tma.async_copy_global_to_shared(
            dout_desc, [batch, head, query, 0], dout_full.index(slot), dout_tiles.index(slot)
        )
        tma.async_copy_global_to_shared(
            rows_desc, [0, batch_head, query], dout_full.index(slot), delta_rows.index(slot)
        )


@gluon.jit
def visit_queries(
    dv, dk, step, query, last, k_tile, v_tile, q_tiles, dout_tiles, lse_rows, delta_rows,
    q_full, q_empty, dout_full, dout_empty, first_query, last_query, qk_scale,
    MASKED: gl.constexpr, STAGES: gl.constexpr, BLOCK_M: gl.constexpr, S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Query tiles from `query` up to `last`, added to dv and dk."""
    COLUMNS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    for start in range(query, last, BLOCK_M):
        slot = step % STAGES
        phase = (step // STAGES) & 1
        zeros = gl.zeros([ROWS, BLOCK_M], gl.float32, S_LAYOUT)
        mbarrier.wait(q_full.index(slot), phase)
        scores = warpgroup_mma(k_tile, q_tiles.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(dout_full.index(slot), phase)
        dp = warpgroup_mma(v_tile, dout_tiles.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        lse2 = lse_rows.index(slot).load(COLUMNS)
        p = gl.exp2(scores * qk_scale - lse2[None, :])
        if MASKED:
            queries = start + gl.arange(0, BLOCK_M, layout=COLUMNS)
            seen = (queries[None, :] >= first_query[:, None]) & (queries[None, :] < last_query[:, None])
            p = gl.where(seen, p, 0.0)
        p16 = gl.convert_layout(p.to(q_tiles.dtype), P_LAYOUT, assert_trivial=True)
        dv = warpgroup_mma(p16, dout_tiles.index(slot), dv, is_async=True)
        delta = delta_rows.index(slot).load(COLUMNS)
        dp = warpgroup_mma_wait(1, deps=[dp])
        ds = p * (dp - delta[None, :])
        ds16 = gl.convert_layout(ds.to(q_tiles.dtype), P_LAYOUT, assert_trivial=True)
        dk = warpgroup_mma(ds16, q_tiles.index(slot), dk, is_async=True)
        dv, p16 = warpgroup_mma_wait(1, deps=[dv, p16])
        mbarrier.arrive(dout_empty.index(slot), count=1)
        dk, ds16 = warpgroup_mma_wait(0, deps=[dk, ds16])
        mbarrier.arrive(q_empty.index(slot), count=1)
        step += 1
    return dv, dk, step


@gluon.jit
def consume_queries(
    dk_desc, dv_desc, k_tiles, v_tiles, q_tiles, dout_tiles, lse_rows, delta_rows, kv_full, q_full, q_empty, dout_full,
    dout_empty, dk_ptr, dv_ptr, stride_dk_b, stride_dk_t, stride_dk_h, first_ptr, last_ptr, stride_bounds_b,
    T, S, K, D, num_kv_heads, q_offset, qk_scale, scale,
    PART: gl.constexpr, GROUP: gl.constexpr, HEADS_PER_SWIZZLE: gl.constexpr, BOUNDS: gl.constexpr,
    CONSUMERS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """One consumer warpgroup of the key kernel: dK and dV of 64 keys."""
    BLOCK_N: gl.constexpr = CONSUMERS * ROWS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    batch, kv_head, tile_start = find_key_tile(gl.program_id(0), S, K, num_kv_heads, HEADS_PER_SWIZZLE, BLOCK_N)
    begin, count = query_tiles(
        first_ptr, last_ptr, batch, tile_start, T, S, q_offset, stride_bounds_b, BOUNDS, BLOCK_M, BLOCK_N
    )
    end = begin + count * BLOCK_M
    row0 = tile_start + PART * ROWS
    keys = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    first_ptr += batch.to(gl.int64) * stride_bounds_b
    last_ptr += batch.to(gl.int64) * stride_bounds_b
    first_query, last_query = find_seers(first_ptr, last_ptr, keys, T, S, q_offset, BOUNDS)
    # begin..start: unseen; start..whole: cut by `first`; ..cut: seen whole; ..stop: cut by `last`; ..end: unseen.
    first_first, first_last = find_seers(first_ptr, last_ptr, row0, T, S, q_offset, BOUNDS)
    last_first, last_last = find_seers(first_ptr, last_ptr, row0 + ROWS - 1, T, S, q_offset, BOUNDS)
    start = gl.minimum(begin + gl.maximum(first_first - begin, 0) // BLOCK_M * BLOCK_M, end)
    stop = gl.minimum(begin + gl.cdiv(gl.maximum(last_last - begin, 0), BLOCK_M) * BLOCK_M, end)
    stop = gl.maximum(stop, start)
    whole = gl.minimum(begin + gl.cdiv(gl.maximum(last_first - begin, 0), BLOCK_M) * BLOCK_M, stop)
    cut = stop
    if BOUNDS == 2:
        cut = gl.minimum(gl.maximum(begin + gl.maximum(first_last - begin, 0) // BLOCK_M * BLOCK_M, whole), stop)

    k_tile = k_tiles.index(PART)
    v_tile = v_tiles.index(PART)
    dv = gl.zeros([ROWS, BLOCK_D], gl.float32, D_LAYOUT)
    dk = gl.zeros([ROWS, BLOCK_D], gl.float32, D_LAYOUT)
    step = 0
    mbarrier.wait(kv_full.index(PART), 0)
    for _member in range(GROUP):
        step = skip_tiles(step, (start - begin) // BLOCK_M, q_full, q_empty, dout_full, dout_empty, STAGES)
        dv, dk, step = visit_queries(
            dv, dk, step, start, whole, k_tile, v_tile, q_tiles, dout_tiles, lse_rows, delta_rows,
            q_full, q_empty, dout_full, dout_empty, first_query, last_query, qk_scale,
            True, STAGES, BLOCK_M, S_LAYOUT, P_LAYOUT,
        )  # fmt: skip
        dv, dk, step = visit_queries(
            dv, dk, step, whole, cut, k_tile, v_tile, q_tiles, dout_tiles, lse_rows, delta_rows,
            q_full, q_empty, dout_full, dout_empty, first_query, last_query, qk_scale,
            False, STAGES, BLOCK_M, S_LAYOUT, P_LAYOUT,
        )  # fmt: skip
        if BOUNDS == 2:
            dv, dk, step = visit_queries(
                dv, dk, step, cut, stop, k_tile, v_tile, q_tiles, dout_tiles, lse_rows, delta_rows,
                q_full, q_empty, dout_full, dout_empty, first_query, last_query, qk_scale,
                True, STAGES, BLOCK_M, S_LAYOUT, P_LAYOUT,
            )  # fmt: skip
        step = skip_tiles(step, (end - stop) // BLOCK_M, q_full, q_empty, dout_full, dout_empty, STAGES)
    dk = dk * scale
    if SUMS == 0:
        k_tile.store(dk.to(k_tiles.dtype))  # K and V of these rows are read by nobody else
        v_tile.store(dv.to(k_tiles.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dk_desc, [batch, kv_head, row0, 0], k_tile)
        tma.async_copy_shared_to_global(dv_desc, [batch, kv_head, row0, 0], v_tile)
        tma.store_wait(0)
    else:
        base = batch.to(gl.int64) * stride_dk_b + kv_head.to(gl.int64) * stride_dk_h
        add_sums(dk_ptr + base, stride_dk_t, row0, S, D, dk, BLOCK_D, D_LAYOUT, SUMS)
        add_sums(dv_ptr + base, stride_dk_t, row0, S, D, dv, BLOCK_D, D_LAYOUT, SUMS)


@gluon.jit
def add_sums(ptr, stride_t, row0, T, D, part, BLOCK_D: gl.constexpr, LAYOUT: gl.constexpr, SUMS: gl.constexpr):
    """64 rows of float32 sums: `part` alone, or added to what is there."""
    if SUMS == 2:
        part += load_sums(ptr, stride_t, row0, T, D, BLOCK_D, LAYOUT)
    store_sums(ptr, stride_t, row0, T, D, part, LAYOUT)


@gluon.jit
def key_kernel_hopper(
    q_desc, k_desc, v_desc, dout_desc, rows_desc, dk_desc, dv_desc, dk_ptr, dv_ptr, stride_dk_b, stride_dk_t,
    stride_dk_h, first_ptr, last_ptr, stride_bounds_b, T, S, K, D, num_kv_heads, q_offset, qk_scale, scale,
    GROUP: gl.constexpr, HEADS_PER_SWIZZLE: gl.constexpr, BOUNDS: gl.constexpr, CONSUMERS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    # Shared memory: K and V once a consumer, Q and dO with their row vectors in rings.
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], q_desc.dtype)
    QUERIES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_D], q_desc.dtype)
    VECTOR: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    k_tiles = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, ROWS, BLOCK_D], KEYS)
    v_tiles = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, ROWS, BLOCK_D], KEYS)
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BLOCK_M, BLOCK_D], QUERIES)
    dout_tiles = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BLOCK_M, BLOCK_D], QUERIES)
    lse_rows = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], VECTOR)
    delta_rows = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], VECTOR)
    kv_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    dout_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    dout_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(kv_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=CONSUMERS)
        mbarrier.init(dout_full.index(i), count=1)
        mbarrier.init(dout_empty.index(i), count=CONSUMERS)

    # The roles. (Literal tuples: named ones lose their constants.)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consume_queries, (
            dk_desc, dv_desc, k_tiles, v_tiles, q_tiles, dout_tiles, lse_rows, delta_rows, kv_full, q_full, q_empty,
            dout_full, dout_empty, dk_ptr, dv_ptr, stride_dk_b, stride_dk_t, stride_dk_h, first_ptr, last_ptr,
            stride_bounds_b, T, S, K, D, num_kv_heads, q_offset, qk_scale, scale,
            0, GROUP, HEADS_PER_SWIZZLE, BOUNDS, CONSUMERS, BLOCK_M, BLOCK_D, STAGES, SUMS)),
            (consume_queries, (
            dk_desc, dv_desc, k_tiles, v_tiles, q_tiles, dout_tiles, lse_rows, delta_rows, kv_full, q_full, q_empty,
            dout_full, dout_empty, dk_ptr, dv_ptr, stride_dk_b, stride_dk_t, stride_dk_h, first_ptr, last_ptr,
            stride_bounds_b, T, S, K, D, num_kv_heads, q_offset, qk_scale, scale,
            1, GROUP, HEADS_PER_SWIZZLE, BOUNDS, CONSUMERS, BLOCK_M, BLOCK_D, STAGES, SUMS)),
            (produce_queries, (
            q_desc, k_desc, v_desc, dout_desc, rows_desc, k_tiles, v_tiles, q_tiles, dout_tiles, lse_rows, delta_rows,
            kv_full, q_full, q_empty, dout_full, dout_empty, first_ptr, last_ptr, stride_bounds_b, T, S, K,
            num_kv_heads, q_offset, GROUP, HEADS_PER_SWIZZLE, BOUNDS, CONSUMERS, BLOCK_M, STAGES))
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume_queries, (
            dk_desc, dv_desc, k_tiles, v_tiles, q_tiles, dout_tiles, lse_rows, delta_rows, kv_full, q_full, q_empty,
            dout_full, dout_empty, dk_ptr, dv_ptr, stride_dk_b, stride_dk_t, stride_dk_h, first_ptr, last_ptr,
            stride_bounds_b, T, S, K, D, num_kv_heads, q_offset, qk_scale, scale,
            0, GROUP, HEADS_PER_SWIZZLE, BOUNDS, CONSUMERS, BLOCK_M, BLOCK_D, STAGES, SUMS)),
            (consume_queries, (
            dk_desc, dv_desc, k_tiles, v_tiles, q_tiles, dout_tiles, lse_rows, delta_rows, kv_full, q_full, q_empty,
            dout_full, dout_empty, dk_ptr, dv_ptr, stride_dk_b, stride_dk_t, stride_dk_h, first_ptr, last_ptr,
            stride_bounds_b, T, S, K, D, num_kv_heads, q_offset, qk_scale, scale,
            1, GROUP, HEADS_PER_SWIZZLE, BOUNDS, CONSUMERS, BLOCK_M, BLOCK_D, STAGES, SUMS)),
            (consume_queries, (
            dk_desc, dv_desc, k_tiles, v_tiles, q_tiles, dout_tiles, lse_rows, delta_rows, kv_full, q_full, q_empty,
            dout_full, dout_empty, dk_ptr, dv_ptr, stride_dk_b, stride_dk_t, stride_dk_h, first_ptr, last_ptr,
            stride_bounds_b, T, S, K, D, num_kv_heads, q_offset, qk_scale, scale,
            2, GROUP, HEADS_PER_SWIZZLE, BOUNDS, CONSUMERS, BLOCK_M, BLOCK_D, STAGES, SUMS)),
            (produce_queries, (
            q_desc, k_desc, v_desc, dout_desc, rows_desc, k_tiles, v_tiles, q_tiles, dout_tiles, lse_rows, delta_rows,
            kv_full, q_full, q_empty, dout_full, dout_empty, first_ptr, last_ptr, stride_bounds_b, T, S, K,
            num_kv_heads, q_offset, GROUP, HEADS_PER_SWIZZLE, BOUNDS, CONSUMERS, BLOCK_M, STAGES))
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip


@gluon.jit
def produce_keys(
    q_desc, k_desc, v_desc, dout_desc, q_tiles, dout_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty,
    low_ptr, high_ptr, stride_bounds_b, T, S, H, num_heads, q_offset,
    GROUP: gl.constexpr, HEADS_PER_SWIZZLE: gl.constexpr, BOUNDS: gl.constexpr, CONSUMERS: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The producer of the query kernel: Q and dO once, then K and V."""
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    batch, head, tile_start = find_tile(gl.program_id(0), T, H, num_heads, HEADS_PER_SWIZZLE, BLOCK_M)
    begin, count = key_tiles(
        low_ptr, high_ptr, batch, tile_start, T, S, q_offset, stride_bounds_b, BOUNDS, BLOCK_M, BLOCK_N
    )
    for part in gl.static_range(CONSUMERS):
        row = tile_start + part * ROWS
        mbarrier.expect(q_full.index(part), 2 * q_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [batch, head, row, 0], q_full.index(part), q_tiles.index(part))
        tma.async_copy_global_to_shared(dout_desc, [batch, head, row, 0], q_full.index(part), dout_tiles.index(part))
    kv_head = head // GROUP
    for step in range(count):
        slot = step % STAGES
        phase = ((step // STAGES) & 1) ^ 1
        key = begin + step * BLOCK_N
        mbarrier.wait(k_empty.index(slot), phase)
        mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [batch, kv_head, key, 0], k_full.index(slot), k_tiles.index(slot))
        mbarrier.wait(v_empty.index(slot), phase)
        mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, [batch, kv_head, key, 0], v_full.index(slot), v_tiles.index(slot))


@gluon.jit
def visit_keys(
    dq, step, last, q_tile, dout_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
    begin, low, high, lse2, delta, qk_scale,
    MASKED: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Key tiles step..last, added to dq."""
    for i in range(step, last):
        slot = i % STAGES
        phase = (i // STAGES) & 1
        zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
        mbarrier.wait(k_full.index(slot), phase)
        scores = warpgroup_mma(q_tile, k_tiles.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(slot), phase)
        dp = warpgroup_mma(dout_tile, v_tiles.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        p = gl.exp2(scores * qk_scale - lse2[:, None])
        if MASKED:
            keys = begin + i * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S_LAYOUT))
            p = gl.where((keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None]), p, 0.0)
        dp = warpgroup_mma_wait(0, deps=[dp])
        mbarrier.arrive(v_empty.index(slot), count=1)
        ds = p * (dp - delta[:, None])
        ds16 = gl.convert_layout(ds.to(k_tiles.dtype), P_LAYOUT, assert_trivial=True)
        dq = warpgroup_mma(ds16, k_tiles.index(slot), dq, is_async=True)
        dq, ds16 = warpgroup_mma_wait(0, deps=[dq, ds16])
        mbarrier.arrive(k_empty.index(slot), count=1)
    return dq, gl.maximum(step, last)


@gluon.jit
def consume_keys(
    dq_desc, q_tiles, dout_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty, dq_ptr, stride_dq_b,
    stride_dq_t, stride_dq_h, lse2_ptr, delta_ptr, low_ptr, high_ptr, stride_bounds_b, T, T_PADDED, S, H, D, num_heads,
    q_offset, qk_scale, scale, PART: gl.constexpr, HEADS_PER_SWIZZLE: gl.constexpr, BOUNDS: gl.constexpr,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """One consumer warpgroup of the query kernel: dQ of 64 queries."""
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    D_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, D_LAYOUT, 2)
    batch, head, tile_start = find_tile(gl.program_id(0), T, H, num_heads, HEADS_PER_SWIZZLE, BLOCK_M)
    begin, count = key_tiles(
        low_ptr, high_ptr, batch, tile_start, T, S, q_offset, stride_bounds_b, BOUNDS, BLOCK_M, BLOCK_N
    )
    row0 = tile_start + PART * ROWS
    rows = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S_LAYOUT))
    low_ptr += batch.to(gl.int64) * stride_bounds_b
    high_ptr += batch.to(gl.int64) * stride_bounds_b
    low, high = find_interval(low_ptr, high_ptr, rows, T, S, q_offset, BOUNDS)
    # 0..start: unseen; start..whole: cut by `low`; ..cut: seen whole; ..stop: cut by `high`; ..count: unseen.
    first_low, first_high = find_interval(low_ptr, high_ptr, row0, T, S, q_offset, BOUNDS)
    last_low, last_high = find_interval(low_ptr, high_ptr, row0 + ROWS - 1, T, S, q_offset, BOUNDS)
    start = gl.minimum(gl.maximum(first_low - begin, 0) // BLOCK_N, count)
    stop = gl.maximum(gl.minimum(gl.cdiv(gl.maximum(last_high - begin, 0), BLOCK_N), count), start)
    whole = gl.minimum(gl.cdiv(gl.maximum(last_low - begin, 0), BLOCK_N), stop)
    cut = gl.minimum(gl.maximum(gl.maximum(first_high - begin, 0) // BLOCK_N, whole), stop)
    row_base = (batch * H + head).to(gl.int64) * T_PADDED
    inside = rows < T_PADDED
    lse2 = gl.load(lse2_ptr + row_base + rows, mask=inside, other=float("inf"))
    delta = gl.load(delta_ptr + row_base + rows, mask=inside, other=0.0)

    q_tile = q_tiles.index(PART)
    dout_tile = dout_tiles.index(PART)
    dq = gl.zeros([ROWS, BLOCK_D], gl.float32, D_LAYOUT)
    mbarrier.wait(q_full.index(PART), 0)
    step = skip_tiles(0, start, k_full, k_empty, v_full, v_empty, STAGES)
    if BOUNDS == 2:
        dq, step = visit_keys(
            dq, step, whole, q_tile, dout_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
            begin, low, high, lse2, delta, qk_scale, True, STAGES, BLOCK_N, S_LAYOUT, P_LAYOUT,
        )  # fmt: skip
    dq, step = visit_keys(
        dq, step, cut, q_tile, dout_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
        begin, low, high, lse2, delta, qk_scale, False, STAGES, BLOCK_N, S_LAYOUT, P_LAYOUT,
    )  # fmt: skip
    dq, step = visit_keys(
        dq, step, stop, q_tile, dout_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
        begin, low, high, lse2, delta, qk_scale, True, STAGES, BLOCK_N, S_LAYOUT, P_LAYOUT,
    )  # fmt: skip
    skip_tiles(step, count - stop, k_full, k_empty, v_full, v_empty, STAGES)
    dq = dq * scale
    if SUMS == 0:
        q_tile.store(dq.to(q_tiles.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dq_desc, [batch, head, row0, 0], q_tile)
        tma.store_wait(0)
    else:
        base = batch.to(gl.int64) * stride_dq_b + head.to(gl.int64) * stride_dq_h
        add_sums(dq_ptr + base, stride_dq_t, row0, T, D, dq, BLOCK_D, D_LAYOUT, SUMS)


@gluon.jit
def query_kernel_hopper(
    q_desc, k_desc, v_desc, dout_desc, dq_desc, dq_ptr, stride_dq_b, stride_dq_t, stride_dq_h, lse2_ptr, delta_ptr,
    low_ptr, high_ptr, stride_bounds_b, T, T_PADDED, S, H, D, num_heads, q_offset, qk_scale, scale,
    GROUP: gl.constexpr, HEADS_PER_SWIZZLE: gl.constexpr, BOUNDS: gl.constexpr, CONSUMERS: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    # Shared memory: Q and dO once a consumer, K and V in rings.
    QUERIES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], q_desc.dtype)
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], q_desc.dtype)
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, ROWS, BLOCK_D], QUERIES)
    dout_tiles = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, ROWS, BLOCK_D], QUERIES)
    k_tiles = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BLOCK_N, BLOCK_D], KEYS)
    v_tiles = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BLOCK_N, BLOCK_D], KEYS)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)

    # The roles. (Literal tuples: named ones lose their constants.)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consume_keys, (
            dq_desc, q_tiles, dout_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty, dq_ptr,
            stride_dq_b, stride_dq_t, stride_dq_h, lse2_ptr, delta_ptr, low_ptr, high_ptr, stride_bounds_b,
            T, T_PADDED, S, H, D, num_heads, q_offset, qk_scale, scale,
            0, HEADS_PER_SWIZZLE, BOUNDS, CONSUMERS, BLOCK_N, BLOCK_D, STAGES, SUMS)),
            (consume_keys, (
            dq_desc, q_tiles, dout_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty, dq_ptr,
            stride_dq_b, stride_dq_t, stride_dq_h, lse2_ptr, delta_ptr, low_ptr, high_ptr, stride_bounds_b,
            T, T_PADDED, S, H, D, num_heads, q_offset, qk_scale, scale,
            1, HEADS_PER_SWIZZLE, BOUNDS, CONSUMERS, BLOCK_N, BLOCK_D, STAGES, SUMS)),
            (produce_keys, (
            q_desc, k_desc, v_desc, dout_desc, q_tiles, dout_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full,
            v_empty, low_ptr, high_ptr, stride_bounds_b, T, S, H, num_heads, q_offset,
            GROUP, HEADS_PER_SWIZZLE, BOUNDS, CONSUMERS, BLOCK_N, STAGES))
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume_keys, (
            dq_desc, q_tiles, dout_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty, dq_ptr,
            stride_dq_b, stride_dq_t, stride_dq_h, lse2_ptr, delta_ptr, low_ptr, high_ptr, stride_bounds_b,
            T, T_PADDED, S, H, D, num_heads, q_offset, qk_scale, scale,
            0, HEADS_PER_SWIZZLE, BOUNDS, CONSUMERS, BLOCK_N, BLOCK_D, STAGES, SUMS)),
            (consume_keys, (
            dq_desc, q_tiles, dout_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty, dq_ptr,
            stride_dq_b, stride_dq_t, stride_dq_h, lse2_ptr, delta_ptr, low_ptr, high_ptr, stride_bounds_b,
            T, T_PADDED, S, H, D, num_heads, q_offset, qk_scale, scale,
            1, HEADS_PER_SWIZZLE, BOUNDS, CONSUMERS, BLOCK_N, BLOCK_D, STAGES, SUMS)),
            (consume_keys, (
            dq_desc, q_tiles, dout_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty, dq_ptr,
            stride_dq_b, stride_dq_t, stride_dq_h, lse2_ptr, delta_ptr, low_ptr, high_ptr, stride_bounds_b,
            T, T_PADDED, S, H, D, num_heads, q_offset, qk_scale, scale,
            2, HEADS_PER_SWIZZLE, BOUNDS, CONSUMERS, BLOCK_N, BLOCK_D, STAGES, SUMS)),
            (produce_keys, (
            q_desc, k_desc, v_desc, dout_desc, q_tiles, dout_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full,
            v_empty, low_ptr, high_ptr, stride_bounds_b, T, S, H, num_heads, q_offset,
            GROUP, HEADS_PER_SWIZZLE, BOUNDS, CONSUMERS, BLOCK_N, STAGES))
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
