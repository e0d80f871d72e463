"""One token through a dense Transformer block: matrix-vector products with everything around them worked in.

At batch 1 a step reads each weight once and does two operations with it, so the memory's rate is the bound, and every
gap between kernels costs against it. Here a block is five kernels of one structure: a program owns tiles of whole rows
of a weight and has the next tile under way while it sums this one. The first tile is asked for before the kernel waits
for the one in front of it (programmatic dependent launch, PDL), so weights flow on while the last sums are made.
What may be read before the wait: weights, and what was on the device before the step began (`rows`: slot and length,
block tables, keys and values of earlier tokens). What other kernels of the step write is read after it, and all
that a kernel writes it writes after it. Sums in float32; results are rounded where the model's own layers round.
C d_model, F d_ff, H heads, K kv heads, D head_dim, V vocab.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernel.flash_attention_triton_forward import LOG2E


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """From here on the kernels before are done; the one after may begin to load its weights."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def load_rows(w_ptr, rows, bound, C, BLOCK_C: tl.constexpr):
    """Rows (n, C) of a weight as they are stored; rows from `bound` up are 0."""
    offs_c = tl.arange(0, BLOCK_C)
    inside = (rows < bound)[:, None] & (offs_c < C)[None, :]
    return tl.load(w_ptr + rows.to(tl.int64)[:, None] * C + offs_c[None, :], mask=inside, other=0.0)


@triton.jit
def load_vector(x_ptr, C, BLOCK_C: tl.constexpr):
    offs_c = tl.arange(0, BLOCK_C)
    return tl.load(x_ptr + offs_c, mask=offs_c < C, other=0.0).to(tl.float32)


@triton.jit
def normed(x, scale, eps, C, kind):
    """RMSNorm of x (C,) in float32, rounded to `kind`'s dtype."""
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / C + eps)
    return (x * rstd * scale).to(kind.dtype).to(tl.float32)


@triton.jit
def place_of(rows_ptr, tables_ptr, stride_rows, columns, PAGE_SIZE: tl.constexpr):
    """The token's position, and its place in the cache: page * page_size + offset."""
    position = tl.load(rows_ptr + stride_rows) - 1
    page = tl.load(tables_ptr + tl.load(rows_ptr) * columns + position // PAGE_SIZE).to(tl.int64)
    return position, page * PAGE_SIZE + position % PAGE_SIZE


@triton.jit
def start_kernel(
    rows_ptr, last_ptr, tables_ptr, embedding_ptr, stream_ptr, table_ptr, len_ptr, stride_rows, C, columns,
    BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """From (slot, length) the token's vector; and its row of page numbers and length, as flash_attention_decode reads
    them."""
    wait_for_inputs(PDL)
    slot, length = tl.load(rows_ptr), tl.load(rows_ptr + stride_rows)
    token = tl.load(last_ptr + slot)
    for start in range(0, C, BLOCK_C):
        offs_c = start + tl.arange(0, BLOCK_C)
        vector = tl.load(embedding_ptr + token * C + offs_c, mask=offs_c < C, other=0.0)
        tl.store(stream_ptr + offs_c, vector, mask=offs_c < C)
    for start in range(0, columns, BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)
        pages = tl.load(tables_ptr + slot * columns + offs_p, mask=offs_p < columns, other=0)
        tl.store(table_ptr + offs_p, pages, mask=offs_p < columns)
    tl.store(len_ptr, length.to(tl.int32))


@triton.jit
def norm_qkv_kernel(
    x_ptr, norm_ptr, w_ptr, bias_ptr, cos_ptr, sin_ptr, rows_ptr, tables_ptr, q_ptr, k_ptr, v_ptr,
    eps, C, H, K, stride_rows, columns,
    D: tl.constexpr, BIAS: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Norm, the joined projection ((H + 2K) D, C), RoPE; q (H, D) to a buffer, k and v to the token's place.

    A tile is BLOCK_P pairs (i, i + D/2) of one head.
    """
    HALF: tl.constexpr = D // 2
    parts = HALF // BLOCK_P
    tiles, bound = (H + 2 * K) * parts, (H + 2 * K) * D
    offs_p = tl.arange(0, BLOCK_P)
    tile = tl.program_id(0)
    rows = (tile // parts) * D + (tile % parts) * BLOCK_P + offs_p
    first, second = load_rows(w_ptr, rows, bound, C, BLOCK_C), load_rows(w_ptr, rows + HALF, bound, C, BLOCK_C)
    scale = load_vector(norm_ptr, C, BLOCK_C)
    position, place = place_of(rows_ptr, tables_ptr, stride_rows, columns, PAGE_SIZE)
    wait_for_inputs(PDL)
    x = normed(load_vector(x_ptr, C, BLOCK_C), scale, eps, C, first)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        head, offs_i = tile // parts, (tile % parts) * BLOCK_P + offs_p
        ahead = tile + tl.num_programs(0)
        next_rows = (ahead // parts) * D + (ahead % parts) * BLOCK_P + offs_p
        this_first, this_second = first.to(tl.float32), second.to(tl.float32)
        first = load_rows(w_ptr, next_rows, bound, C, BLOCK_C)
        second = load_rows(w_ptr, next_rows + HALF, bound, C, BLOCK_C)
        a, b = tl.sum(this_first * x[None, :], 1), tl.sum(this_second * x[None, :], 1)
        rows = head * D + offs_i
        if BIAS:
            a += tl.load(bias_ptr + rows).to(tl.float32)
            b += tl.load(bias_ptr + rows + HALF).to(tl.float32)
        kind = q_ptr.dtype.element_ty
        a, b = a.to(kind).to(tl.float32), b.to(kind).to(tl.float32)
        turns = head < H + K
        cos = tl.where(turns, tl.load(cos_ptr + position * HALF + offs_i), 1.0)
        sin = tl.where(turns, tl.load(sin_ptr + position * HALF + offs_i), 0.0)
        turned_a, turned_b = (a * cos - b * sin).to(kind), (b * cos + a * sin).to(kind)
        if head < H:
            tl.store(q_ptr + rows, turned_a)
            tl.store(q_ptr + rows + HALF, turned_b)
        elif head < H + K:
            tl.store(k_ptr + (place * K + head - H) * D + offs_i, turned_a)
            tl.store(k_ptr + (place * K + head - H) * D + offs_i + HALF, turned_b)
        else:
            tl.store(v_ptr + (place * K + head - H - K) * D + offs_i, turned_a)
            tl.store(v_ptr + (place * K + head - H - K) * D + offs_i + HALF, turned_b)


@triton.jit
def load_keys(k_ptr, v_ptr, table_ptr, keys, end, kv_head, K, D: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Keys and values (n, D) of one kv head at positions `keys` below `end`; 0 beyond."""
    inside = keys < end
    pages = tl.load(table_ptr + keys // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
    offsets = (((pages * PAGE_SIZE + keys % PAGE_SIZE) * K + kv_head) * D)[:, None] + tl.arange(0, D)[None, :]
    k = tl.load(k_ptr + offsets, mask=inside[:, None], other=0.0)
    return k, tl.load(v_ptr + offsets, mask=inside[:, None], other=0.0)


@triton.jit
def attend_kernel(
    q_ptr, k_ptr, v_ptr, rows_ptr, tables_ptr, out_ptr, scale, H, K, stride_rows, columns,
    D: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One query head over the pages; meant for short sequences, which one program reads as fast as many.

    Earlier tokens' keys are asked for before the wait; the newest, which the kernel in front writes, comes last.
    """
    head = tl.program_id(0)
    kv_head = head // (H // K)
    position, place = place_of(rows_ptr, tables_ptr, stride_rows, columns, PAGE_SIZE)
    table_ptr = tables_ptr + tl.load(rows_ptr) * columns
    offs_s, offs_d = tl.arange(0, BLOCK_S), tl.arange(0, D)
    k, v = load_keys(k_ptr, v_ptr, table_ptr, offs_s, position, kv_head, K, D, PAGE_SIZE)
    wait_for_inputs(PDL)
    q = tl.load(q_ptr + head * D + offs_d).to(tl.float32) * (scale * LOG2E)
    newest = (place * K + kv_head) * D + offs_d
    row_max = tl.sum(tl.load(k_ptr + newest).to(tl.float32) * q, 0)
    acc = tl.load(v_ptr + newest).to(tl.float32)
    row_sum = 1.0
    for start in range(0, position, BLOCK_S):
        scores = tl.sum(k.to(tl.float32) * q[None, :], 1)
        scores = tl.where(start + offs_s < position, scores, float("-inf"))
        values = v.to(tl.float32)
        k, v = load_keys(k_ptr, v_ptr, table_ptr, start + BLOCK_S + offs_s, position, kv_head, K, D, PAGE_SIZE)
        new_max = tl.maximum(row_max, tl.max(scores, 0))
        p, alpha = tl.exp2(scores - new_max), tl.exp2(row_max - new_max)
        row_sum = row_sum * alpha + tl.sum(p, 0)
        acc = acc * alpha + tl.sum(p[:, None] * values, 0)
        row_max = new_max
    tl.store(out_ptr + head * D + offs_d, (acc / row_sum).to(out_ptr.dtype.element_ty))


@triton.jit
def add_matvec_kernel(
    x_ptr, w_ptr, stream_ptr, N, C, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """stream (N,) += w (N, C) x (C,), the product rounded before it is added."""
    offs_n, step = tl.arange(0, BLOCK_N), tl.num_programs(0) * BLOCK_N
    w = load_rows(w_ptr, tl.program_id(0) * BLOCK_N + offs_n, N, C, BLOCK_C)
    wait_for_inputs(PDL)
    x = load_vector(x_ptr, C, BLOCK_C)
    kind = stream_ptr.dtype.element_ty
    for start in range(tl.program_id(0) * BLOCK_N, N, step):
        rows = start + offs_n
        current = w.to(tl.float32)
        w = load_rows(w_ptr, rows + step, N, C, BLOCK_C)
        stream = tl.load(stream_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)
        y = tl.sum(current * x[None, :], 1).to(kind).to(tl.float32)
        tl.store(stream_ptr + rows, (stream + y).to(kind), mask=rows < N)


@triton.jit
def norm_swiglu_kernel(
    x_ptr, norm_ptr, w_ptr, out_ptr, eps, C, F, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Norm, gate and up from their joined weight (2 F, C), and silu(gate) * up -> (F,)."""
    offs_n, step = tl.arange(0, BLOCK_N), tl.num_programs(0) * BLOCK_N
    up_ptr = w_ptr + F * C
    rows = tl.program_id(0) * BLOCK_N + offs_n
    gate_rows, up_rows = load_rows(w_ptr, rows, F, C, BLOCK_C), load_rows(up_ptr, rows, F, C, BLOCK_C)
    scale = load_vector(norm_ptr, C, BLOCK_C)
    wait_for_inputs(PDL)
    x = normed(load_vector(x_ptr, C, BLOCK_C), scale, eps, C, gate_rows)
    kind = out_ptr.dtype.element_ty
    for start in range(tl.program_id(0) * BLOCK_N, F, step):
        rows = start + offs_n
        this_gate, this_up = gate_rows.to(tl.float32), up_rows.to(tl.float32)
        gate_rows = load_rows(w_ptr, rows + step, F, C, BLOCK_C)
        up_rows = load_rows(up_ptr, rows + step, F, C, BLOCK_C)
        gate = tl.sum(this_gate * x[None, :], 1).to(kind).to(tl.float32)
        up = tl.sum(this_up * x[None, :], 1).to(kind).to(tl.float32)
        tl.store(out_ptr + rows, (gate * tl.sigmoid(gate) * up).to(kind), mask=rows < F)


@triton.jit
def norm_scores_kernel(
    x_ptr, norm_ptr, w_ptr, scores_ptr, eps, C, V, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """The last norm and the output layer (V, C) -> scores (V,), rounded as the layer rounds them."""
    offs_n, step = tl.arange(0, BLOCK_N), tl.num_programs(0) * BLOCK_N
    w = load_rows(w_ptr, tl.program_id(0) * BLOCK_N + offs_n, V, C, BLOCK_C)
    scale = load_vector(norm_ptr, C, BLOCK_C)
    wait_for_inputs(PDL)
    x = normed(load_vector(x_ptr, C, BLOCK_C), scale, eps, C, w)
    for start in range(tl.program_id(0) * BLOCK_N, V, step):
        rows = start + offs_n
        current = w.to(tl.float32)
        w = load_rows(w_ptr, rows + step, V, C, BLOCK_C)
        tl.store(scores_ptr + rows, tl.sum(current * x[None, :], 1).to(scores_ptr.dtype.element_ty), mask=rows < V)
