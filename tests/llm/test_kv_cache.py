"""Generation with the cache against full recomputation without it, token for token, over the model's variants."""

import pytest
import torch

from configs.errors import UserError
from llm.args import ModelConfig, MoeConfig
from llm.generating_loop import GenerationLimits, generate, generate_stream
from llm.sampling import SamplingConfig
from llm.transformer import Transformer
from llm.transformer_context import make_context
from tests.tolerances import FP64

SMALL = dict(vocab_size=96, max_seq_len=48, d_model=32, num_layers=2, num_heads=4, d_ff=48)
VARIANTS = {
    "plain": {},
    "gqa": dict(num_kv_heads=2),
    "qwen2": dict(num_kv_heads=1, qkv_bias=True, tie_embeddings=True),
    "qwen3": dict(num_kv_heads=2, head_dim=16, qk_norm=True),
    "moe": dict(num_kv_heads=2, moe=MoeConfig(4, 2, 24)),
    "eager": dict(num_kv_heads=2, attention="eager"),
}
PROMPTS = [[5, 17, 80], [1], [9, 33, 2, 41, 8, 60, 7, 7, 12], [64, 3]]
GREEDY = SamplingConfig(temperature=0.0)


def random_model(variant: str = "gqa", dtype: torch.dtype = torch.float32) -> Transformer:
    """Weights far larger than at a real start: tokens then depend on the whole context, and ties do not occur."""
    model = Transformer(ModelConfig(**(SMALL | VARIANTS[variant]))).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = 0.6 if name.startswith("blocks") else 0.2  # else a tied output would repeat its input
            parameter.normal_(1.0 if "norm" in name else 0.0, std, generator=generator)
    return model


@torch.no_grad()
def greedy_without_cache(model: Transformer, prompt: list[int], num_tokens: int) -> list[int]:
    """The definition: the whole row through the model for each new token."""
    row = list(prompt)
    for _ in range(num_tokens):
        row.append(model(torch.tensor([row]))[0, -1].argmax().item())
    return row[len(prompt) :]


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_with_cache_matches_greedy_without(variant):
    model = random_model(variant)
    expected = [greedy_without_cache(model, prompt, 24) for prompt in PROMPTS]
    assert len({tuple(row[-8:]) for row in expected}) > 1, "the prompt must matter, or the test shows nothing"
    limits = GenerationLimits(max_new_tokens=24)
    assert generate(model, PROMPTS, GREEDY, limits) == expected
    for prompt, row in zip(PROMPTS, expected, strict=True):
        assert generate(model, [prompt], GREEDY, limits) == [row]


@pytest.mark.parametrize("variant", ["gqa", "eager"])
def test_logits_with_cache_match_logits_without(variant):
    model = random_model(variant, torch.float64)
    token_ids = torch.randint(0, 96, (3, 20), generator=torch.Generator().manual_seed(1))
    lengths = [4, 9, 1]  # the rows' prefixes; the next tokens come in chunks of 1, 2 and 5
    with torch.no_grad():
        full = model(token_ids)  # (B, T, V)
        cache = model.make_cache(3, 20)
        model(token_ids[:, :9], make_context(token_ids[:, :9], cache=cache))
        cache.trim(lengths)
        for size in (1, 2, 5):
            places = cache.positions[:, None] + torch.arange(size)  # (B, size)
            chunk = token_ids.gather(1, places)
            logits = model(chunk, make_context(chunk, cache=cache))
            expected = full.gather(1, places[..., None].expand(-1, -1, 96))
            torch.testing.assert_close(logits, expected, atol=FP64 * 10, rtol=FP64)
            assert cache.length == max(cache.row_lengths) == cache.positions.max().item()


def test_a_short_row_goes_on_after_the_longest_filled_the_cache():
    model = random_model()
    prompts = [[7] * 45, [3, 4]]
    expected = [greedy_without_cache(model, prompts[0], 3), greedy_without_cache(model, prompts[1], 46)]
    assert generate(model, prompts, GREEDY, GenerationLimits(max_new_tokens=1000)) == expected


def test_cache_keeps_rows_and_refuses_to_overflow():
    cache = random_model().make_cache(3, 8)
    k = torch.arange(3.0)[:, None, None, None].expand(3, 8, 2, 8)
    cache.update(0, k, k, torch.arange(8)[None])
    cache.advance(8)
    cache.trim([2, 8, 5])
    cache.keep_rows([2, 0])
    assert cache.row_lengths == cache.positions.tolist() == [5, 2] and cache.length == 5
    assert cache.keys[0][:, 0, 0, 0].tolist() == [2.0, 0.0]
    with pytest.raises(AssertionError, match="holds 8 tokens, 9 are needed"):
        cache.update(0, k[:2, :4], k[:2, :4], torch.arange(4)[None])
    with pytest.raises(AssertionError, match="cannot be trimmed to more"):
        cache.trim([6, 2])


def test_stop_ids_end_a_row_and_the_others_go_on():
    model = random_model()
    expected = [greedy_without_cache(model, prompt, 24) for prompt in PROMPTS]
    stop = expected[2][5]
    cut = [row[: row.index(stop) + 1] if stop in row else row for row in expected]
    assert len({len(row) for row in cut}) > 1, "rows must end at different steps, or the test shows nothing"
    assert generate(model, PROMPTS, GREEDY, GenerationLimits(24, stop_ids=[stop])) == cut


def test_a_sample_does_not_depend_on_its_batch():
    model, sampling, limits = random_model(), SamplingConfig(temperature=0.9, top_k=20, seed=4), GenerationLimits(20)
    together = generate(model, PROMPTS, sampling, limits)
    for index, prompt in enumerate(PROMPTS):
        assert generate(model, [prompt], sampling, limits, first_index=index) == [together[index]]
    assert together != generate(model, PROMPTS, SamplingConfig(temperature=0.9, top_k=20, seed=5), limits)


def test_ids_beyond_the_tokenizer_are_never_chosen():
    model = random_model()
    with torch.no_grad():
        model.output.weight[90:] = 50 * model.output.weight[:6]  # the likeliest by far
    assert max(generate(model, PROMPTS, GREEDY, GenerationLimits(10))[0]) >= 90
    assert max(max(row) for row in generate(model, PROMPTS, GREEDY, GenerationLimits(10, num_ids=90))) < 90


def test_stream_yields_the_tokens_as_they_come():
    model = random_model()
    stream = list(generate_stream(model, PROMPTS[:2], GREEDY, GenerationLimits(5)))
    assert [row for row, _ in stream] == [0, 1] * 5
    assert [token for row, token in stream if row == 1] == greedy_without_cache(model, PROMPTS[1], 5)


@pytest.mark.parametrize(
    ("prompts", "words"), [([[]], "prompt 0 has no tokens"), ([[1], [2] * 48], "prompt 1 has 48 tokens .* no room")]
)
def test_prompts_without_room_are_refused(prompts, words):
    with pytest.raises(UserError, match=words):
        generate(random_model(), prompts, GREEDY, GenerationLimits(5))
