"""One token through a dense Transformer block: matrix-vector products with everything around them worked in.

At batch 1 a step reads each weight once and does two operations with it, so the memory's rate is the bound and every
launch, every gap between kernels, costs against it. Here a block is four kernels beside attention, and each of them
asks for its weights before it waits for the kernel in front of it (programmatic dependent launch, PDL): the next
weights are under way while the last sums are still being made. What a kernel writes, and what of others' it reads,
comes after the wait. Sums in float32; results are rounded where the model's own layers round.
C d_model, F d_ff, H heads, K kv heads, D head_dim, V vocab.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """From here on the kernels before are done; the one after may begin to load its weights."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def load_normed(x_ptr, norm_ptr, eps, C, kind, BLOCK_C: tl.constexpr):
    """RMSNorm of x (C,) as float32, rounded to `kind`'s dtype."""
    offs_c = tl.arange(0, BLOCK_C)
    x = tl.load(x_ptr + offs_c, mask=offs_c < C, other=0.0).to(tl.float32)
    scale = tl.load(norm_ptr + offs_c, mask=offs_c < C, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / C + eps)
    return (x * rstd * scale).to(kind.dtype).to(tl.float32)


@triton.jit
def load_rows(w_ptr, rows, bound, C, BLOCK_C: tl.constexpr):
    """Rows (n, C) of a weight as they are stored; rows from `bound` up are 0."""
    offs_c = tl.arange(0, BLOCK_C)
    inside = (rows < bound)[:, None] & (offs_c < C)[None, :]
    return tl.load(w_ptr + rows.to(tl.int64)[:, None] * C + offs_c[None, :], mask=inside, other=0.0)


@triton.jit
def start_kernel(
    rows_ptr, last_ptr, tables_ptr, embedding_ptr, stream_ptr, table_ptr, len_ptr, place_ptr,
    stride_rows, C, columns, PAGE_SIZE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """From (slot, length) the token's vector, its row of page numbers, its length as int32 and its place."""
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
    position = length - 1
    page = tl.load(tables_ptr + slot * columns + position // PAGE_SIZE).to(tl.int64)
    tl.store(len_ptr, length.to(tl.int32))
    tl.store(place_ptr, page * PAGE_SIZE + position % PAGE_SIZE)


@triton.jit
def norm_qkv_kernel(
    x_ptr, norm_ptr, w_ptr, bias_ptr, cos_ptr, sin_ptr, len_ptr, place_ptr, q_ptr, k_ptr, v_ptr, eps, C, H, K,
    D: tl.constexpr, BIAS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm, the joined projection ((H + 2K) D, C), RoPE; q (H, D) to a buffer, k and v to the token's place.

    A program makes BLOCK_P pairs (i, i + D/2) of one head.
    """
    parts = (D // 2) // BLOCK_P
    head, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    offs_i = part * BLOCK_P + tl.arange(0, BLOCK_P)
    rows = head * D + offs_i
    first = load_rows(w_ptr, rows, (H + 2 * K) * D, C, BLOCK_C)
    second = load_rows(w_ptr, rows + D // 2, (H + 2 * K) * D, C, BLOCK_C)
    wait_for_inputs(PDL)
    x = load_normed(x_ptr, norm_ptr, eps, C, first, BLOCK_C)
    a, b = tl.sum(first.to(tl.float32) * x[None, :], 1), tl.sum(second.to(tl.float32) * x[None, :], 1)
    if BIAS:
        a += tl.load(bias_ptr + rows).to(tl.float32)
        b += tl.load(bias_ptr + rows + D // 2).to(tl.float32)
    a, b = a.to(first.dtype).to(tl.float32), b.to(first.dtype).to(tl.float32)
    position = tl.load(len_ptr) - 1
    turns = head < H + K
    cos = tl.where(turns, tl.load(cos_ptr + position * (D // 2) + offs_i), 1.0)
    sin = tl.where(turns, tl.load(sin_ptr + position * (D // 2) + offs_i), 0.0)
    turned_a, turned_b = (a * cos - b * sin).to(first.dtype), (b * cos + a * sin).to(first.dtype)
    if head < H:
        tl.store(q_ptr + rows, turned_a)
        tl.store(q_ptr + rows + D // 2, turned_b)
    else:
        place = tl.load(place_ptr)
        if head < H + K:
            target = k_ptr + (place * K + head - H) * D + offs_i
            tl.store(target, turned_a)
            tl.store(target + D // 2, turned_b)
        else:
            target = v_ptr + (place * K + head - H - K) * D + offs_i
            tl.store(target, turned_a)
            tl.store(target + D // 2, turned_b)


@triton.jit
def add_matvec_kernel(
    x_ptr, w_ptr, stream_ptr, N, C, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """stream (N,) += w (N, C) x (C,), the product rounded before it is added."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_c = tl.arange(0, BLOCK_C)
    w_ptrs = w_ptr + rows.to(tl.int64)[:, None] * C + offs_c[None, :]
    w = tl.load(w_ptrs, mask=(rows < N)[:, None] & (offs_c < C)[None, :], other=0.0)
    wait_for_inputs(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    for start in range(0, C, BLOCK_C):
        x = tl.load(x_ptr + start + offs_c, mask=start + offs_c < C, other=0.0).to(tl.float32)
        current = w.to(tl.float32)
        ahead = (rows < N)[:, None] & (start + BLOCK_C + offs_c < C)[None, :]
        w = tl.load(w_ptrs + start + BLOCK_C, mask=ahead, other=0.0)
        acc += current * x[None, :]
    kind = stream_ptr.dtype.element_ty
    y = tl.sum(acc, 1).to(kind).to(tl.float32)
    stream = tl.load(stream_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)
    tl.store(stream_ptr + rows, (stream + y).to(kind), mask=rows < N)


@triton.jit
def norm_swiglu_kernel(
    x_ptr, norm_ptr, w_ptr, out_ptr, eps, C, F, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Norm, gate and up from their joined weight (2 F, C), and silu(gate) * up -> (F,)."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    gate_rows = load_rows(w_ptr, rows, F, C, BLOCK_C)
    up_rows = load_rows(w_ptr + F.to(tl.int64) * C, rows, F, C, BLOCK_C)
    wait_for_inputs(PDL)
    x = load_normed(x_ptr, norm_ptr, eps, C, gate_rows, BLOCK_C)
    gate = tl.sum(gate_rows.to(tl.float32) * x[None, :], 1).to(gate_rows.dtype).to(tl.float32)
    up = tl.sum(up_rows.to(tl.float32) * x[None, :], 1).to(gate_rows.dtype).to(tl.float32)
    tl.store(out_ptr + rows, (gate * tl.sigmoid(gate) * up).to(gate_rows.dtype), mask=rows < F)


@triton.jit
def norm_scores_kernel(
    x_ptr, norm_ptr, w_ptr, scores_ptr, eps, C, V, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """The last norm and the output layer (V, C) -> scores (V,), rounded as the layer rounds them."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w = load_rows(w_ptr, rows, V, C, BLOCK_C)
    wait_for_inputs(PDL)
    x = load_normed(x_ptr, norm_ptr, eps, C, w, BLOCK_C)
    tl.store(scores_ptr + rows, tl.sum(w.to(tl.float32) * x[None, :], 1).to(w.dtype), mask=rows < V)
