"""The engine against full recomputation without a cache: the same tokens and log-probabilities in any company."""

import pytest
import torch

from configs.errors import UserError
from llm.args import ModelConfig, MoeConfig
from llm.engine import Engine, EngineConfig, RequestParams
from llm.sampling import Sampler, SamplingConfig, min_p_filter, top_k_filter, top_p_filter
from llm.transformer import Transformer
from tests.tolerances import ENGINE_LOG_PROBS, FP32_GRADIENT

SMALL = dict(vocab_size=96, max_seq_len=64, d_model=32, num_layers=2, num_heads=4, d_ff=48)
VARIANTS = {
    "plain": {},
    "gqa": dict(num_kv_heads=2),
    "qwen2": dict(num_kv_heads=1, qkv_bias=True, tie_embeddings=True),
    "qwen3": dict(num_kv_heads=2, head_dim=16, qk_norm=True),
    "moe": dict(num_kv_heads=2, moe=MoeConfig(4, 2, 24)),
}
PROMPTS = [[5, 17, 80], [1], [9, 33, 2, 41, 8, 60, 7, 7, 12], [64, 3]] + [
    [10 + i, 3, 50 - i] * (i + 1) for i in range(4)
]
GREEDY = SamplingConfig(temperature=0.0)
CONFIG = EngineConfig(page_size=4, num_pages=64, max_running=8, prefill_chunk=8)


def random_model(variant: str = "gqa", dtype: torch.dtype = torch.float32, seed: int = 0) -> Transformer:
    """Weights larger than at a real start: tokens then depend on the whole context, and ties do not occur.

    Not much larger: at 0.6 a full pass in float32 is itself 2e-5 from float64 in its log-probabilities.
    """
    model = Transformer(ModelConfig(**(SMALL | VARIANTS[variant]))).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = 0.1 if "norm" in name else 0.25 if name.startswith("blocks") else 0.2
            parameter.normal_(1.0 if "norm" in name else 0.0, std, generator=generator)
    return model.eval()


def make_engine(model: Transformer, **changes) -> Engine:
    return Engine(model, EngineConfig(**(vars(CONFIG) | changes)))


@torch.no_grad()
def greedy_without_cache(model: Transformer, prompt: list[int], num_tokens: int) -> list[int]:
    """The definition: the whole row through the model for each new token."""
    row = list(prompt)
    for _ in range(num_tokens):
        row.append(model(torch.tensor([row]))[0, -1].argmax().item())
    return row[len(prompt) :]


@torch.no_grad()
def full_log_probs(model: Transformer, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> list[float]:
    """Of each token, from one forward pass over all of them."""
    logits = model(torch.tensor([prompt + tokens]))[0, len(prompt) - 1 : -1].double()  # (T, V)
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_and_log_probs_match_the_model_without_a_cache(variant):
    model = random_model(variant)
    expected = [greedy_without_cache(model, prompt, 20) for prompt in PROMPTS]
    assert len({tuple(row[-8:]) for row in expected}) > 1, "the prompt must matter, or the test shows nothing"
    completions = make_engine(model).generate(PROMPTS, RequestParams(GREEDY, max_new_tokens=20))
    assert [completion.token_ids for completion in completions] == expected
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        exact = full_log_probs(model, prompt, completion.token_ids)
        torch.testing.assert_close(completion.log_probs, exact, atol=ENGINE_LOG_PROBS, rtol=0)
        assert completion.kept_masses == [1.0] * 20 and completion.finish_reason == "length"


@pytest.mark.parametrize(
    "changes",
    [
        dict(num_pages=16),  # preemption: eight requests of up to 32 tokens want up to 64 pages of 4
        dict(prefill_chunk=3, page_size=2, num_pages=128),
        dict(max_running=1),
        dict(prefix_sharing=False),
        dict(cpu_kernel=False),
    ],
    ids=str,
)
def test_the_batch_does_not_change_a_requests_tokens(changes):
    model = random_model()
    expected = [greedy_without_cache(model, prompt, 20) for prompt in PROMPTS]
    engine = make_engine(model, **changes)
    completions = engine.generate(PROMPTS, RequestParams(GREEDY, max_new_tokens=20))
    assert [completion.token_ids for completion in completions] == expected
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        exact = full_log_probs(model, prompt, completion.token_ids)
        torch.testing.assert_close(completion.log_probs, exact, atol=ENGINE_LOG_PROBS, rtol=0)
    assert (engine.stats().preemptions > 0) == (changes.get("num_pages") == 16)
    assert engine.stats().pages_used == engine.stats().running == engine.stats().waiting == 0


def test_requests_with_one_beginning_compute_it_once():
    model = random_model()
    start = [7, 3, 90, 41, 12, 77, 5, 5, 60]
    prompts = [[*start, i, i + 1] for i in range(6)] + [start]
    engine = make_engine(model)
    completions = engine.generate(prompts, RequestParams(GREEDY, max_new_tokens=10))
    assert [c.token_ids for c in completions] == [greedy_without_cache(model, p, 10) for p in prompts]
    assert engine.stats().shared_tokens == 6 * 8, "two full pages, which the first request computes for the others"
    before = engine.stats().computed_tokens
    engine.generate([start + completions[-1].token_ids[:4]], RequestParams(GREEDY, max_new_tokens=1))
    assert engine.stats().computed_tokens - before == 1, "pages of generated tokens are found too"


def test_sampling_settings_are_each_requests_own_and_log_probs_are_exact():
    model = random_model()
    settings = [
        SamplingConfig(temperature=0.7, seed=3), SamplingConfig(temperature=1.3, top_k=5, seed=3),
        SamplingConfig(top_p=0.6, seed=4), GREEDY, SamplingConfig(temperature=0.9, min_p=0.2, top_k=20, seed=5),
        SamplingConfig(temperature=0.8, top_k=9, top_p=0.7, min_p=0.05, seed=6),
    ]  # fmt: skip
    params = [RequestParams(s, max_new_tokens=15, index=i) for i, s in enumerate(settings)]
    together = make_engine(model).generate(PROMPTS[:6], params)
    for prompt, own, completion in zip(PROMPTS, params, together, strict=False):
        alone = make_engine(model).generate([prompt], [own])[0]
        assert alone.token_ids == completion.token_ids
        temperature = own.sampling.temperature or 1.0
        exact = full_log_probs(model, prompt, completion.token_ids, temperature)
        torch.testing.assert_close(completion.log_probs, exact, atol=ENGINE_LOG_PROBS, rtol=0)
        with torch.no_grad():
            row = torch.tensor([prompt + completion.token_ids])
            logits = model(row)[0, len(prompt) - 1 : -1] / temperature
        kept = top_p_filter(top_k_filter(logits, own.sampling.top_k), own.sampling.top_p)
        kept = min_p_filter(kept, own.sampling.min_p)
        masses = torch.where(kept == logits, logits.softmax(-1), 0.0).sum(-1)
        if own.sampling.temperature == 0:
            masses = torch.ones_like(masses)
        torch.testing.assert_close(completion.kept_masses, masses.tolist(), atol=ENGINE_LOG_PROBS, rtol=0)


def test_bad_requests_are_refused():
    engine = make_engine(random_model(), num_pages=8)
    for prompt, words in [
        ([], "no tokens"), ([96], "token id 96 .* 0..95"), ([-1], "token id -1"), ([1] * 64, "64 tokens and max_seq"),
        ([1] * 30, "may have 64 tokens and the cache holds 32"),
    ]:  # fmt: skip
        with pytest.raises(UserError, match=words):
            engine.submit(prompt, RequestParams(GREEDY, max_new_tokens=40))
    assert not engine.has_work


def test_an_engines_model_can_still_be_trained():
    model, plain = random_model("qwen2"), random_model("qwen2")
    make_engine(model).generate(PROMPTS, RequestParams(GREEDY, max_new_tokens=2))
    assert torch.equal(model.blocks["0"].attention.k_proj.weight, plain.blocks["0"].attention.k_proj.weight)
    for one in (model, plain):
        one(torch.tensor([PROMPTS[2]])).logsumexp(-1).sum().backward()
    for (name, ours), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=FP32_GRADIENT * theirs.grad.abs().max().item(), rtol=0,
                                   msg=lambda text, name=name: f"{name}: {text}")  # fmt: skip


def test_new_weights_come_in_place_and_what_the_cache_held_of_the_old_is_gone():
    model, other = random_model(), random_model(seed=1)
    engine = make_engine(model)
    for prompt in PROMPTS:
        engine.submit(prompt, RequestParams(GREEDY, max_new_tokens=12))
    events = [event for _ in range(6) for event in engine.step()]
    before = model.blocks["0"].attention.q_proj.weight.data_ptr()
    engine.load_weights(other.state_dict(), version=7)
    assert model.blocks["0"].attention.q_proj.weight.data_ptr() == before and engine.weight_version == 7
    while engine.has_work:
        events += engine.step()
    for request_id, prompt in enumerate(PROMPTS):
        own = [event for event in events if event.request_id == request_id]
        tokens = [event.token_id for event in own]
        assert len(tokens) == 12 and {event.weight_version for event in own} <= {0, 7}
        for version, weights in ((0, random_model()), (7, other)):
            exact = full_log_probs(weights, prompt, tokens)
            for event, log_prob in zip(own, exact, strict=True):
                if event.weight_version == version:
                    assert abs(event.log_prob - log_prob) < ENGINE_LOG_PROBS, (request_id, version)
    assert {event.weight_version for event in events} == {0, 7}
    again = engine.generate(PROMPTS[2:3], RequestParams(GREEDY, max_new_tokens=12))[0]
    assert again.token_ids == greedy_without_cache(other, PROMPTS[2], 12), "no page of the old weights may be found"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("norm.weight"), "'norm.weight' is missing"),
        (lambda state: state.update(extra=torch.zeros(1)), "no parameter 'extra'"),
        (lambda state: state.update({"norm.weight": torch.zeros(3)}), r"norm.weight has shape \(3,\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_anything_changes(change, words):
    model = random_model()
    engine, state = make_engine(model), {name: tensor + 1 for name, tensor in model.state_dict().items()}
    change(state)
    with pytest.raises(UserError, match=words):
        engine.load_weights(state, version=1)
    assert torch.equal(model.output.weight, random_model().output.weight) and engine.weight_version == 0


class Letters:
    """A tokenizer whose token i is one letter."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([32 + token_id])


def text_of(token_ids: list[int]) -> str:
    return "".join(chr(32 + token_id) for token_id in token_ids)


def test_stop_strings_end_the_text_before_them_and_are_never_shown():
    model = random_model()
    (row,) = make_engine(model).generate(PROMPTS[:1], RequestParams(GREEDY, max_new_tokens=20))
    text = text_of(row.token_ids)
    stop = text[13:16]
    assert text.index(stop) == 13, "the string must not come earlier, or the case says something else"
    engine = Engine(model, CONFIG, Letters())
    params = RequestParams(GREEDY, max_new_tokens=20, stop=("zzzzz", stop))
    request_id = engine.submit(PROMPTS[0], params)
    events = []
    while engine.has_work:
        events += engine.step()
    assert "".join(event.text for event in events) == text[:13] and len(events) == 16
    assert [event.finish_reason for event in events] == [None] * 15 + ["stop"] and events[0].request_id == request_id
    whole = engine.generate(PROMPTS[:1], RequestParams(GREEDY, max_new_tokens=15, stop=(stop,)))[0]
    assert whole.text == text[:15] and whole.finish_reason == "length", "what was held back comes at the end"
    stopped = engine.generate(PROMPTS[:1], RequestParams(GREEDY, max_new_tokens=20, stop_ids=(row.token_ids[4],)))[0]
    assert stopped.token_ids == row.token_ids[: row.token_ids.index(row.token_ids[4]) + 1]
    assert stopped.text == text_of(stopped.token_ids[:-1]) and stopped.finish_reason == "stop"
    with pytest.raises(UserError, match="need a tokenizer"):
        make_engine(model).submit([1], params)


def test_a_cancelled_request_leaves_at_once_and_the_others_go_on():
    model = random_model()
    engine = make_engine(model)
    ids = [engine.submit(prompt, RequestParams(GREEDY, max_new_tokens=20)) for prompt in PROMPTS]
    events = [event for _ in range(4) for event in engine.step()]
    engine.cancel(ids[1])
    engine.cancel(ids[7])
    engine.cancel(12345)
    rest = []
    while engine.has_work:
        rest += engine.step()
    assert not {event.request_id for event in rest} & {ids[1], ids[7]}
    for request_id, prompt in zip(ids, PROMPTS, strict=True):
        if request_id not in (ids[1], ids[7]):
            tokens = [event.token_id for event in events + rest if event.request_id == request_id]
            assert tokens == greedy_without_cache(model, prompt, 20)
    stats = engine.stats()
    assert stats.pages_used == stats.running == stats.waiting == 0
    assert len(engine.scheduler.free_slots) == CONFIG.max_running


def test_alternatives_penalties_and_bans_match_the_plain_sampler():
    model = random_model()
    settings = SamplingConfig(temperature=0.9, top_k=8, repetition_penalty=1.4, no_repeat_ngram=2, seed=9)
    params = [RequestParams(settings, max_new_tokens=25, index=i, top_log_probs=i) for i in range(4)]
    engine = make_engine(model, num_ids=90)
    ids = [engine.submit(prompt, own) for prompt, own in zip(PROMPTS[:4], params, strict=True)]
    events: dict[int, list] = {request_id: [] for request_id in ids}
    while engine.has_work:
        for event in engine.step():
            events[event.request_id].append(event)
    for index, (prompt, request_id) in enumerate(zip(PROMPTS[:4], ids, strict=True)):
        sampler = Sampler(settings, [prompt], first_index=index)
        row = list(prompt)
        for event in events[request_id]:
            with torch.no_grad():
                logits = model(torch.tensor([row]))[:, -1, :90]
            expected = (sampler.penalised(logits) / 0.9).log_softmax(-1)[0]
            assert event.token_id == sampler.sample(logits).item()
            best = expected.topk(index) if index else None
            assert [token_id for token_id, _ in event.alternatives] == (best.indices.tolist() if index else [])
            found = [event.log_prob, *(log_prob for _, log_prob in event.alternatives)]
            exact = [expected[event.token_id].item(), *(best.values.tolist() if index else [])]
            torch.testing.assert_close(found, exact, atol=ENGINE_LOG_PROBS, rtol=0)
            row.append(event.token_id)


def test_in_batch_invariant_mode_company_changes_no_bit():
    model = random_model()
    settings = SamplingConfig(temperature=0.9, top_k=30, seed=2)
    params = [RequestParams(settings, max_new_tokens=12, index=i) for i in range(8)]
    together = make_engine(model, batch_invariant=True).generate(PROMPTS, params)
    for prompt, own, completion in zip(PROMPTS, params, together, strict=True):
        alone = make_engine(model, batch_invariant=True).generate([prompt], [own])[0]
        assert alone.token_ids == completion.token_ids and alone.log_probs == completion.log_probs
        exact = full_log_probs(model, prompt, completion.token_ids, 0.9)
        torch.testing.assert_close(completion.log_probs, exact, atol=ENGINE_LOG_PROBS, rtol=0)
    crowded = make_engine(model, batch_invariant=True, num_pages=16, max_running=4)
    assert crowded.generate(PROMPTS, params)[2].token_ids == together[2].token_ids


def test_a_model_that_moved_after_an_engine_was_made_is_read_where_it_is():
    model = random_model()
    prompt = torch.tensor([PROMPTS[2]])
    make_engine(model)
    model.load_state_dict(random_model(seed=1).state_dict(), assign=True)
    with torch.no_grad():
        assert torch.allclose(model(prompt), random_model(seed=1)(prompt), atol=ENGINE_LOG_PROBS)
    tokens = make_engine(model).generate([PROMPTS[2]], RequestParams(GREEDY, max_new_tokens=8))[0].token_ids
    assert tokens == greedy_without_cache(random_model(seed=1), PROMPTS[2], 8)
    engine = make_engine(model.double())
    assert engine.generate([PROMPTS[2]], RequestParams(GREEDY, max_new_tokens=8))[0].token_ids == tokens
