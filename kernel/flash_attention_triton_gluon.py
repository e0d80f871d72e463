"""The forward kernel for Hopper in Triton's Gluon layer, after FlashAttention-3 (Shah et al., arXiv:2407.08608).

A block of threads holds one producer warp and two or three consumer warpgroups, each owner of 64 query rows. The
producer keeps a ring of K and V tiles full through TMA; a consumer runs S = Q K^T of the next tile and P V of the last
on the tensor cores together, and takes the softmax of the next while P V still runs. A warpgroup hands tiles that none
of its rows sees back unread. Blocks are persistent: the producer draws the next work item from a counter and loads its
tiles while the consumers finish the last. The maths is that of forward_kernel. With SUMS, out is float32 and goes past
shared memory, from registers: begun (1), or first read back with lse and gone on from (2), behind the first products.
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

LOG2E = gl.constexpr(1.4426950408889634)
ROWS = gl.constexpr(64)  # query rows of one consumer warpgroup


@gluon.jit
def find_interval(low_ptr, high_ptr, row, T, S, q_offset, BOUNDS: gl.constexpr):
    """The keys [low, high) that a query sees; see query_interval of the plain kernel."""
    if BOUNDS == 2:
        row = gl.minimum(row, T - 1)
        return gl.load(low_ptr + row), gl.load(high_ptr + row)
    if BOUNDS == 1:
        return row * 0, gl.maximum(gl.minimum(row + q_offset + 1, S), 0)
    return row * 0, row * 0 + S


@gluon.jit
def find_tile(index, T, H, num_heads, HEADS_PER_SWIZZLE: gl.constexpr, BLOCK_M: gl.constexpr):
    """(batch, head, first row) of a work item: long tiles first within a few heads whose keys share L2."""
    num_tiles = gl.cdiv(T, BLOCK_M)
    group_size = HEADS_PER_SWIZZLE * num_tiles
    first_head = (index // group_size) * HEADS_PER_SWIZZLE
    heads_here = gl.minimum(HEADS_PER_SWIZZLE, num_heads - first_head)
    within = index % group_size
    batch_head = first_head + within % heads_here
    return batch_head // H, batch_head % H, (num_tiles - 1 - within // heads_here) * BLOCK_M


@gluon.jit
def key_tiles(low_ptr, high_ptr, batch, tile_start, T, S, q_offset, stride_bounds_b, BOUNDS: gl.constexpr,
              BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):  # fmt: skip
    """(first key, number of key tiles) of a tile of queries."""
    low_ptr += batch.to(gl.int64) * stride_bounds_b
    high_ptr += batch.to(gl.int64) * stride_bounds_b
    last_row = gl.minimum(tile_start + BLOCK_M, T) - 1
    begin = find_interval(low_ptr, high_ptr, tile_start, T, S, q_offset, BOUNDS)[0]
    end = find_interval(low_ptr, high_ptr, last_row, T, S, q_offset, BOUNDS)[1]
    return begin, gl.cdiv(gl.maximum(end - begin, 0), BLOCK_N)


@gluon.jit
def take_item(item_slots, item_full, item_empty, turn):
    """A consumer's next work item, as the producer published it."""
    slot = turn % 2
    mbarrier.wait(item_full.index(slot), (turn // 2) & 1)
    item = gl.max(item_slots.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)
    mbarrier.arrive(item_empty.index(slot), count=1)
    return item


@gluon.jit
def publish_item(item, item_slots, item_full, item_empty, turn):
    slot = turn % 2
    mbarrier.wait(item_empty.index(slot), ((turn // 2) & 1) ^ 1)
    item_slots.index(slot).store(gl.full([1], item, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(item_full.index(slot), count=1)


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    item_slots, item_full, item_empty, counter_ptr, low_ptr, high_ptr, stride_bounds_b, T, S, H, num_heads, q_offset,
    GROUP: gl.constexpr, HEADS_PER_SWIZZLE: gl.constexpr, BOUNDS: gl.constexpr, CONSUMERS: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The producer warp: hands out work items, loads Q once an item, K and V through rings, last keys first."""
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    num_items = gl.cdiv(T, BLOCK_M) * num_heads
    step = 0
    turn = 0
    item = gl.program_id(0)
    while item < num_items:
        publish_item(item, item_slots, item_full, item_empty, turn)
        batch, head, tile_start = find_tile(item, T, H, num_heads, HEADS_PER_SWIZZLE, BLOCK_M)
        begin, count = key_tiles(
            low_ptr, high_ptr, batch, tile_start, T, S, q_offset, stride_bounds_b, BOUNDS, BLOCK_M, BLOCK_N
        )
        # The next item is asked for early, since the answer takes a microsecond.
        item = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed")
        for part in gl.static_range(CONSUMERS):
            place = (turn % 2) * CONSUMERS + part
            mbarrier.wait(q_empty.index(place), ((turn // 2) & 1) ^ 1)
            mbarrier.expect(q_full.index(place), q_desc.block_type.nbytes)
            row = tile_start + part * ROWS
            tma.async_copy_global_to_shared(q_desc, [batch, head, row, 0], q_full.index(place), q_tiles.index(place))
        kv_head = head // GROUP
        for i in range(count):
            slot = step % STAGES
            phase = (step // STAGES) & 1
            key = begin + (count - 1 - i) * BLOCK_N
            mbarrier.wait(k_empty.index(slot), phase ^ 1)
            mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(k_desc, [batch, kv_head, key, 0], k_full.index(slot), k_tiles.index(slot))
            mbarrier.wait(v_empty.index(slot), phase ^ 1)
            mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(v_desc, [batch, kv_head, key, 0], v_full.index(slot), v_tiles.index(slot))
            step += 1
        turn += 1
    publish_item(num_items, item_slots, item_full, item_empty, turn)


@gluon.jit
def skip_tiles(step, count, k_full, k_empty, v_full, v_empty, STAGES: gl.constexpr):
    """Tiles that none of this consumer's rows sees, handed back unread."""
    for i in range(step, step + count):
        slot = i % STAGES
        phase = (i // STAGES) & 1
        mbarrier.wait(k_full.index(slot), phase)
        mbarrier.arrive(k_empty.index(slot), count=1)
        mbarrier.wait(v_full.index(slot), phase)
        mbarrier.arrive(v_empty.index(slot), count=1)
    return step + gl.maximum(count, 0)


@gluon.jit
def fold_scores(scores, row_max, row_sum, key, low, high, qk_scale, MASKED: gl.constexpr, S_LAYOUT: gl.constexpr):
    """One tile of the online softmax: P, the factor of what was summed before, the new maximum and sum."""
    if MASKED:
        keys = key + gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, S_LAYOUT))
        seen = (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])
        scores = gl.where(seen, scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, axis=1) * qk_scale)
    shift = new_max
    if MASKED:
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    alpha = gl.exp2(row_max - shift)
    p = gl.exp2(scores * qk_scale - shift[:, None])
    row_sum = row_sum * alpha + gl.sum(p, axis=1)
    return p, alpha, new_max, row_sum


@gluon.jit
def visit_tiles(
    acc, p16, row_max, row_sum, step, first, last, q_tile, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
    begin, count, low, high, qk_scale, MASKED: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
    S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Key tiles first..last: S of this tile runs beside P V of the tile before, whose P came in as p16."""
    for i in range(first, last):
        slot = step % STAGES
        before = (step - 1) % STAGES
        mbarrier.wait(k_full.index(slot), (step // STAGES) & 1)
        scores = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
        scores = warpgroup_mma(q_tile, k_tiles.index(slot).permute((1, 0)), scores, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), ((step - 1) // STAGES) & 1)
        acc = warpgroup_mma(p16, v_tiles.index(before), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_empty.index(slot), count=1)
        key = begin + (count - 1 - i) * BLOCK_N
        p, alpha, row_max, row_sum = fold_scores(scores, row_max, row_sum, key, low, high, qk_scale, MASKED, S_LAYOUT)
        acc, p16 = warpgroup_mma_wait(0, deps=[acc, p16])
        mbarrier.arrive(v_empty.index(before), count=1)
        alpha = gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT), assert_trivial=True)
        acc = acc * alpha[:, None]
        p16 = gl.convert_layout(p.to(p16.dtype), P_LAYOUT, assert_trivial=True)
        step += 1
    return acc, p16, row_max, row_sum, step


@gluon.jit
def release_before(q_empty, turn, PART: gl.constexpr, CONSUMERS: gl.constexpr):
    """The item before has left its tile, which may take the Q of the item after this one."""
    tma.store_wait(0)
    mbarrier.arrive(q_empty.index((1 - turn % 2) * CONSUMERS + PART), count=1, pred=turn > 0)


@gluon.jit
def consume(
    out_desc, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    item_slots, item_full, item_empty, out_ptr, stride_out_b, stride_out_t, stride_out_h, lse_ptr, stride_lse,
    low_ptr, high_ptr, stride_bounds_b, T, S, H, D, num_heads, q_offset, qk_scale,
    PART: gl.constexpr, HEADS_PER_SWIZZLE: gl.constexpr, BOUNDS: gl.constexpr, CONSUMERS: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """One consumer warpgroup: 64 rows of each work item."""
    BLOCK_M: gl.constexpr = CONSUMERS * ROWS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    num_items = gl.cdiv(T, BLOCK_M) * num_heads
    step = 0
    turn = 0
    item = take_item(item_slots, item_full, item_empty, turn)
    while item < num_items:
        batch, head, tile_start = find_tile(item, T, H, num_heads, HEADS_PER_SWIZZLE, BLOCK_M)
        begin, count = key_tiles(
            low_ptr, high_ptr, batch, tile_start, T, S, q_offset, stride_bounds_b, BOUNDS, BLOCK_M, BLOCK_N
        )
        row0 = tile_start + PART * ROWS
        rows = row0 + gl.arange(0, ROWS, layout=ROW_LAYOUT)
        low_b = low_ptr + batch.to(gl.int64) * stride_bounds_b
        high_b = high_ptr + batch.to(gl.int64) * stride_bounds_b
        low, high = find_interval(low_b, high_b, rows, T, S, q_offset, BOUNDS)
        first_low, first_high = find_interval(low_b, high_b, row0, T, S, q_offset, BOUNDS)
        last_low, last_high = find_interval(low_b, high_b, row0 + ROWS - 1, T, S, q_offset, BOUNDS)
        # From the last key tile: 0..start unseen by these rows, ..cut cut by `high`, ..whole seen whole, ..stop cut by
        # `low`, ..count unseen.
        start = gl.minimum(gl.maximum(count - gl.cdiv(gl.maximum(last_high - begin, 0), BLOCK_N), 0), count)
        stop = gl.minimum(gl.maximum(count - gl.maximum(first_low - begin, 0) // BLOCK_N, start), count)
        cut = gl.minimum(gl.maximum(count - gl.maximum(first_high - begin, 0) // BLOCK_N, start + 1), stop)
        whole = gl.minimum(gl.maximum(count - gl.cdiv(gl.maximum(last_low - begin, 0), BLOCK_N), cut), stop)
        place = (turn % 2) * CONSUMERS + PART
        q_tile = q_tiles.index(place)
        acc = gl.zeros([ROWS, BLOCK_D], gl.float32, O_LAYOUT)
        row_max = gl.full([ROWS], float("-inf"), gl.float32, ROW_LAYOUT)
        row_sum = gl.zeros([ROWS], gl.float32, ROW_LAYOUT)
        out_rows = out_ptr + batch.to(gl.int64) * stride_out_b + head.to(gl.int64) * stride_out_h
        lse_rows = lse_ptr + (batch * H + head).to(gl.int64) * stride_lse
        if SUMS == 2:
            acc = load_sums(out_rows, stride_out_t, row0, T, D, BLOCK_D, O_LAYOUT)
            row_max = gl.load(lse_rows + rows, mask=rows < T, other=float("-inf")) * LOG2E
            row_sum = gl.where(row_max == float("-inf"), 0.0, 1.0)
        mbarrier.wait(q_full.index(place), (turn // 2) & 1)
        step = skip_tiles(step, start, k_full, k_empty, v_full, v_empty, STAGES)
        if start < stop:
            slot = step % STAGES
            mbarrier.wait(k_full.index(slot), (step // STAGES) & 1)
            scores = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
            scores = warpgroup_mma(q_tile, k_tiles.index(slot).permute((1, 0)), scores, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(k_empty.index(slot), count=1)
            key = begin + (count - 1 - start) * BLOCK_N
            p, alpha, row_max, row_sum = fold_scores(scores, row_max, row_sum, key, low, high, qk_scale, True, S_LAYOUT)
            if SUMS == 2:
                alpha = gl.convert_layout(alpha, gl.SliceLayout(1, O_LAYOUT), assert_trivial=True)
                acc = acc * alpha[:, None]
            p16 = gl.convert_layout(p.to(k_tiles.dtype), P_LAYOUT, assert_trivial=True)
            step += 1
            release_before(q_empty, turn, PART, CONSUMERS)
            acc, p16, row_max, row_sum, step = visit_tiles(
                acc, p16, row_max, row_sum, step, start + 1, cut, q_tile, k_tiles, v_tiles, k_full, k_empty, v_full,
                v_empty, begin, count, low, high, qk_scale, True, STAGES, BLOCK_N, S_LAYOUT, O_LAYOUT, P_LAYOUT,
            )  # fmt: skip
            acc, p16, row_max, row_sum, step = visit_tiles(
                acc, p16, row_max, row_sum, step, cut, whole, q_tile, k_tiles, v_tiles, k_full, k_empty, v_full,
                v_empty, begin, count, low, high, qk_scale, False, STAGES, BLOCK_N, S_LAYOUT, O_LAYOUT, P_LAYOUT,
            )  # fmt: skip
            if BOUNDS == 2:
                acc, p16, row_max, row_sum, step = visit_tiles(
                    acc, p16, row_max, row_sum, step, whole, stop, q_tile, k_tiles, v_tiles, k_full, k_empty, v_full,
                    v_empty, begin, count, low, high, qk_scale, True, STAGES, BLOCK_N, S_LAYOUT, O_LAYOUT, P_LAYOUT,
                )  # fmt: skip
            slot = (step - 1) % STAGES
            mbarrier.wait(v_full.index(slot), ((step - 1) // STAGES) & 1)
            acc = warpgroup_mma(p16, v_tiles.index(slot), acc, is_async=True)
            acc, p16 = warpgroup_mma_wait(0, deps=[acc, p16])
            mbarrier.arrive(v_empty.index(slot), count=1)
        else:
            release_before(q_empty, turn, PART, CONSUMERS)
        step = skip_tiles(step, count - stop, k_full, k_empty, v_full, v_empty, STAGES)
        acc, lse = divide_by_sums(acc, row_max, row_sum, O_LAYOUT)
        gl.store(lse_rows + rows, lse, mask=rows < T)
        if SUMS == 0:  # through Q's tile and TMA, which clips at T
            q_tile.store(acc.to(out_desc.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(out_desc, [batch, head, row0, 0], q_tile)
        else:
            store_sums(out_rows, stride_out_t, row0, T, D, acc, O_LAYOUT)
        turn += 1
        item = take_item(item_slots, item_full, item_empty, turn)
    tma.store_wait(0)


@gluon.jit
def divide_by_sums(acc, row_max, row_sum, O_LAYOUT: gl.constexpr):
    """out and lse of rows; 0 and -inf where no key was seen."""
    empty = row_sum == 0.0
    inverse = gl.convert_layout(1.0 / gl.where(empty, 1.0, row_sum), gl.SliceLayout(1, O_LAYOUT), assert_trivial=True)
    lse = gl.where(empty, float("-inf"), (row_max + gl.log2(gl.where(empty, 1.0, row_sum))) / LOG2E)
    return acc * inverse[:, None], lse


@gluon.jit
def sum_places(ptr, stride_t, row0, T, D, BLOCK_D: gl.constexpr, LAYOUT: gl.constexpr):
    """Where 64 rows of float32 sums of one head lie, and which of them exist."""
    rows = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, LAYOUT))
    places = ptr + rows.to(gl.int64)[:, None] * stride_t + dims[None, :]
    return places, (rows < T)[:, None] & (dims < D)[None, :]


@gluon.jit
def load_sums(ptr, stride_t, row0, T, D, BLOCK_D: gl.constexpr, LAYOUT: gl.constexpr):
    places, inside = sum_places(ptr, stride_t, row0, T, D, BLOCK_D, LAYOUT)
    return gl.load(places, mask=inside, other=0.0)


@gluon.jit
def store_sums(ptr, stride_t, row0, T, D, sums, LAYOUT: gl.constexpr):
    places, inside = sum_places(ptr, stride_t, row0, T, D, sums.shape[1], LAYOUT)
    gl.store(places, sums, mask=inside)


@gluon.jit
def forward_kernel_hopper(
    q_desc, k_desc, v_desc, out_desc, counter_ptr, out_ptr, stride_out_b, stride_out_t, stride_out_h,
    lse_ptr, stride_lse, low_ptr, high_ptr, stride_bounds_b, T, S, H, D, num_heads, q_offset, qk_scale,
    GROUP: gl.constexpr, HEADS_PER_SWIZZLE: gl.constexpr, BOUNDS: gl.constexpr, CONSUMERS: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    # Shared memory: Q (later out) twice a consumer, K and V in rings; a barrier for "full" and one for "empty" each.
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_D], q_desc.dtype)
    K_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], q_desc.dtype)
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [2 * CONSUMERS, ROWS, BLOCK_D], Q_LAYOUT)
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_N, BLOCK_D], K_LAYOUT)
    v_tiles = gl.allocate_shared_memory(v_desc.dtype, [STAGES, BLOCK_N, BLOCK_D], K_LAYOUT)
    item_slots = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    q_full = gl.allocate_shared_memory(gl.int64, [2 * CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2 * CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    item_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    item_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(2):
        mbarrier.init(item_full.index(i), count=1)
        mbarrier.init(item_empty.index(i), count=CONSUMERS)

    # The roles: each consumer in four warps, the producer in one. (Literal tuples: named ones lose their constants.)
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (
            out_desc, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty, item_slots,
            item_full, item_empty, out_ptr, stride_out_b, stride_out_t, stride_out_h, lse_ptr, stride_lse,
            low_ptr, high_ptr, stride_bounds_b, T, S, H, D, num_heads, q_offset, qk_scale,
            0, HEADS_PER_SWIZZLE, BOUNDS, CONSUMERS, BLOCK_N, BLOCK_D, STAGES, SUMS)),
            (consume, (
            out_desc, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty, item_slots,
            item_full, item_empty, out_ptr, stride_out_b, stride_out_t, stride_out_h, lse_ptr, stride_lse,
            low_ptr, high_ptr, stride_bounds_b, T, S, H, D, num_heads, q_offset, qk_scale,
            1, HEADS_PER_SWIZZLE, BOUNDS, CONSUMERS, BLOCK_N, BLOCK_D, STAGES, SUMS)),
            (produce, (
            q_desc, k_desc, v_desc, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty,
            item_slots, item_full, item_empty, counter_ptr, low_ptr, high_ptr, stride_bounds_b, T, S, H, num_heads,
            q_offset,
            GROUP, HEADS_PER_SWIZZLE, BOUNDS, CONSUMERS, BLOCK_N, STAGES))
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (
            out_desc, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty, item_slots,
            item_full, item_empty, out_ptr, stride_out_b, stride_out_t, stride_out_h, lse_ptr, stride_lse,
            low_ptr, high_ptr, stride_bounds_b, T, S, H, D, num_heads, q_offset, qk_scale,
            0, HEADS_PER_SWIZZLE, BOUNDS, CONSUMERS, BLOCK_N, BLOCK_D, STAGES, SUMS)),
            (consume, (
            out_desc, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty, item_slots,
            item_full, item_empty, out_ptr, stride_out_b, stride_out_t, stride_out_h, lse_ptr, stride_lse,
            low_ptr, high_ptr, stride_bounds_b, T, S, H, D, num_heads, q_offset, qk_scale,
            1, HEADS_PER_SWIZZLE, BOUNDS, CONSUMERS, BLOCK_N, BLOCK_D, STAGES, SUMS)),
            (consume, (
            out_desc, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty, item_slots,
            item_full, item_empty, out_ptr, stride_out_b, stride_out_t, stride_out_h, lse_ptr, stride_lse,
            low_ptr, high_ptr, stride_bounds_b, T, S, H, D, num_heads, q_offset, qk_scale,
            2, HEADS_PER_SWIZZLE, BOUNDS, CONSUMERS, BLOCK_N, BLOCK_D, STAGES, SUMS)),
            (produce, (
            q_desc, k_desc, v_desc, q_tiles, k_tiles, v_tiles, q_full, q_empty, k_full, k_empty, v_full, v_empty,
            item_slots, item_full, item_empty, counter_ptr, low_ptr, high_ptr, stride_bounds_b, T, S, H, num_heads,
            q_offset,
            GROUP, HEADS_PER_SWIZZLE, BOUNDS, CONSUMERS, BLOCK_N, STAGES))
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip
