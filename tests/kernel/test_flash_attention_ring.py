"""What ring attention asks of the kernels: blocks of queries and keys at any offset, and parts joined by their lse."""

import math

import pytest
import torch

from kernel.flash_attention_triton import AttentionMask, flash_attention
from tests.kernel.attention_reference import causal_mask, dense_attention, outputs_and_gradients
from tests.kernel.decode_reference import relative_error
from tests.tolerances import FP32_GRADIENT, KERNEL_BF16_GRADIENT

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU tests below cover it")


def random_block(T: int, S: int, D: int, dtype=torch.float32, device="cpu") -> list[torch.Tensor]:
    """q, k, v, dout, dlse with four query heads on two kv heads."""
    shapes = [(2, T, 4, D), (2, S, 2, D), (2, S, 2, D), (2, T, 4, D)]
    return [*(torch.randn(shape, device=device).to(dtype) for shape in shapes), torch.randn(2, 4, T, device=device)]


def errors(attend, inputs, mask: torch.Tensor) -> list[float]:
    """Of out, lse, dq, dk, dv against dense attention in float64; where nothing is seen, zeros and -inf to the bit."""
    ours = outputs_and_gradients(attend, *inputs)
    exact = outputs_and_gradients(
        lambda q, k, v: dense_attention(q, k, v, mask.to(q.device)), *(x.double() for x in inputs)
    )
    unseen, unread = ~mask[0].any(1), ~mask[0].any(0)
    assert (ours[0][:, unseen] == 0).all() and (ours[1][..., unseen] == -math.inf).all()
    assert (ours[2][:, unseen] == 0).all() and (ours[3][:, unread] == 0).all() and (ours[4][:, unread] == 0).all()
    return [relative_error(x, reference) for x, reference in zip(ours, exact, strict=True)]


def merged(parts: list[slice], q_offset: int):
    """attend(q, k, v) over the keys in parts, each seen from the offset that its queries have to it."""

    def attend(q, k, v):
        results = [
            flash_attention(q, k[:, part], v[:, part], AttentionMask(q_offset=q_offset - part.start)) for part in parts
        ]
        lse = results[0][1]
        for _, part_lse in results[1:]:
            lse = torch.logaddexp(lse, part_lse)
        weights = [torch.exp(part_lse - lse).transpose(1, 2)[..., None] for _, part_lse in results]
        return sum(weight * out.float() for weight, (out, _) in zip(weights, results, strict=True)), lse

    return attend


@on_cpu
@pytest.mark.parametrize("offset", [-100, -33, -7, 0, 13, 19, 60])
def test_a_block_at_any_offset_matches_float64(offset):
    torch.manual_seed(0)
    inputs = random_block(33, 20, 32)
    attend = lambda q, k, v: flash_attention(q, k, v, AttentionMask(q_offset=offset))  # noqa: E731
    assert max(errors(attend, inputs, causal_mask(33, 20, offset))) < FP32_GRADIENT


@on_cpu
def test_parts_of_unequal_length_merge_to_the_whole_with_gradients_through_the_merge():
    torch.manual_seed(0)
    inputs = random_block(40, 70, 32)
    attend = merged([slice(0, 25), slice(25, 33), slice(33, 70)], 30)
    assert max(errors(attend, inputs, causal_mask(40, 70, 30))) < FP32_GRADIENT


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("offset", [-1000, -300, 0, 77, 512, 4000])
def test_gpu_blocks_at_any_offset_match_float64(offset, D):
    torch.manual_seed(0)
    inputs = random_block(512, 333, D, torch.bfloat16, "cuda")
    attend = lambda q, k, v: flash_attention(q, k, v, AttentionMask(q_offset=offset))  # noqa: E731
    assert max(errors(attend, inputs, causal_mask(512, 333, offset))) < KERNEL_BF16_GRADIENT


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
def test_gpu_parts_merge_to_the_whole(D):
    torch.manual_seed(0)
    inputs = random_block(512, 1024, D, torch.bfloat16, "cuda")
    attend = merged([slice(0, 512), slice(512, 700), slice(700, 1024)], 512)
    assert max(errors(attend, inputs, causal_mask(512, 1024, 512))) < KERNEL_BF16_GRADIENT
