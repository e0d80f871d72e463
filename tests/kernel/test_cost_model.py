"""The kernels' roofline against FLOPs counted by torch, bytes of real tensors, and counts by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernel.cost_model import (
    AttentionShape,
    KernelWork,
    Peaks,
    attention_backward,
    attention_decode,
    attention_forward,
    causal_pairs,
    document_pairs,
    exp_rate,
    predict,
)

H200 = Peaks(matmul_flops=798e12, exps=exp_rate(132, 1.755e9), memory_bytes=4.24e12)


def attention_tensors(shape: AttentionShape) -> list[torch.Tensor]:
    q = torch.zeros(shape.B, shape.T, shape.H, shape.D, dtype=torch.bfloat16)
    k = torch.zeros(shape.B, shape.S, shape.K, shape.D, dtype=torch.bfloat16)
    return [q, k, k.clone(), q.clone(), torch.zeros(shape.B, shape.H, shape.T)]  # q, k, v, out, lse


def test_forward_matches_torch_flop_counter_and_tensor_bytes():
    shape = AttentionShape(B=2, T=12, S=20, H=4, K=4, D=16)
    q, k, v, out, lse = attention_tensors(shape)
    with FlopCounterMode(display=False) as counter:
        scores = torch.einsum("bthd,bshd->bhts", q, k)
        torch.einsum("bhts,bshd->bthd", scores, v)
    work = attention_forward(shape)
    assert work.flops == counter.get_total_flops()
    assert work.exps == scores.numel()
    assert work.bytes == sum(x.nbytes for x in (q, k, v, out, lse))


def test_backward_is_five_products_and_reads_what_forward_kept():
    shape = AttentionShape(B=1, T=12, S=20, H=4, K=2, D=16)
    q, k, v, out, lse = attention_tensors(shape)
    work = attention_backward(shape)
    assert work.flops == 2.5 * attention_forward(shape).flops
    read, written = (q, k, v, out, out, lse), (q, k, v)
    assert work.bytes == sum(x.nbytes for x in read + written)


def test_pairs_match_a_mask_counted_up_to_the_diagonal():
    for T, S in ((64, 64), (16, 64)):
        mask = torch.ones(T, S, dtype=torch.bool).tril(S - T)
        assert mask.sum().item() - causal_pairs(T, S) == T / 2  # half the diagonal is not counted
    assert document_pairs([8, 24]) == causal_pairs(8, 8) + causal_pairs(24, 24)


def test_bound_is_the_busiest_unit():
    assert predict(KernelWork(1e12, 1, 1), H200).bound == "matmul"
    assert predict(KernelWork(1, 1e12, 1), H200).bound == "exp"
    memory = predict(KernelWork(1, 1, 4.24e12), H200)
    assert (memory.bound, memory.seconds) == ("memory", pytest.approx(1.0))


def test_known_cases_on_an_h200():
    train = AttentionShape(B=4, T=4096, S=4096, H=16, K=16, D=128)
    forward = predict(attention_forward(train, causal_pairs(4096, 4096)), H200)
    assert forward.bound == "matmul"
    assert forward.seconds == pytest.approx(4 * 4 * 16 * 4096**2 / 2 * 128 / 798e12)
    decode = predict(attention_decode(AttentionShape(B=64, T=1, S=8192, H=32, K=4, D=128)), H200)
    assert decode.bound == "memory"
    assert decode.seconds == pytest.approx(2 * 64 * 8192 * 4 * 128 * 2 / 4.24e12, rel=1e-2)


def test_decode_of_unequal_rows_reads_the_keys_that_there_are():
    shape = AttentionShape(B=3, T=2, S=40, H=8, K=2, D=16)
    whole, part = attention_decode(shape), attention_decode(shape, num_keys=40 + 7 + 0)
    assert attention_decode(shape, num_keys=120) == whole
    q, k, v, out, lse = attention_tensors(shape)
    assert whole.bytes == sum(x.nbytes for x in (q, k, v, out, lse))
    assert whole.bytes - part.bytes == (k.nbytes + v.nbytes) * (120 - 47) / 120
    assert part.flops == whole.flops * 47 / 120
