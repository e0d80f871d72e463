"""The training kernels on a GPU, default, plain and Hopper's, on masks, layouts and inputs that may trip them.

The grid over masks through the public call is in test_flash_attention_triton.py; here is what that one leaves out.
"""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from configs.errors import UserError
from kernel.flash_attention_triton import AttentionMask, flash_attention, resolve_mask
from kernel.flash_attention_triton_launch import Attention, TileConfig, capability, run_backward, run_forward
from kernel.flash_attention_triton_tuning import CANDIDATES, TILE_FIELDS
from tests.kernel.attention_reference import causal_mask, dense_attention, outputs_and_gradients, packed_mask
from tests.kernel.decode_reference import relative_error
from tests.tolerances import FP32_GRADIENT, KERNEL_BF16, KERNEL_BF16_GRADIENT, KERNEL_FP16, PEER_ERROR

pytestmark = pytest.mark.gpu
hopper_only = pytest.mark.skipif(
    not torch.cuda.is_available() or capability(None) != 9, reason="the Gluon kernels need compute capability 9"
)
NAMES = ["out", "lse", "dq", "dk", "dv"]
HOPPER_FORWARD = TileConfig(128, 128, 4, 2, consumers=2)
PLAIN = TileConfig(64, 64, 4, 2)
DOCUMENTS = [300, 1, 64, 129, 206]  # 700 tokens


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int().cuda()


def masks() -> dict[str, tuple[AttentionMask, torch.Tensor]]:
    """Each with its dense form (1, T, S); no T or S is a multiple of a tile."""
    ids = torch.repeat_interleave(torch.arange(5), torch.tensor(DOCUMENTS))[None].cuda()
    queries, keys = [100, 0, 233], [150, 40, 333]
    return {
        "causal": (AttentionMask(), causal_mask(977, 977, 0)),
        "more keys": (AttentionMask(), causal_mask(300, 1111, 811)),
        "rows without keys": (AttentionMask(), causal_mask(700, 300, -400)),
        "ring block": (AttentionMask(q_offset=333), causal_mask(500, 450, 333)),
        "no mask": (AttentionMask(causal=False), causal_mask(333, 555, 0, causal=False)),
        "window": (AttentionMask(window=150), causal_mask(700, 700, 0, 150)),
        "documents": (AttentionMask(doc_ids=ids), packed_mask(DOCUMENTS)),
        "sequences": (
            AttentionMask(cu_seqlens_q=cumulative(queries), cu_seqlens_k=cumulative(keys)), packed_mask(queries, keys)
        ),
    }  # fmt: skip


MASKS = list(masks()) if torch.cuda.is_available() else ["causal"]


def random_inputs(T: int, S: int, heads: tuple[int, int], D: int, dtype=torch.bfloat16, B: int = 1):
    """q, k, v, dout, dlse."""
    (H, K), shape = heads, lambda length, count: (B, length, count, D)
    sizes = [shape(T, H), shape(S, K), shape(S, K), shape(T, H)]
    return [*(torch.randn(s, device="cuda").to(dtype) for s in sizes), torch.randn(B, H, T, device="cuda")]


def exact_results(inputs, dense_mask, scale=None, softcap=0.0) -> list[torch.Tensor]:
    precise = [x.double() for x in inputs]
    return outputs_and_gradients(lambda q, k, v: dense_attention(q, k, v, dense_mask.cuda(), scale, softcap), *precise)


def results_of(inputs, mask: AttentionMask, forward=None, key=None, query=None, deterministic=False):
    """[out, lse, dq, dk, dv] with the given tiles, the default ones where None."""
    q, k, v, dout, dlse = inputs
    ranges, bounds, q_offset = resolve_mask(mask, q, k)
    call = Attention(tuple(ranges), bounds, q_offset, q.shape[-1] ** -0.5, 0.0, deterministic)
    out, lse = run_forward(q, k, v, call, forward)
    dlse = dlse.masked_fill(lse == -math.inf, 0.0)
    return [out, lse, *run_backward([q, k, v, out, lse, dout, dlse], call, key, query)]


def assert_close_to_float64(results, exact, bound: float) -> None:
    for name, x, reference in zip(NAMES, results, exact, strict=False):
        assert relative_error(x, reference) < bound, name


@pytest.mark.parametrize("tiles", ["default", "plain"])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("name", MASKS)
def test_every_mask_matches_float64_with_every_kind_of_tile(name, D, tiles):
    mask, dense_mask = masks()[name]
    inputs = random_inputs(*dense_mask.shape[1:], (4, 2), D)
    plain = PLAIN if tiles == "plain" else None
    results = results_of(inputs, mask, plain, plain, plain)
    assert_close_to_float64(results, exact_results(inputs, dense_mask), KERNEL_BF16_GRADIENT)
    unseen, unread = ~dense_mask[0].any(1), ~dense_mask[0].any(0)
    assert (results[0][:, unseen] == 0).all() and (results[1][..., unseen] == -math.inf).all()
    assert all((x[:, rows] == 0).all() for x, rows in zip(results[2:], (unseen, unread, unread), strict=True))


@hopper_only
@pytest.mark.parametrize("D, dtype", [(64, torch.bfloat16), (128, torch.bfloat16), (80, torch.float16)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_hopper_forward_matches_float64(name, D, dtype):
    mask, dense_mask = masks()[name]
    q, k, v, *_ = random_inputs(*dense_mask.shape[1:], (4, 2), D, dtype, B=2 if name == "causal" else 1)
    ranges, bounds, q_offset = resolve_mask(mask, q, k)
    results = run_forward(q, k, v, Attention(tuple(ranges), bounds, q_offset, D**-0.5), HOPPER_FORWARD)
    exact = dense_attention(q.double(), k.double(), v.double(), dense_mask.cuda())
    assert_close_to_float64(results, exact, KERNEL_BF16 if dtype == torch.bfloat16 else KERNEL_FP16)


@pytest.mark.parametrize("kind, D", [pair for pair in CANDIDATES if pair[0] != "decode"], ids=str)
def test_every_tile_of_the_tuning_set_matches_float64(kind, D):
    inputs = random_inputs(977, 977, (4, 2), D)
    exact = exact_results(inputs, causal_mask(977, 977, 0))
    for row in CANDIDATES[kind, D]:
        tile = TileConfig(**dict(zip(TILE_FIELDS, row, strict=True)))
        if tile.consumers and capability(None) != 9:
            continue
        # A query tile's rows need not be ones that the key kernel can take.
        chosen = {kind: tile} if kind == "forward" else {"key": PLAIN, "query": PLAIN} | {kind: tile}
        results = results_of(inputs, AttentionMask(), **chosen, deterministic=kind == "query")
        assert_close_to_float64(results, exact, KERNEL_BF16_GRADIENT)


@pytest.mark.parametrize("factor", [1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("D", [32, 64, 80, 96, 128, 256])
def test_errors_are_at_most_those_of_torchs_flash_kernel(D, dtype, factor):
    T = 1001
    q, k, v, dout, dlse = random_inputs(T, T, (4, 4), D, dtype)
    inputs = [q * factor, k, v, dout, torch.zeros_like(dlse)]
    exact = exact_results(inputs, causal_mask(T, T, 0))

    def torch_flash(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        with torch.no_grad():
            lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[1][..., :T]
        return out.transpose(1, 2), lse + 0.0 * out.sum(-1)

    theirs = outputs_and_gradients(torch_flash, *inputs)
    ours = outputs_and_gradients(flash_attention, *inputs)
    for name, x, y, reference in zip(NAMES, ours, theirs, exact, strict=True):
        assert relative_error(x, reference) <= PEER_ERROR * relative_error(y, reference), name


@pytest.mark.parametrize("D", [32, 64, 80, 96, 128, 256])
def test_softcap_and_window_match_float64(D):
    inputs = random_inputs(333, 444, (4, 2), D)
    ours = outputs_and_gradients(lambda q, k, v: flash_attention(q, k, v, AttentionMask(window=100), 0.5, 4.0), *inputs)
    assert_close_to_float64(
        ours, exact_results(inputs, causal_mask(333, 444, 111, 100), 0.5, 4.0), KERNEL_BF16_GRADIENT
    )


@pytest.mark.parametrize("D", [32, 80, 256])
def test_float32_matches_float64(D):
    inputs = random_inputs(200, 300, (4, 2), D, torch.float32)
    ours = outputs_and_gradients(lambda q, k, v: flash_attention(q, k, v), *inputs)
    assert_close_to_float64(ours, exact_results(inputs, causal_mask(200, 300, 100)), FP32_GRADIENT)


@pytest.mark.parametrize("D", [64, 128])
def test_gradient_of_lse_alone_matches_float64(D):
    q, k, v, dout, dlse = random_inputs(700, 700, (4, 2), D)
    inputs = [q, k, v, torch.zeros_like(dout), dlse]
    exact = exact_results(inputs, causal_mask(700, 700, 0))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    gradients = torch.autograd.grad((flash_attention(*leaves)[1] * dlse).sum(), leaves)
    assert_close_to_float64([*exact[:2], *gradients[:2]], exact[:4], KERNEL_BF16_GRADIENT)
    assert (gradients[2] == 0).all()


@pytest.mark.parametrize("name", ["causal", "documents"])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_deterministic_runs_are_equal_bit_for_bit(D, name):
    mask, dense_mask = masks()[name]
    inputs = random_inputs(*dense_mask.shape[1:], (4, 2), D)
    first, *others = [results_of(inputs, mask, deterministic=True) for _ in range(4)]
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))


def test_views_of_one_projection_and_odd_addresses_give_what_contiguous_tensors_give():
    T, H, D = 300, 4, 64
    packed = torch.randn(2, T, 3 * H * D + 8, device="cuda", dtype=torch.bfloat16)
    for start in (0, 8, 3):  # aligned for TMA, aligned, not aligned: copied first
        q, k, v = packed[..., start : start + 3 * H * D].unflatten(-1, (3, H, D)).unbind(2)
        expected = flash_attention(*(x.contiguous() for x in (q, k, v)))
        for x, y in zip(flash_attention(q, k, v), expected, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("documents", [False, True])
def test_compiled_training_keeps_one_graph(documents):
    inputs = random_inputs(700, 700, (4, 2), 128)
    ids = torch.repeat_interleave(torch.arange(5), torch.tensor(DOCUMENTS))[None].cuda() if documents else None
    call = lambda q, k, v: flash_attention(q, k, v, AttentionMask(doc_ids=ids), None, 0.0, True)  # noqa: E731
    eager = outputs_and_gradients(call, *inputs)
    compiled = outputs_and_gradients(torch.compile(call, fullgraph=True), *inputs)
    assert all(torch.equal(x, y) for x, y in zip(eager, compiled, strict=True))


def bad_inputs():
    q, k = (torch.zeros(1, 8, heads, 64, dtype=torch.bfloat16) for heads in (4, 2))
    yield "devices", lambda: (q.cuda(), k.cuda(), k)
    yield "needs a CUDA device", lambda: (q, k, k)
    yield "dtypes", lambda: (q.cuda(), k.cuda().half(), k.cuda())
    yield "head_dim=72", lambda: (torch.zeros(1, 8, 4, 72, device="cuda", dtype=torch.bfloat16),) * 3
    yield "must divide", lambda: (q.cuda()[:, :, :3], k.cuda(), k.cuda())
    yield "contiguous", lambda: (q.cuda().transpose(1, 3).contiguous().transpose(1, 3), k.cuda(), k.cuda())


@pytest.mark.parametrize("words, make", list(bad_inputs()), ids=lambda x: x if isinstance(x, str) else "")
def test_bad_input_is_one_clear_error(words, make):
    with pytest.raises(UserError, match=words) as caught:
        flash_attention(*make())
    assert "\n" not in str(caught.value)
