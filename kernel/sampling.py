"""The likeliest or a drawn token of every row of scores, with its log-probability, in two launches.

The first cuts each row into pieces and leaves of each its maximum, where that is, and its sum of exponentials; the
second joins them, a program a row, and for a row that draws finds the piece and then the id at which the cumulative
distribution passes a given number: the inverse that llm/sampling.draw computes in several passes over all scores. A
row's result depends on that row alone. Sums are float32 inside a piece, float64 over pieces.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from configs.errors import UserError
from kernel.operator_inputs import FLOAT_DTYPES, is_interpreted

PIECE = 1024  # scores


@triton.jit
def piece_kernel(
    scores_ptr, slots_ptr, temperature_ptr, max_ptr, id_ptr, sum_ptr, stride_row, V, pieces, PIECE: tl.constexpr
):  # fmt: skip
    """One piece of one row."""
    row, piece = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperature_ptr + tl.load(slots_ptr + row))
    scale = 1.0 / tl.where(temperature == 0.0, 1.0, temperature)
    ids = piece * PIECE + tl.arange(0, PIECE)
    scores = tl.load(scores_ptr + row.to(tl.int64) * stride_row + ids, mask=ids < V, other=float("-inf"))
    scores = scores.to(tl.float32)
    highest = tl.max(scores, 0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    tl.store(max_ptr + row * pieces + piece, highest)
    tl.store(id_ptr + row * pieces + piece, tl.min(tl.where(scores == highest, ids, 2147483647), 0))
    tl.store(sum_ptr + row * pieces + piece, tl.sum(tl.exp((scores - shift) * scale), 0))


@triton.jit
def choose_kernel(
    scores_ptr, slots_ptr, temperature_ptr, uniforms_ptr, max_ptr, id_ptr, sum_ptr,
    last_ptr, packed_ptr, norm_ptr, stride_row, V, pieces,
    DRAWS: tl.constexpr, PIECE: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """One row: id, log-probability and a kept mass of 1 into packed (R, 3), the id into its slot's last token."""
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    temperature = tl.load(temperature_ptr + slot)
    scale = 1.0 / tl.where(temperature == 0.0, 1.0, temperature)
    offs_p = tl.arange(0, BLOCK_P)
    inside = offs_p < pieces
    maxima = tl.load(max_ptr + row * pieces + offs_p, mask=inside, other=float("-inf"))
    ids = tl.load(id_ptr + row * pieces + offs_p, mask=inside, other=2147483647)
    sums = tl.load(sum_ptr + row * pieces + offs_p, mask=inside, other=0.0)
    highest = tl.max(maxima, 0)
    sums = tl.where(sums > 0.0, sums * tl.exp((maxima - highest) * scale), 0.0).to(tl.float64)
    total = tl.sum(sums, 0)
    chosen = tl.min(tl.where(maxima == highest, ids, 2147483647), 0)
    score = highest
    scores_ptr += row.to(tl.int64) * stride_row
    if DRAWS:
        if temperature != 0.0:
            target = tl.load(uniforms_ptr + row) * total
            ends = tl.cumsum(sums, 0)
            passed = (ends > target) & (sums > 0.0)
            last = tl.max(tl.where(sums > 0.0, offs_p, 0), 0)
            piece = tl.minimum(tl.min(tl.where(passed, offs_p, BLOCK_P), 0), last)
            begin = tl.sum(tl.where(offs_p < piece, sums, 0.0), 0)
            offs_v = piece * PIECE + tl.arange(0, PIECE)
            scores = tl.load(scores_ptr + offs_v, mask=offs_v < V, other=float("-inf")).to(tl.float32)
            weights = tl.exp((scores - highest) * scale)
            cumulative = tl.cumsum(weights, 0)
            passed = (cumulative > (target - begin).to(tl.float32)) & (weights > 0.0)
            last = tl.max(tl.where(weights > 0.0, offs_v, 0), 0)
            chosen = tl.minimum(tl.min(tl.where(passed, offs_v, 2147483647), 0), last)
            score = tl.load(scores_ptr + chosen).to(tl.float32)
    log_total = tl.log(total.to(tl.float32))
    tl.store(last_ptr + slot, chosen.to(tl.int64))
    tl.store(packed_ptr + row * 3, chosen.to(tl.float64))
    tl.store(packed_ptr + row * 3 + 1, ((score - highest) * scale - log_total).to(tl.float64))
    tl.store(packed_ptr + row * 3 + 2, 1.0)
    tl.store(norm_ptr + row, highest * scale + log_total)


@dataclass(frozen=True)
class RowInputs:
    """What belongs to the R rows: slots (R,) int64, uniforms (R,) float64 in [0, 1); and of all slots, the
    temperatures (slots,) float32, 0 for the likeliest, and last_tokens (slots,) int64, which are written."""

    slots: Tensor
    uniforms: Tensor
    temperatures: Tensor
    last_tokens: Tensor


def choose_tokens(scores: Tensor, rows: RowInputs, draws: bool) -> tuple[Tensor, Tensor]:
    """scores (R, V) -> packed (R, 3) float64, id, log softmax(scores / temperature)[id], 1.0; and log_norms (R,).

    `draws` false: no row's temperature is above 0, which the caller knows. log_norms: logsumexp of the scaled scores.
    """
    if scores.dtype not in FLOAT_DTYPES or scores.stride(-1) != 1 or scores.numel() == 0:
        kind = f"scores {tuple(scores.shape)} {scores.dtype}, strides {scores.stride()}"
        raise UserError(f"{kind}: must be rows of bfloat16, float16 or float32; cast them or call .contiguous()")
    if not (scores.is_cuda or is_interpreted(piece_kernel)):
        raise UserError("choose_tokens needs a CUDA device; use llm.engine_sampling, or TRITON_INTERPRET=1")
    (R, V), device = scores.shape, scores.device
    pieces = triton.cdiv(V, PIECE)
    maxima, sums = torch.empty(2, R, pieces, dtype=torch.float32, device=device)
    ids = torch.empty(R, pieces, dtype=torch.int32, device=device)
    packed = torch.empty(R, 3, dtype=torch.float64, device=device)
    log_norms = torch.empty(R, dtype=torch.float32, device=device)
    piece_kernel[(R, pieces)](
        scores, rows.slots, rows.temperatures, maxima, ids, sums, scores.stride(0), V, pieces, PIECE=PIECE, num_warps=4
    )
    choose_kernel[(R,)](
        scores, rows.slots, rows.temperatures, rows.uniforms, maxima, ids, sums,
        rows.last_tokens, packed, log_norms, scores.stride(0), V, pieces,
        DRAWS=draws, PIECE=PIECE, BLOCK_P=triton.next_power_of_2(pieces), num_warps=4,
    )  # fmt: skip
    return packed, log_norms
