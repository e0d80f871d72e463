"""Kernels as blocks of a ring, played on one device: out, lse, dq, dk, dv beside float64, masks included."""

import math

import pytest
import torch

from bench_mark.bench_mark_cp_simulation import simulated_ring
from llm.transformer_context import document_starts
from parallel.context_parallel_blocks import Rows
from tests.kernel.attention_reference import dense_attention
from tests.kernel.decode_reference import relative_error
from tests.tolerances import FP32_GRADIENT, FP64, KERNEL_BF16_GRADIENT

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU tests below cover it")


def document_intervals(num_tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Documents of unequal lengths in two rows, causal; in the second row the first tokens see nothing."""
    columns = torch.arange(num_tokens, dtype=torch.int32, device=device)
    doc_ids = torch.stack((columns // 7, columns // (num_tokens // 3)))
    low, high = document_starts(doc_ids), (columns + 1).repeat(2, 1)
    low[1, : num_tokens // 8] = high[1, : num_tokens // 8] = 0
    return low, high


def errors(
    num_tokens: int, ranks: int, documents: bool, dtype: torch.dtype, device: str, backend: str = "triton"
) -> list[float]:
    torch.manual_seed(0)
    shapes = [(2, num_tokens, 4, 64), (2, num_tokens, 2, 64), (2, num_tokens, 2, 64), (2, num_tokens, 4, 64)]
    q, k, v, dout = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    intervals = document_intervals(num_tokens, device) if documents else None
    ring = simulated_ring(num_tokens, ranks, backend, torch.device(device), intervals)
    shares = [ring.cut(x) for x in (q, k, v)]
    results = ring.forward(*shares)
    rows = [Rows(out, lse, share) for (out, lse), share in zip(results, ring.cut(dout), strict=True)]
    ours = [ring.join([out for out, _ in results]), ring.join([lse for _, lse in results], dim=2)]
    ours += [ring.join(gradients) for gradients in ring.backward(*shares, rows)]
    keys = torch.arange(num_tokens, device=device)
    low, high = intervals if documents else (torch.zeros_like(keys)[None], keys[None] + 1)
    mask = (keys >= low[..., None]) & (keys < high[..., None])
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = dense_attention(*exact, mask)
    wanted = [out.detach(), lse.detach(), *torch.autograd.grad(out, exact, dout.double())]
    hidden = wanted[1] == -math.inf
    assert torch.equal(ours[1] == -math.inf, hidden) and hidden.any() == documents
    ours[1], wanted[1] = ours[1].masked_fill(hidden, 0.0), wanted[1].masked_fill(hidden, 0.0)
    return [relative_error(x, reference) for x, reference in zip(ours, wanted, strict=True)]


@on_cpu
@pytest.mark.parametrize(("ranks", "documents"), [(2, False), (3, True)])
def test_blocks_of_a_ring_match_float64(ranks, documents):
    assert max(errors(48, ranks, documents, torch.float32, "cpu")) < FP32_GRADIENT


@pytest.mark.parametrize(("ranks", "documents"), [(2, False), (3, True), (4, True)])
@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float64, FP64), (torch.float32, FP32_GRADIENT), (torch.bfloat16, KERNEL_BF16_GRADIENT)]
)
def test_blocks_of_torchs_cpu_kernel_match_float64(ranks, documents, dtype, error):
    assert max(errors(48, ranks, documents, dtype, "cpu", "sdpa")) < error


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("documents", [False, True])
def test_gpu_blocks_of_a_ring_match_float64(ranks, documents):
    assert max(errors(2048, ranks, documents, torch.bfloat16, "cuda")) < KERNEL_BF16_GRADIENT
