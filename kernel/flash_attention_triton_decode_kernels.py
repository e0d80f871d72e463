"""The decode kernels: a few new queries against a long cache, the keys cut into chunks that run side by side.

Flash-decoding (Dao, Haziza, Massa, Sizov 2023). The query heads of one kv head and the T new tokens are the rows of one
tile, so that keys and values are read once. What differs: the grid does not know the lengths, which stay on the device.
Every program derives the same plan from them, chunks of about one size over all sequences together, and takes the
chunk of its number; so unequal batches balance, and a captured CUDA graph serves any lengths. `merge_kernel` joins the
chunks of a sequence by their lse. Keys past a sequence's length are never read, nor are the pages that hold none.
"""

import triton
import triton.language as tl

from kernel.flash_attention_triton_forward import LOG2E, soften_scores


@triton.jit
def plan_chunks(
    lens_ptr, B, T, max_length, window, num_chunks, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK_TILES: tl.constexpr
):  # fmt: skip
    """Of each sequence: its length, its chunks and the chunks of all up to it; at most num_chunks + B in sum.

    With CHUNK_TILES a chunk has so many tiles, whatever the other sequences are.
    """
    rows = tl.arange(0, BLOCK_B)
    lengths = tl.load(lens_ptr + rows, mask=rows < B, other=0).to(tl.int32)
    lengths = tl.minimum(tl.maximum(lengths, 0), max_length)
    tiles = tl.cdiv(lengths, BLOCK_N) - first_tile(lengths, T, window, BLOCK_N, WINDOW)
    if CHUNK_TILES > 0:
        chunk_tiles = CHUNK_TILES
    else:
        chunk_tiles = tl.maximum(tl.cdiv(tl.sum(tiles, 0), num_chunks), 1)
    chunks = tl.cdiv(tiles, chunk_tiles)
    return lengths, chunks, tl.cumsum(chunks, 0)


@triton.jit
def first_tile(length, T, window, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """The first tile of keys that any of the last T queries sees."""
    if WINDOW:
        return tl.maximum(length - T + 1 - window, 0) // BLOCK_N
    return length * 0


@triton.jit
def load_pages(start, length, table_ptr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The pages that hold the tile of keys from `start`: one for all where a page holds the tile, else one a key."""
    if PAGE_SIZE >= BLOCK_N:
        pages = tl.load(table_ptr + start // PAGE_SIZE, mask=start < length, other=0)
    else:
        keys = start + tl.arange(0, BLOCK_N)
        pages = tl.load(table_ptr + keys // PAGE_SIZE, mask=keys < length, other=0)
    return pages


@triton.jit(do_not_specialize=["B", "T", "max_length", "window", "num_chunks"])
def split_kernel(
    q_ptr, k_ptr, v_ptr, lens_ptr, table_ptr, out_ptr, lse_ptr, part_ptr, part_lse_ptr,
    stride_q_b, stride_q_t, stride_q_h, stride_page, stride_key, stride_head, stride_table,
    B, T, H, D, max_length, window, num_chunks, qk_scale, softcap,
    GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr, CHUNK_TILES: tl.constexpr,
):  # fmt: skip
    # Which chunk of which sequence; a sequence's tiles are dealt out to its chunks as evenly as they go.
    item = tl.program_id(1)
    if WHOLE:
        batch, count = item, 1
        length = tl.minimum(tl.maximum(tl.load(lens_ptr + batch).to(tl.int32), 0), max_length)
        begin, end = first_tile(length, T, window, BLOCK_N, WINDOW), tl.cdiv(length, BLOCK_N)
    else:
        lengths, chunks, ends = plan_chunks(
            lens_ptr, B, T, max_length, window, num_chunks, BLOCK_B, BLOCK_N, WINDOW, CHUNK_TILES
        )
        batch = tl.sum((ends <= item).to(tl.int32), 0)
        if batch >= B:
            return
        mine = tl.arange(0, BLOCK_B) == batch
        length, count = tl.sum(tl.where(mine, lengths, 0), 0), tl.sum(tl.where(mine, chunks, 0), 0)
        chunk = item - (tl.sum(tl.where(mine, ends, 0), 0) - count)
        skipped = first_tile(length, T, window, BLOCK_N, WINDOW)
        tiles = tl.cdiv(length, BLOCK_N) - skipped
        begin, end = skipped + tiles * chunk // count, skipped + tiles * (chunk + 1) // count

    # Rows: the query heads of one kv head, token after token; more than BLOCK_M take several programs.
    rows_in_all = T * GROUP
    row_blocks = tl.cdiv(rows_in_all, BLOCK_M)
    kv_head, row_block = tl.program_id(0) // row_blocks, tl.program_id(0) % row_blocks
    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens, heads = rows // GROUP, kv_head * GROUP + rows % GROUP
    positions = length - T + tokens
    dims = tl.arange(0, BLOCK_D)
    valid = (rows < rows_in_all)[:, None] & (dims < D)[None, :]
    q_offsets = (tokens * stride_q_t + heads * stride_q_h)[:, None] + dims[None, :]
    q = tl.load(q_ptr + batch.to(tl.int64) * stride_q_b + q_offsets, mask=valid, other=0.0)

    # The online softmax of flash_attention_triton_forward over the chunk's tiles.
    if PAGE_SIZE == 0:
        k_ptr += batch.to(tl.int64) * stride_page
        v_ptr += batch.to(tl.int64) * stride_page
    k_ptr += kv_head.to(tl.int64) * stride_head
    v_ptr += kv_head.to(tl.int64) * stride_head
    table_ptr += batch.to(tl.int64) * stride_table
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    scale = 1.0 if SOFTCAP else qk_scale
    if PAGE_SIZE > 0:
        pages = load_pages(begin * BLOCK_N, length, table_ptr, PAGE_SIZE, BLOCK_N)
    for tile in tl.range(begin, end, num_stages=STAGES):
        keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = keys < length
        if PAGE_SIZE == 0:
            offsets = keys.to(tl.int64) * stride_key
        else:  # the next tile's pages are asked for a turn ahead, or every load would wait for them
            offsets = pages.to(tl.int64) * stride_page + (keys % PAGE_SIZE) * stride_key
            pages = load_pages((tile + 1) * BLOCK_N, length, table_ptr, PAGE_SIZE, BLOCK_N)
        offsets = offsets[:, None] + dims[None, :]
        stored = inside[:, None] & (dims < D)[None, :]  # what lies behind may be nan, and 0 * nan is no 0
        k = tl.load(k_ptr + offsets, mask=stored, other=0.0)
        scores = tl.dot(q, k.T, input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
        if SOFTCAP:
            scores, _ = soften_scores(scores, qk_scale, softcap)
        seen = inside[None, :] & (keys[None, :] <= positions[:, None])
        if WINDOW:
            seen = seen & (keys[None, :] > positions[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(scores * scale - shift[:, None])
        alpha = tl.exp2(row_max - shift)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = tl.load(v_ptr + offsets, mask=stored, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        row_max = new_max

    # A sequence of one chunk is done; of the others the parts are kept, normalised, with lse in log2 units.
    empty = row_sum == 0.0
    divisor = tl.where(empty, 1.0, row_sum)
    acc = acc * (1.0 / divisor)[:, None]
    lse2 = tl.where(empty, float("-inf"), row_max + tl.log2(divisor))
    if count == 1:
        out_rows = (batch.to(tl.int64) * T + tokens) * H + heads
        tl.store(out_ptr + out_rows[:, None] * D + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=valid)
        tl.store(lse_ptr + (batch.to(tl.int64) * H + heads) * T + tokens, lse2 / LOG2E, mask=rows < rows_in_all)
    else:
        part_rows = (item.to(tl.int64) * T + tokens) * H + heads
        tl.store(part_ptr + part_rows[:, None] * D + dims[None, :], acc, mask=valid)
        tl.store(part_lse_ptr + part_rows, lse2, mask=rows < rows_in_all)


@triton.jit(do_not_specialize=["B", "T", "max_length", "window", "num_chunks"])
def merge_kernel(
    lens_ptr, part_ptr, part_lse_ptr, out_ptr, lse_ptr, B, T, H, D, max_length, window, num_chunks,
    WINDOW: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK_TILES: tl.constexpr,
):  # fmt: skip
    """One query row of one sequence: out = sum 2^(lse_c - lse) out_c over its chunks c; no keys: out 0, lse -inf."""
    row, batch = tl.program_id(0), tl.program_id(1)
    _, chunks, ends = plan_chunks(lens_ptr, B, T, max_length, window, num_chunks, BLOCK_B, BLOCK_N, WINDOW, CHUNK_TILES)
    mine = tl.arange(0, BLOCK_B) == batch
    count, last = tl.sum(tl.where(mine, chunks, 0), 0), tl.sum(tl.where(mine, ends, 0), 0)
    if count == 1:
        return
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    highest = float("-inf")
    weight_sum = 0.0
    for start in range(last - count, last, BLOCK_C):
        items = start + tl.arange(0, BLOCK_C)
        part_rows = items.to(tl.int64) * T * H + row
        lse2 = tl.load(part_lse_ptr + part_rows, mask=items < last, other=float("-inf"))
        valid = (items < last)[:, None] & (dims < D)[None, :]
        parts = tl.load(part_ptr + part_rows[:, None] * D + dims[None, :], mask=valid, other=0.0)
        new_highest = tl.maximum(highest, tl.max(lse2, 0))
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(lse2 - shift)
        alpha = tl.exp2(highest - shift)
        weight_sum = weight_sum * alpha + tl.sum(weights, 0)
        acc = acc * alpha + tl.sum(weights[:, None] * parts, 0)
        highest = new_highest
    divisor = tl.where(weight_sum == 0.0, 1.0, weight_sum)
    out_row = batch.to(tl.int64) * T * H + row
    tl.store(out_ptr + out_row * D + dims, (acc / divisor).to(out_ptr.dtype.element_ty), mask=dims < D)
    token, head = row // H, row % H
    lse = tl.where(weight_sum == 0.0, float("-inf"), (highest + tl.log2(divisor)) / LOG2E)
    tl.store(lse_ptr + (batch.to(tl.int64) * H + head) * T + token, lse)
