"""One conformance suite for every rollout engine: what it returns must be what the trainer computes for the same ids.

Ours runs always; vLLM with `-m vllm`, in an environment that has it (docs/grpo.md names the command).
"""

import math
from dataclasses import replace

import pytest
import torch

from alignment.rollout import (
    RolloutConfig,
    build_rollout_engine,
    check_completions,
    close_engine,
    sampler_log_probs,
)
from configs.errors import UserError
from llm.engine_request import Completion, RequestParams
from llm.model_loading import load_model, resolve_checkpoint
from llm.sampling import SamplingConfig
from tests.alignment.rl_start import rl_start
from tests.tolerances import ENGINE_LOG_PROBS, SYNCED_LOG_PROBS, TEMPERATURE_LOG_PROBS, VLLM_LOG_PROBS

QUESTIONS = ("What is 3 + 5?", "Compute 1 + 1.", "How much is 9 + 9?")
ENGINES = [pytest.param("ours"), pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.fixture(scope="module")
def start():
    model, tokenizer, _ = load_model(resolve_checkpoint(str(rl_start()), None), torch.device("cpu"))
    return model, tokenizer


@pytest.fixture(scope="module", params=ENGINES)
def made(request, start):
    """The engine of this name over a copy of the model, with the tolerance that its kernels need."""
    model, tokenizer = start
    engine = build_rollout_engine(RolloutConfig(engine=request.param), model, tokenizer, torch.device("cpu"))
    yield engine, ENGINE_LOG_PROBS if request.param == "ours" else VLLM_LOG_PROBS
    close_engine(engine)


@pytest.fixture
def engine(made, start):
    """With the start's weights as version 0, whatever the test before loaded."""
    made[0].load_weights(start[0].state_dict(), 0)
    return made[0]


def prompts_of(tokenizer) -> list[list[int]]:
    return [[tokenizer.eot_id, *tokenizer.encode(f"User: {q}\nAssistant: <think>")] for q in QUESTIONS]


def ask(tokenizer, index: int = 0, max_new: int = 16, **sampling) -> RequestParams:
    settings = SamplingConfig(**({"seed": 7} | sampling))
    return RequestParams(sampling=settings, max_new_tokens=max_new, stop_ids=(tokenizer.eot_id,), index=index)


@torch.no_grad()
def full_log_probs(model, one: Completion, temperature: float, num_ids: int) -> torch.Tensor:
    """Of a completion's tokens, from one pass without a cache: (T,)."""
    ids = one.prompt_ids + one.token_ids
    logits = model(torch.tensor([ids]))[0, len(one.prompt_ids) - 1 : -1, :num_ids].double()
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]


def largest_difference(model, completions: list[Completion], temperature: float, num_ids: int) -> float:
    differences = []
    for one in completions:
        expected = full_log_probs(model, one, temperature, num_ids)
        differences.append((expected - torch.tensor(one.log_probs, dtype=torch.float64)).abs().max())
    return float(max(differences))


def test_log_probs_match_the_trainer_and_carry_the_version(engine, made, start):
    model, tokenizer = start
    prompts = prompts_of(tokenizer)
    completions = engine.generate(prompts, [ask(tokenizer, index=i) for i in range(len(prompts))])
    check_completions(completions, 0, tokenizer.vocab_size)
    assert [one.prompt_ids for one in completions] == prompts
    assert largest_difference(model, completions, 1.0, tokenizer.vocab_size) < made[1]
    for one in completions:
        assert one.kept_masses == pytest.approx([1.0] * len(one.token_ids))
        ends = one.token_ids[-1] == tokenizer.eot_id
        assert one.finish_reason == ("stop" if ends else "length") and (ends or len(one.token_ids) == 16)
        assert tokenizer.eot_id not in one.token_ids[:-1]


def test_the_temperature_is_in_the_log_probs(engine, made, start):
    model, tokenizer = start
    completions = engine.generate(prompts_of(tokenizer), [ask(tokenizer, temperature=0.6)] * 3)
    bound = max(made[1], TEMPERATURE_LOG_PROBS)
    assert largest_difference(model, completions, 0.6, tokenizer.vocab_size) < bound
    assert largest_difference(model, completions, 1.0, tokenizer.vocab_size) > 0.1


@pytest.mark.parametrize("truncation", [{"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}], ids=str)
def test_the_kept_mass_makes_the_sampling_distribution(engine, made, start, truncation):
    model, tokenizer = start
    completions = engine.generate(prompts_of(tokenizer) * 2, [ask(tokenizer, index=i, **truncation) for i in range(6)])
    bias = []
    for one in completions:
        ids = one.prompt_ids + one.token_ids
        with torch.no_grad():
            logits = model(torch.tensor([ids]))[0, len(one.prompt_ids) - 1 : -1, : tokenizer.vocab_size].double()
        kept = truncated(logits, truncation)
        expected = kept.log_softmax(-1).gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
        ours = torch.tensor(sampler_log_probs(one), dtype=torch.float64)
        assert (expected - ours).abs().max() < 10 * made[1]
        assert one.log_probs == pytest.approx(
            full_log_probs(model, one, 1.0, tokenizer.vocab_size).tolist(), abs=made[1]
        )
        bias += [math.log(mass) for mass in one.kept_masses]
    assert sum(bias) / len(bias) < -0.01, "nothing was truncated: the test shows nothing"


def truncated(logits: torch.Tensor, truncation: dict) -> torch.Tensor:
    """Logits with -inf where the filter drops a token, by its definition."""
    probs = logits.softmax(-1)
    if "top_k" in truncation:
        keep = logits >= logits.topk(truncation["top_k"]).values[:, -1:]
    elif "min_p" in truncation:
        keep = probs >= truncation["min_p"] * probs.amax(-1, keepdim=True)
    else:
        ordered, order = probs.sort(dim=-1, descending=True)
        keep = torch.zeros_like(probs, dtype=torch.bool).scatter(
            -1, order, ordered.cumsum(-1) - ordered < truncation["top_p"]
        )
    return logits.masked_fill(~keep, -torch.inf)


def test_dice_differ_within_a_group_and_repeat_in_any_batch(engine, start):
    _, tokenizer = start
    prompt = prompts_of(tokenizer)[0]
    params = [ask(tokenizer, index=i, temperature=1.5) for i in range(8)]
    once = [one.token_ids for one in engine.generate([prompt] * 8, params)]
    assert len(set(map(tuple, once))) > 4
    again = engine.generate([prompt] * 3, [params[5], params[0], params[3]])
    assert [one.token_ids for one in again] == [once[5], once[0], once[3]]


def test_new_weights_are_used_and_old_prefixes_are_not(engine, made, start):
    model, tokenizer = start
    prompts, params = prompts_of(tokenizer), [ask(tokenizer, index=i) for i in range(3)]
    engine.generate(prompts, params)  # leaves prefixes of the old weights in the cache
    changed, _, _ = load_model(resolve_checkpoint(str(rl_start()), None), torch.device("cpu"))
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    engine.load_weights(changed.state_dict(), 1)
    assert engine.weight_version == 1
    completions = engine.generate(prompts, params)
    check_completions(completions, 1, tokenizer.vocab_size)
    bound = max(made[1], SYNCED_LOG_PROBS)
    assert largest_difference(changed, completions, 1.0, tokenizer.vocab_size) < bound
    assert largest_difference(model, completions, 1.0, tokenizer.vocab_size) > 0.1  # the old weights are noticed


def test_a_stale_token_is_refused(start):
    good = Completion([1], [5, 6], [-0.5, -0.1], [1.0, 0.9], [3, 3], "x", "stop")
    check_completions([good], 3, 10)
    faults = [
        (replace(good, weight_versions=[3, 2]), "versions"),
        (replace(good, log_probs=[-0.5]), "log-probs"),
        (replace(good, log_probs=[-0.5, math.nan]), "nan"),
        (replace(good, kept_masses=[1.0, 0.0]), "mass"),
        (replace(good, token_ids=[5, 10]), "10"),
    ]
    for fault, told in faults:
        with pytest.raises(RuntimeError, match=told):
            check_completions([fault], 3, 10)
    check_completions([replace(good, token_ids=[], log_probs=[], kept_masses=[], weight_versions=[])], 3, 10)


def test_log_q_is_the_log_prob_less_the_log_of_the_kept_mass():
    one = Completion([1], [5], [math.log(0.3)], [0.6], [0], "x", "stop")
    assert sampler_log_probs(one) == pytest.approx([math.log(0.5)])


def test_an_unknown_engine_is_refused():
    with pytest.raises(UserError, match="ours, vllm"):
        RolloutConfig(engine="sglang")
