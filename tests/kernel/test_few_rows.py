"""kernel/few_rows against plain PyTorch, and an engine that decodes by it; in the interpreter where no GPU is."""

import pytest
import torch
from torch.nn import functional as F

from kernel.few_rows import (
    FewRowsConfig,
    ProductConfig,
    QkvInputs,
    RowPlaces,
    embed,
    few_rows_run,
    product,
    rows_attend,
    sum_norm,
    swiglu_product,
)
from llm.engine_few import runs_few
from llm.sampling import SamplingConfig
from llm.transformer import RoPE
from tests.kernel.test_matvec import PROMPTS, EagerGraphs, generate, random_model
from tests.tolerances import ENGINE_LOG_PROBS, FEW_ROWS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32  # the interpreter's bfloat16 products are wrong
TILE = dict(block_n=16, block_c=16, stages=1) if DEVICE.type == "cpu" else {}


def random(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    largest = expected.float().abs().max().item()
    torch.testing.assert_close(
        found.float(), expected.float(), atol=FEW_ROWS[str(DTYPE).removeprefix("torch.")] * largest, rtol=0
    )


@pytest.mark.parametrize(("rows", "width", "inner", "parts"), [(3, 48, 40, 1), (20, 80, 96, 3), (64, 48, 128, 4)])
def test_products_match_pytorch(rows, width, inner, parts):
    x, weight = random(rows, inner), random(width, inner)
    out = torch.full((parts, rows, width), float("nan"), device=DEVICE)
    product(x, weight, out, ProductConfig(**TILE, parts=parts), pdl=False)
    assert_near(out.sum(0), x @ weight.T)
    hidden = torch.full((rows, width // 2), float("nan"), device=DEVICE, dtype=DTYPE)
    swiglu_product(x, weight, hidden, ProductConfig(**TILE), pdl=False)
    gate, up = (x @ weight.T).chunk(2, dim=-1)
    assert_near(hidden, F.silu(gate) * up)


@pytest.mark.parametrize("parts", [0, 1, 3])
def test_sum_norm_adds_what_the_product_left_and_norms(parts):
    stream, norm = random(5, 40), random(40)
    update = random(max(parts, 1), 5, 40, dtype=torch.float32)
    expected = stream if parts == 0 else stream + update.sum(0).to(DTYPE)
    normed = torch.empty_like(stream)
    sum_norm(update if parts else None, stream, norm, 1e-5, normed, pdl=False)
    assert_near(stream, expected)
    assert_near(normed, F.rms_norm(expected.float(), (40,), norm.float(), 1e-5).to(DTYPE))


@pytest.mark.parametrize(("heads", "kv_heads", "biased"), [(4, 2, False), (3, 3, True)])
def test_attention_turns_stores_and_attends(heads, kv_heads, biased):
    """Rows of 1, 17 and 40 tokens on scattered pages of 16, against SDPA over the gathered keys."""
    D, page_size, lengths = 32, 16, [17, 1, 40]
    tables = torch.tensor([[0, 0, 0], [5, 0, 0], [1, 6, 0], [4, 2, 3]], dtype=torch.int32, device=DEVICE)
    slots = [2, 1, 3]  # of 17, 1 and 40 tokens
    rows = torch.tensor([slots, lengths, [0] * 3], device=DEVICE)
    pages = random(7, page_size, kv_heads, D), random(7, page_size, kv_heads, D) + 0
    parts = random(2, 3, (heads + 2 * kv_heads) * D, dtype=torch.float32)
    bias = random((heads + 2 * kv_heads) * D) if biased else None
    cos, sin = (x[0, :, 0, : D // 2].contiguous() for x in RoPE(D, 1e4)(torch.arange(48)[None]))
    rope = cos.to(DEVICE), sin.to(DEVICE)
    expected_pages = [p.clone().flatten(0, 1) for p in pages]
    columns = parts.sum(0) + (0 if bias is None else bias.float())
    q, k, v = columns.to(DTYPE).split([heads * D, kv_heads * D, kv_heads * D], dim=-1)
    out = torch.full((3, heads, D), float("nan"), device=DEVICE, dtype=DTYPE)
    rows_attend(RowPlaces(rows, tables, page_size), QkvInputs(parts, bias, rope, pages), out, FewRowsConfig(pdl=False))
    for row, length in enumerate(lengths):
        position = length - 1
        turn = tuple(x[position].repeat(2)[None, None, None] for x in rope)
        turned_q = RoPE.rotate(q[row].view(1, 1, heads, D), turn)
        places = [tables[slots[row], t // page_size].item() * page_size + t % page_size for t in range(length)]
        expected_pages[0][places[-1]] = RoPE.rotate(k[row].view(1, 1, kv_heads, D), turn)[0, 0]
        expected_pages[1][places[-1]] = v[row].view(kv_heads, D)
        keys, values = (p[places].repeat_interleave(heads // kv_heads, dim=1).transpose(0, 1) for p in expected_pages)
        expected = F.scaled_dot_product_attention(turned_q[0].transpose(0, 1), keys, values)  # (H, 1, D)
        assert_near(out[row], expected[:, 0])
    for ours, theirs in zip(pages, expected_pages, strict=True):
        assert_near(ours.flatten(0, 1), theirs)


def test_embed_reads_the_slots_last_tokens():
    embedding, last_tokens = random(9, 24), torch.tensor([3, 0, 8], device=DEVICE)
    rows, stream = torch.tensor([[2, 0], [1, 1]], device=DEVICE), torch.empty(2, 24, device=DEVICE, dtype=DTYPE)
    embed(RowPlaces(rows, torch.zeros(3, 1, dtype=torch.int32), 16), last_tokens, embedding, stream, pdl=False)
    assert torch.equal(stream, embedding[[8, 3]])


@pytest.mark.skipif(DEVICE.type == "cuda", reason="float32 stays with the model on a GPU; tests/llm/test_engine_gpu.py")
def test_engine_batches_by_few_rows_match_the_plain_engine(monkeypatch):
    model, prompts = random_model(qkv_bias=True, num_kv_heads=1), [*PROMPTS, [7, 8]]
    monkeypatch.setattr("llm.engine_runner.kernels_run", lambda model, device: False)
    _, expected = generate(model, prompts, SamplingConfig(temperature=0.8))
    monkeypatch.setattr("llm.engine_runner.kernels_run", lambda model, device: True)
    taken = []

    class Watched(EagerGraphs):
        def __init__(self, runner):
            super().__init__(runner)
            scores = runner.few.scores
            runner.few.scores = lambda rows: taken.append(rows.shape[1]) or scores(rows)

    _, found = generate(model, prompts, SamplingConfig(temperature=0.8), Watched)
    assert taken and set(taken) == {4}, "a batch must decode by these kernels"
    for ours, plain in zip(found, expected, strict=True):
        assert ours.token_ids == plain.token_ids
        torch.testing.assert_close(ours.log_probs, plain.log_probs, atol=ENGINE_LOG_PROBS, rtol=0)


def test_models_with_other_layers_stay_with_their_own():
    assert not runs_few(random_model()), "not before its projections are joined"
    assert not few_rows_run(128, 80, torch.empty(1, device=DEVICE)), "head_dim must be a power of two"
    assert few_rows_run(128, 64, torch.empty(1, device=DEVICE, dtype=DTYPE))
