"""Decoding in one call on a CPU (kernel/decode_cpu) against the model's own layers, step by step."""

import pytest
import torch

from kernel.decode_cpu import Decoded, decode_runs
from llm.args import ModelConfig
from llm.engine import Engine, RequestParams
from llm.engine_runner import row_numbers
from llm.lora import LoraConfig, apply_lora
from llm.sampling import SamplingConfig, draw
from llm.transformer import Transformer
from tests.llm.test_engine import GREEDY, PROMPTS, full_log_probs, greedy_without_cache, make_engine, random_model
from tests.tolerances import ENGINE_LOG_PROBS, FP32_FORWARD

pytestmark = pytest.mark.skipif(not decode_runs([8], 8), reason="no C++ compiler builds kernel/decode_cpu.cpp here")
SHAPES = {
    "plain": {},
    "llama": dict(num_kv_heads=2, head_dim=64, num_layers=3, d_ff=136),
    "qwen2": dict(num_kv_heads=1, qkv_bias=True, tie_embeddings=True),
    "qwen3": dict(num_kv_heads=2, head_dim=40, qk_norm=True, vocab_size=101),
}


def shaped_model(shape: str) -> Transformer:
    base = dict(vocab_size=96, max_seq_len=64, d_model=32, num_layers=2, num_heads=4, d_ff=48)
    model = Transformer(ModelConfig(**(base | SHAPES[shape])))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1 if "norm" in name else 0.2, generator=generator)
    return model.eval()


def filled_engine(model: Transformer, **changes) -> Engine:
    """An engine in the middle of eight requests, whose cache pages are in no order."""
    engine = make_engine(model, **changes)
    for prompt in PROMPTS:
        engine.submit(prompt, RequestParams(GREEDY, max_new_tokens=30))
    for _ in range(9):
        engine.step()
    assert not engine.scheduler.waiting and engine.runner.host is not None
    return engine


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_pages", [64, 200], ids=["scattered", "in order"])
@torch.inference_mode()
def test_scores_and_cache_match_the_models_layers(shape, num_pages):
    engine = filled_engine(shaped_model(shape), page_size=4, num_pages=num_pages)
    runner, plan = engine.runner, engine.scheduler.plan()
    rows = runner.upload(row_numbers(plan.sampled))
    runner.prepare([])
    expected = runner.logits(plan, rows)
    pages = [tensor.clone() for tensor in (*runner.cache.keys, *runner.cache.values)]
    for tensor in (*runner.cache.keys, *runner.cache.values):
        tensor.flatten(0, 1)[[engine_place(engine, request) for request in plan.decode]] = torch.nan
    assert runner.host.takes(plan)
    decoded = runner.host.decoder.step(runner.host.model_pointers, runner.host.layer_pointers, rows, None)
    torch.testing.assert_close(decoded.scores, expected, atol=FP32_FORWARD, rtol=0)
    for ours, theirs in zip((*runner.cache.keys, *runner.cache.values), pages, strict=True):
        torch.testing.assert_close(ours, theirs, atol=FP32_FORWARD, rtol=0)


def engine_place(engine: Engine, request) -> int:
    position, size = request.num_computed - 1, engine.config.page_size
    return request.pages[position // size] * size + position % size


@torch.inference_mode()
def test_neither_company_nor_threads_change_a_bit():
    engine = filled_engine(shaped_model("llama"))
    runner, plan = engine.runner, engine.scheduler.plan()
    runner.prepare([])
    assert runner.host.takes(plan)
    host, rows = runner.host, torch.from_numpy(row_numbers(plan.sampled))
    host.decoder.work = 10**9  # every thread is worth its while
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    together = host.decoder.step(host.model_pointers, host.layer_pointers, rows, None).scores.clone()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for columns in ([0], [5], [2, 7], [6, 1, 4], [3, 2, 1, 0, 7], list(range(8))):
                some = rows[:, columns].contiguous()
                scores = host.decoder.step(host.model_pointers, host.layer_pointers, some, None).scores
                assert torch.equal(scores, together[columns]), (threads, columns)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num_ids", [96, 90, 83])
def test_greedy_choices_are_those_of_the_scores(num_ids):
    model = random_model("qwen2")
    completions = make_engine(model, num_ids=num_ids).generate(PROMPTS, RequestParams(GREEDY, max_new_tokens=12))
    others = make_engine(model, num_ids=num_ids, cpu_kernel=False).generate(
        PROMPTS, RequestParams(GREEDY, max_new_tokens=12)
    )
    for ours, theirs in zip(completions, others, strict=True):
        assert ours.token_ids == theirs.token_ids and max(ours.token_ids) < num_ids
        torch.testing.assert_close(ours.log_probs, theirs.log_probs, atol=ENGINE_LOG_PROBS, rtol=0)


@pytest.mark.parametrize("name", ["blocks.0.attention.q_proj", "blocks.1.ffn.up_proj", "output"])
def test_a_weight_that_is_not_a_number_shows_in_every_log_probability(name):
    model = random_model()
    engine = filled_engine(model)
    with torch.no_grad():
        model.get_submodule(name).weight[3, 3] = torch.nan
    events = engine.step()
    assert len(events) == len(PROMPTS) and all(event.log_prob != event.log_prob for event in events)


FILTERED = [SamplingConfig(temperature=0.8, seed=2), SamplingConfig(top_k=9, top_p=0.8, seed=3), GREEDY]
UNFILTERED = [SamplingConfig(temperature=0.8, seed=2), GREEDY, SamplingConfig(temperature=1.4, seed=4)]


@pytest.mark.parametrize("settings", [FILTERED, UNFILTERED], ids=["filtered", "unfiltered"])
def test_drawn_tokens_are_those_of_the_models_layers(settings):
    model = random_model()
    params = [RequestParams(settings[i % 3], max_new_tokens=20, index=i, top_log_probs=i % 4) for i in range(8)]
    ours = make_engine(model).generate(PROMPTS, params)
    theirs = make_engine(model, cpu_kernel=False).generate(PROMPTS, params)
    assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.log_probs, other.log_probs, atol=ENGINE_LOG_PROBS, rtol=0)
        torch.testing.assert_close(one.kept_masses, other.kept_masses, atol=ENGINE_LOG_PROBS, rtol=0)


@torch.inference_mode()
def test_a_draw_inverts_the_cumulative_distribution_from_end_to_end():
    engine = filled_engine(shaped_model("qwen3"))  # 101 ids: neither whole vectors nor whole blocks
    runner, plan = engine.runner, engine.scheduler.plan()
    runner.prepare([])
    assert runner.host.takes(plan)
    host, rows = runner.host, torch.from_numpy(row_numbers(plan.sampled))
    temperatures, tokens = torch.full((rows.shape[1],), 1.3), runner.last_tokens.clone()

    def step() -> Decoded:
        runner.last_tokens.copy_(tokens)
        return host.decoder.step(host.model_pointers, host.layer_pointers, rows, temperatures)

    scaled = step().scores / 1.3
    ends = scaled.double().softmax(-1).cumsum(-1)  # (B, V)
    middles = ends - scaled.double().softmax(-1) / 2
    for uniforms in (*middles.T, torch.zeros(len(rows[0])), torch.full((len(rows[0]),), 1 - 2**-53).double()):
        rows[2].view(torch.float64)[:] = uniforms
        decoded = step()
        chosen = draw(scaled, rows[2].view(torch.float64))
        assert torch.equal(decoded.packed[:, 0].long(), chosen)
        assert torch.equal(runner.last_tokens[rows[0]], chosen)
        exact = scaled.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
        torch.testing.assert_close(decoded.packed[:, 1].float(), exact, atol=ENGINE_LOG_PROBS, rtol=0)
        torch.testing.assert_close(decoded.log_norms, scaled.logsumexp(-1), atol=ENGINE_LOG_PROBS, rtol=0)


def test_products_swapped_and_weights_replaced_after_the_engine_was_made_are_followed():
    model = random_model()
    engine = make_engine(model)
    model.load_state_dict(random_model(seed=1).state_dict(), assign=True)
    greedy = RequestParams(GREEDY, max_new_tokens=8)
    first = engine.generate(PROMPTS[2:3], greedy)[0]
    assert first.token_ids == greedy_without_cache(random_model(seed=1), PROMPTS[2], 8)
    apply_lora(model, LoraConfig(rank=2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(1))
    engine.forget_prefixes()
    swapped = engine.generate(PROMPTS[2:3], greedy)[0]
    assert swapped.token_ids == greedy_without_cache(model, PROMPTS[2], 8) != first.token_ids
    exact = full_log_probs(model, PROMPTS[2], swapped.token_ids)
    torch.testing.assert_close(swapped.log_probs, exact, atol=ENGINE_LOG_PROBS, rtol=0)


def test_models_that_the_library_does_not_take_go_through_their_layers():
    for variant, model in (("moe", random_model("moe")), ("bf16", random_model(dtype=torch.bfloat16))):
        assert make_engine(model).runner.host is None, variant
    assert make_engine(random_model(), batch_invariant=True).runner.host is None
    assert make_engine(random_model(), cpu_kernel=False).runner.host is None


def test_without_the_library_the_engine_decodes_by_the_models_layers(monkeypatch):
    model = random_model()
    monkeypatch.setattr("kernel.decode_cpu.decode_library", lambda: None)
    engine = make_engine(model)
    assert engine.runner.host is None
    found = engine.generate(PROMPTS[2:3], RequestParams(GREEDY, max_new_tokens=8))[0]
    assert found.token_ids == greedy_without_cache(model, PROMPTS[2], 8)
