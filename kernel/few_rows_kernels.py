"""A few rows (2 to 64) through a dense Transformer block: what decoding a batch does between two attentions.

With so few rows a step still reads every weight once and the memory's rate is the bound; cuBLAS comes near it inside a
product, but a block is then ten kernels, and each of them begins with an idle memory. Here it is seven: products whose
programs own tiles of a weight's rows, or a share of their columns (`parts`, summed in float32 in a fixed order by the
kernel that reads them), a norm with the residual sum, and attention with RoPE and the cache. They overlap as those of
matvec_kernels do (programmatic dependent launch): before it waits for the kernel in front, attention asks for the keys
of earlier tokens and a norm for its weight. Results are rounded where the model's own layers round. M rows, for which
nothing is compiled anew, C inner width, N outer width, D head_dim, H heads, K kv heads.
"""

import triton
import triton.language as tl

from kernel.flash_attention_triton_forward import LOG2E
from kernel.matvec_kernels import place_of, wait_for_inputs


@triton.jit
def load_tile(ptr, rows, bound, offs_c, C, stride, EVEN: tl.constexpr):
    """(rows, columns) of a matrix; 0 beyond `bound` rows and C columns (EVEN: the columns are all there)."""
    inside = (rows < bound)[:, None]
    if not EVEN:
        inside = inside & (offs_c < C)[None, :]
    return tl.load(ptr + rows.to(tl.int64)[:, None] * stride + offs_c[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["M"])
def product_kernel(
    x_ptr, w_ptr, out_ptr, M, N, C,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, PARTS: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x (M, C) w (N, C)^T -> out (PARTS, M, N): sums over a share of the columns each, or the product itself."""
    part = tl.program_id(1)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m, offs_c = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_C)
    steps = tl.cdiv(C, BLOCK_C)
    begin, end = steps * part // PARTS, steps * (part + 1) // PARTS
    wait_for_inputs(PDL)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        columns = step * BLOCK_C + offs_c
        w = load_tile(w_ptr, offs_n, N, columns, C, C, EVEN)
        x = load_tile(x_ptr, offs_m, M, columns, C, C, EVEN)
        acc = tl.dot(w, x.T, acc, input_precision=PRECISION)
    out = out_ptr + (part * M + offs_m).to(tl.int64)[None, :] * N + offs_n[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(offs_m < M)[None, :] & (offs_n < N)[:, None])


@triton.jit(do_not_specialize=["M"])
def swiglu_product_kernel(
    x_ptr, w_ptr, out_ptr, M, N, C,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up -> out (M, N) with gate and up the two halves of x (M, C) w (2 N, C)^T."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m, offs_c = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_C)
    up_ptr = w_ptr + N.to(tl.int64) * C
    wait_for_inputs(PDL)
    gate = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.range(0, tl.cdiv(C, BLOCK_C), num_stages=STAGES):
        columns = step * BLOCK_C + offs_c
        gate_rows = load_tile(w_ptr, offs_n, N, columns, C, C, EVEN)
        up_rows = load_tile(up_ptr, offs_n, N, columns, C, C, EVEN)
        x = load_tile(x_ptr, offs_m, M, columns, C, C, EVEN).T
        gate = tl.dot(gate_rows, x, gate, input_precision=PRECISION)
        up = tl.dot(up_rows, x, up, input_precision=PRECISION)
    kind = out_ptr.dtype.element_ty
    gate, up = gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32)
    out = out_ptr + offs_m.to(tl.int64)[None, :] * N + offs_n[:, None]
    tl.store(out, (gate * tl.sigmoid(gate) * up).to(kind), mask=(offs_m < M)[None, :] & (offs_n < N)[:, None])


@triton.jit
def embed_kernel(rows_ptr, last_ptr, embedding_ptr, stream_ptr, C, BLOCK_C: tl.constexpr, PDL: tl.constexpr):
    """The vectors of the slots' last tokens -> stream (M, C)."""
    row = tl.program_id(0)
    wait_for_inputs(PDL)
    token = tl.load(last_ptr + tl.load(rows_ptr + row))
    offs_c = tl.arange(0, BLOCK_C)
    vector = tl.load(embedding_ptr + token * C + offs_c, mask=offs_c < C, other=0.0)
    tl.store(stream_ptr + row * C + offs_c, vector, mask=offs_c < C)


@triton.jit(do_not_specialize=["M"])
def sum_norm_kernel(
    parts_ptr, stream_ptr, norm_ptr, normed_ptr, eps, M, C,
    PARTS: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """stream (M, C) += the sum of parts (PARTS, M, C), rounded before it is added; normed (M, C) of it."""
    row, offs_c = tl.program_id(0), tl.arange(0, BLOCK_C)
    inside = offs_c < C
    scale = tl.load(norm_ptr + offs_c, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    kind = stream_ptr.dtype.element_ty
    x = tl.load(stream_ptr + row * C + offs_c, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        update = tl.load(parts_ptr + row * C + offs_c, mask=inside, other=0.0)
        for part in tl.static_range(1, PARTS):
            update += tl.load(parts_ptr + (part * M + row) * C + offs_c, mask=inside, other=0.0)
        x = (x + update.to(kind).to(tl.float32)).to(kind)
        tl.store(stream_ptr + row * C + offs_c, x, mask=inside)
        x = x.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / C + eps)
    tl.store(normed_ptr + row * C + offs_c, (x * rstd * scale).to(kind), mask=inside)


@triton.jit
def sum_parts(parts_ptr, bias_ptr, columns, mask, row, M, N, kind, PARTS: tl.constexpr, BIAS: tl.constexpr):
    """Columns of one row of the joined projection: the sum of parts (PARTS, M, N) and bias, rounded to `kind`."""
    total = tl.load(parts_ptr + row * N + columns, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts_ptr + (part * M + row) * N + columns, mask=mask, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    return total.to(kind).to(tl.float32)


@triton.jit
def load_keys(
    k_ptr, v_ptr, table_ptr, start, end, kv_head, K, D: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_S: tl.constexpr
):  # fmt: skip
    """Keys in halves (BLOCK_S, D/2) and values (BLOCK_S, D) of one kv head from position `start`; 0 from `end` on.

    `start` is a multiple of BLOCK_S: where a page holds a tile, one page number serves it.
    """
    HALF: tl.constexpr = D // 2
    offs_s, offs_i, offs_d = tl.arange(0, BLOCK_S), tl.arange(0, HALF), tl.arange(0, D)
    inside = (start + offs_s < end)[:, None]
    if PAGE_SIZE >= BLOCK_S:
        page = tl.load(table_ptr + start // PAGE_SIZE, mask=start < end, other=0).to(tl.int64)
        first_row = ((page * PAGE_SIZE + start % PAGE_SIZE) * K + kv_head) * D
        k_ptr += first_row
        v_ptr += first_row
        rows = (offs_s * K * D)[:, None]
    else:
        keys = start + offs_s
        pages = tl.load(table_ptr + keys // PAGE_SIZE, mask=keys < end, other=0).to(tl.int64)
        rows = (((pages * PAGE_SIZE + keys % PAGE_SIZE) * K + kv_head) * D)[:, None]
    first = tl.load(k_ptr + rows + offs_i[None, :], mask=inside, other=0.0)
    second = tl.load(k_ptr + rows + HALF + offs_i[None, :], mask=inside, other=0.0)
    return first, second, tl.load(v_ptr + rows + offs_d[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["M", "stride_rows"])
def rows_attend_kernel(
    parts_ptr, bias_ptr, cos_ptr, sin_ptr, rows_ptr, tables_ptr, k_ptr, v_ptr, out_ptr,
    scale, M, H, K, stride_rows, columns,
    D: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_S: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row and kv head: RoPE, the new key and value into their place, and its GROUP queries over the pages.

    Earlier tokens' keys are asked for before the wait; the newest is in registers and comes first.
    """
    HALF: tl.constexpr = D // 2
    kv_head, row = tl.program_id(0), tl.program_id(1)
    rows_ptr += row
    position, place = place_of(rows_ptr, tables_ptr, stride_rows, columns, PAGE_SIZE)
    table_ptr = tables_ptr + tl.load(rows_ptr) * columns
    offs_s, offs_i, offs_d = tl.arange(0, BLOCK_S), tl.arange(0, HALF), tl.arange(0, D)
    k_first, k_second, v = load_keys(k_ptr, v_ptr, table_ptr, 0, position, kv_head, K, D, PAGE_SIZE, BLOCK_S)
    cos, sin = tl.load(cos_ptr + position * HALF + offs_i), tl.load(sin_ptr + position * HALF + offs_i)
    wait_for_inputs(PDL)

    # The projection's columns: H heads of queries, K of keys, K of values.
    kind = k_ptr.dtype.element_ty
    N = (H + 2 * K) * D
    heads = tl.arange(0, BLOCK_G)
    real = (heads < GROUP)[:, None] & (offs_i < HALF)[None, :]
    q_columns = ((kv_head * GROUP + heads) * D)[:, None] + offs_i[None, :]
    a = sum_parts(parts_ptr, bias_ptr, q_columns, real, row, M, N, kind, PARTS, BIAS)
    b = sum_parts(parts_ptr, bias_ptr, q_columns + HALF, real, row, M, N, kind, PARTS, BIAS)
    q_first = (a * cos[None, :] - b * sin[None, :]).to(kind)
    q_second = (b * cos[None, :] + a * sin[None, :]).to(kind)
    k_columns = (H + kv_head) * D + offs_i
    a = sum_parts(parts_ptr, bias_ptr, k_columns, offs_i < HALF, row, M, N, kind, PARTS, BIAS)
    b = sum_parts(parts_ptr, bias_ptr, k_columns + HALF, offs_i < HALF, row, M, N, kind, PARTS, BIAS)
    new_first, new_second = (a * cos - b * sin).to(kind), (b * cos + a * sin).to(kind)
    v_columns = (H + K + kv_head) * D + offs_d
    new_v = sum_parts(parts_ptr, bias_ptr, v_columns, offs_d < D, row, M, N, kind, PARTS, BIAS)
    newest = (place * K + kv_head) * D
    tl.store(k_ptr + newest + offs_i, new_first)
    tl.store(k_ptr + newest + HALF + offs_i, new_second)
    tl.store(v_ptr + newest + offs_d, new_v.to(kind))

    # The online softmax begins with the newest key, whose weight is then 1.
    products = q_first.to(tl.float32) * new_first.to(tl.float32)[None, :]
    products += q_second.to(tl.float32) * new_second.to(tl.float32)[None, :]
    scale = scale * LOG2E
    row_max = tl.sum(products, 1) * scale
    row_sum = tl.full((BLOCK_G,), 1.0, tl.float32)
    acc = tl.zeros((BLOCK_G, D), tl.float32) + new_v[None, :]
    for start in range(0, position, BLOCK_S):
        scores = tl.dot(q_first, k_first.T, input_precision=PRECISION)
        scores = tl.dot(q_second, k_second.T, scores, input_precision=PRECISION) * scale  # (BLOCK_G, BLOCK_S)
        scores = tl.where((start + offs_s < position)[None, :], scores, float("-inf"))
        values = v
        ahead = start + BLOCK_S
        k_first, k_second, v = load_keys(k_ptr, v_ptr, table_ptr, ahead, position, kv_head, K, D, PAGE_SIZE, BLOCK_S)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        p, alpha = tl.exp2(scores - new_max[:, None]), tl.exp2(row_max - new_max)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(kind), values, acc * alpha[:, None], input_precision=PRECISION)
        row_max = new_max
    out = out_ptr + ((row * H + kv_head * GROUP + heads) * D)[:, None] + offs_d[None, :]
    tl.store(out, (acc / row_sum[:, None]).to(kind), mask=(heads < GROUP)[:, None])
