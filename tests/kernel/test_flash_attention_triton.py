"""The Triton kernels against dense attention in float64: in the interpreter without a GPU, the full grid with one."""

import math

import pytest
import torch

from configs.errors import UserError
from kernel.flash_attention_ranges import cu_seqlens_ranges, document_ranges, offset_ranges
from kernel.flash_attention_triton import AttentionMask, flash_attention
from tests.kernel.attention_reference import causal_mask, dense_attention, outputs_and_gradients, packed_mask
from tests.tolerances import FP32_GRADIENT

LENGTHS = [30, 1, 44, 25]  # of documents, 100 tokens
NAMES = ["out", "lse", "dq", "dk", "dv"]


def document_ids() -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None].int()


def cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


CASES = {
    "causal": (AttentionMask(), causal_mask(100, 100, 0)),
    "more keys": (AttentionMask(), causal_mask(70, 100, 30)),
    "rows without keys": (AttentionMask(), causal_mask(100, 40, -60)),
    "ring block seen whole": (AttentionMask(q_offset=100), causal_mask(100, 70, 100)),
    "no mask": (AttentionMask(causal=False), causal_mask(70, 100, 0, causal=False)),
    "window": (AttentionMask(window=17), causal_mask(70, 100, 30, 17)),
    "documents": (AttentionMask(doc_ids=document_ids()), packed_mask(LENGTHS)),
    "documents both ways": (AttentionMask(doc_ids=document_ids(), causal=False), packed_mask(LENGTHS, causal=False)),
    "sequences": (
        AttentionMask(cu_seqlens_q=cumulative([30, 0, 40]), cu_seqlens_k=cumulative([30, 20, 50])),
        packed_mask([30, 0, 40], [30, 20, 50]),
    ),
}


def random_inputs(shape: tuple[int, int, int], heads: tuple[int, int], D: int, dtype: torch.dtype, device="cpu"):
    """q, k, v, dout and dlse of (B, T, S) and (H, K)."""
    (B, T, S), (H, K) = shape, heads
    sizes = [(B, T, H, D), (B, S, K, D), (B, S, K, D), (B, T, H, D)]
    tensors = [torch.randn(size, device=device).to(dtype) for size in sizes]
    return [*tensors, torch.randn(B, H, T, device=device)]


def relative_error(x: torch.Tensor, exact: torch.Tensor) -> float:
    finite = exact.isfinite()
    assert torch.equal(x.isfinite(), finite)
    return ((x.double() - exact)[finite].norm() / exact[finite].norm().clamp_min(1e-30)).item()


def kernel_and_exact(inputs, mask, dense_mask, softcap=0.0, deterministic=False, scale=None):
    """The five results of the kernel and of float64 on the same inputs."""
    ours = outputs_and_gradients(lambda q, k, v: flash_attention(q, k, v, mask, scale, softcap, deterministic), *inputs)
    exact = outputs_and_gradients(
        lambda q, k, v: dense_attention(q, k, v, dense_mask.to(q.device), scale, softcap), *[x.double() for x in inputs]
    )
    return ours, exact


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU grid below covers it")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernels_match_float64(name, deterministic):
    mask, dense_mask = CASES[name]
    torch.manual_seed(0)
    inputs = random_inputs((1, *dense_mask.shape[1:]), (4, 2), 32, torch.float32)
    ours, exact = kernel_and_exact(inputs, mask, dense_mask, deterministic=deterministic)
    for label, x, reference in zip(NAMES, ours, exact, strict=True):
        assert relative_error(x, reference) < FP32_GRADIENT, label
    unseen = ~dense_mask[0].any(-1)
    assert (ours[0][:, unseen] == 0).all() and (ours[1][..., unseen] == -math.inf).all()
    assert (ours[2][:, unseen] == 0).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU grid below covers it")
@pytest.mark.parametrize("D", [64, 80, 96, 128, 256])
def test_interpreted_kernels_match_float64_with_softcap(D):
    torch.manual_seed(0)
    inputs = random_inputs((2, 40, 40), (2, 1), D, torch.float32)
    ours, exact = kernel_and_exact(inputs, AttentionMask(), causal_mask(40, 40, 0), softcap=2.0, scale=0.3)
    for label, x, reference in zip(NAMES, ours, exact, strict=True):
        assert relative_error(x, reference) < FP32_GRADIENT, label


def test_packed_layout_and_operator_registration():
    if torch.cuda.is_available():
        pytest.skip("the GPU grid covers it")
    torch.manual_seed(0)
    q, k, v, _, _ = random_inputs((1, 40, 40), (2, 1), 32, torch.float32)
    mask = AttentionMask(cu_seqlens_q=cumulative([15, 25]))
    out, lse = flash_attention(q[0], k[0], v[0], mask)
    batched, batched_lse = flash_attention(q, k, v, mask)
    assert torch.equal(out, batched[0]) and torch.equal(lse, batched_lse)
    from kernel.flash_attention_triton import flash_attention_forward

    inputs = [x.requires_grad_() for x in (q, k, v)]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(flash_attention_forward, (*inputs, [], [1, 0, 1], [0.2, 0.0]), test_utils=tests)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU grid covers it")
@pytest.mark.parametrize("used", [(True, False), (False, True), (True, True)], ids=["out", "lse", "both"])
def test_eager_calls_match_float64_whichever_result_has_a_gradient(used):
    torch.manual_seed(0)
    *tensors, dout, dlse = random_inputs((1, 40, 40), (2, 1), 32, torch.float32)
    tensors = [x.requires_grad_() for x in tensors]

    def gradients(results, inputs):
        chosen = [(x, grad) for x, grad, use in zip(results, (dout, dlse), used, strict=True) if use]
        loss = sum((x * grad.to(x.dtype)).sum() for x, grad in chosen)
        return torch.autograd.grad(loss, inputs, allow_unused=True)

    precise = [x.detach().double().requires_grad_() for x in tensors]
    exact = gradients(dense_attention(*precise, causal_mask(40, 40, 0)), precise)
    for x, reference in zip(gradients(flash_attention(*tensors), tensors), exact, strict=True):
        if reference is None:
            assert (x == 0).all()  # dv of lse
        else:
            assert relative_error(x, reference) < FP32_GRADIENT


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU grid covers it")
def test_operator_and_eager_call_agree_and_fake_tensors_go_through_the_operator():
    from torch._subclasses.fake_tensor import FakeTensorMode

    from kernel.flash_attention_triton import flash_attention_forward

    torch.manual_seed(0)
    inputs = random_inputs((1, 40, 40), (2, 1), 32, torch.float32)
    eager = outputs_and_gradients(lambda q, k, v: flash_attention(q, k, v, scale=0.3), *inputs)
    operator = outputs_and_gradients(
        lambda q, k, v: flash_attention_forward(q, k, v, [], [1, 0, 0], [0.3, 0.0]), *inputs
    )
    for x, y in zip(eager, operator, strict=True):
        assert torch.allclose(x, y, atol=1e-5)  # the order of dQ's sums may differ
    with FakeTensorMode():
        fakes = [torch.empty(1, 40, heads, 32) for heads in (2, 1, 1)]
        out, lse = flash_attention(*fakes)
    assert out.shape == (1, 40, 2, 32) and lse.shape == (1, 2, 40)


def bad_inputs():
    q, k = torch.randn(1, 8, 4, 32), torch.randn(1, 8, 2, 32)
    yield "head_dim=48", (torch.randn(1, 8, 4, 48),) * 3
    yield "must divide", (q, torch.randn(1, 8, 3, 32), torch.randn(1, 8, 3, 32))
    yield "dtypes", (q, k.half(), k)
    yield "one shape", (q, k, k[:, :4])
    yield "agree", (q, k.repeat(2, 1, 1, 1), k.repeat(2, 1, 1, 1))
    yield "contiguous", (torch.randn(1, 8, 32, 4).transpose(2, 3), k, k)
    yield "no dimension", (q[:, :0], k, k)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CPU inputs are refused there for another reason")
@pytest.mark.parametrize("words, tensors", list(bad_inputs()), ids=lambda x: x if isinstance(x, str) else "")
def test_bad_input_is_one_clear_error(words, tensors):
    with pytest.raises(UserError, match=words) as caught:
        flash_attention(*tensors)
    assert "\n" not in str(caught.value)


GPU_SHAPES = {
    "causal": ((2, 1024, 1024), AttentionMask()),
    "ragged": ((2, 977, 977), AttentionMask()),
    "one token": ((3, 1, 1000), AttentionMask()),
    "more keys": ((1, 300, 1111), AttentionMask()),
    "rows without keys": ((1, 700, 300), AttentionMask()),
    "ring block": ((1, 512, 512), AttentionMask(q_offset=512)),
    "no mask": ((1, 333, 555), AttentionMask(causal=False)),
    "window": ((1, 999, 999), AttentionMask(window=200)),
}


def gpu_mask(mask: AttentionMask, T: int, S: int) -> torch.Tensor:
    offset = S - T if mask.q_offset is None else mask.q_offset
    return causal_mask(T, S, offset, mask.window, mask.causal).cuda()


def assert_no_worse_than_torch(inputs, mask, dense_mask, deterministic=False, scale=None):
    """Each of the five errors against float64 at most 1.5 times that of dense attention rounded as torch rounds it."""
    ours, exact = kernel_and_exact(inputs, mask, dense_mask, deterministic=deterministic, scale=scale)

    def torch_attention(q, k, v):
        group = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
        masked = torch.zeros(dense_mask.shape, device=q.device, dtype=q.dtype).masked_fill(~dense_mask, -math.inf)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=masked[:, None], scale=scale)
        return out.transpose(1, 2), torch.zeros(q.shape[:3], device=q.device)

    theirs = outputs_and_gradients(torch_attention, *inputs[:4], torch.zeros_like(inputs[4]))
    zero_dlse = outputs_and_gradients(
        lambda q, k, v: flash_attention(q, k, v, mask, scale, 0.0, deterministic),
        *inputs[:4],
        torch.zeros_like(inputs[4]),
    )
    plain = outputs_and_gradients(
        lambda q, k, v: dense_attention(q, k, v, dense_mask, scale),
        *[x.double() for x in inputs[:4]],
        torch.zeros_like(inputs[4]).double(),
    )
    seen = dense_mask.any(-1).all()
    for i in (0, 2, 3, 4):
        bound = 1.5 * relative_error(theirs[i].nan_to_num(), plain[i]) if seen else 2.0**-7
        error = relative_error(zero_dlse[i], plain[i])
        assert error <= bound, f"{NAMES[i]}: {error:.2e}, torch's {bound / 1.5:.2e}"
    for i in range(5):  # with the gradient of lse: a bound of its own, torch has none
        assert relative_error(ours[i], exact[i]) < 2.0**-6, NAMES[i]


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("name", GPU_SHAPES)
def test_gpu_kernels_match_float64(name, D, deterministic):
    shape, mask = GPU_SHAPES[name]
    torch.manual_seed(0)
    inputs = random_inputs(shape, (8, 2), D, torch.bfloat16, "cuda")
    assert_no_worse_than_torch(inputs, mask, gpu_mask(mask, *shape[1:]), deterministic)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("D", [32, 80, 96, 256])
def test_gpu_other_head_dims_and_dtypes(D, dtype):
    torch.manual_seed(0)
    inputs = random_inputs((1, 500, 500), (4, 2), D, dtype, "cuda")
    assert_no_worse_than_torch(inputs, AttentionMask(), causal_mask(500, 500, 0).cuda())


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
def test_gpu_large_logits_match_float64(D):
    torch.manual_seed(0)
    inputs = random_inputs((2, 777, 777), (4, 4), D, torch.bfloat16, "cuda")
    assert_no_worse_than_torch(inputs, AttentionMask(), causal_mask(777, 777, 0).cuda(), scale=30 / math.sqrt(D))


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_gpu_packed_documents_match_float64(causal, D):
    torch.manual_seed(0)
    lengths = [300, 1, 513, 77, 128, 400]
    inputs = random_inputs((1, sum(lengths), sum(lengths)), (4, 2), D, torch.bfloat16, "cuda")
    mask = AttentionMask(causal=causal, cu_seqlens_q=cumulative(lengths).cuda())
    assert_no_worse_than_torch(inputs, mask, packed_mask(lengths, causal=causal).cuda())


@pytest.mark.gpu
def test_gpu_deterministic_runs_are_equal_and_compile_keeps_one_graph():
    torch.manual_seed(0)
    inputs = random_inputs((2, 1000, 1000), (4, 2), 128, torch.bfloat16, "cuda")
    results = [
        outputs_and_gradients(lambda q, k, v: flash_attention(q, k, v, deterministic=True), *inputs) for _ in range(5)
    ]
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))
    compiled = torch.compile(lambda q, k, v: flash_attention(q, k, v, deterministic=True), fullgraph=True)
    compiled_results = outputs_and_gradients(compiled, *inputs)
    assert all(torch.equal(x, y) for x, y in zip(results[0], compiled_results, strict=True))


def test_ranges_built_once_give_the_same_as_the_mask():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    q, k, v, _, _ = random_inputs((1, 100, 100), (2, 1), 32, torch.float32, device)
    ids = document_ids().to(device)
    cumulated = cumulative(LENGTHS).to(device)
    expected = flash_attention(q, k, v, AttentionMask(doc_ids=ids))
    for ranges in (document_ranges(ids), cu_seqlens_ranges(cumulated, cumulated, 100, 100)):
        for x, y in zip(flash_attention(q, k, v, AttentionMask(ranges=ranges)), expected, strict=True):
            assert torch.equal(x, y)
    causal = flash_attention(q, k, v, AttentionMask(ranges=offset_ranges((1, 100, 100), 0, True, None, device)))
    assert torch.allclose(causal[0], flash_attention(q, k, v)[0], atol=1e-6)
