"""The filters against transformers' logits processors, the draw against its distribution, the dice against batches."""

import pytest
import torch
from transformers.generation import logits_process as hf

from configs.errors import UserError
from llm.sampling import (
    NgramIndex,
    Sampler,
    SamplingConfig,
    ban_tokens,
    draw,
    min_p_filter,
    penalise_repetition,
    top_k_filter,
    top_p_filter,
)

B, V = 6, 50


def random_logits(seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(B, V, generator=torch.Generator().manual_seed(seed)) * scale


def no_tokens() -> torch.Tensor:
    return torch.zeros(B, 0, dtype=torch.long)


@pytest.mark.parametrize("top_k", [1, 3, 49, 50])
def test_top_k_matches_transformers(top_k):
    logits = random_logits()
    assert torch.equal(top_k_filter(logits, top_k), hf.TopKLogitsWarper(top_k)(no_tokens(), logits))


def test_top_k_beyond_the_vocabulary_keeps_all():
    assert torch.equal(top_k_filter(random_logits(), 1000), random_logits())


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9, 0.999])
def test_top_p_matches_transformers(top_p):
    logits = random_logits(1)
    assert torch.equal(top_p_filter(logits, top_p), hf.TopPLogitsWarper(top_p)(no_tokens(), logits))


@pytest.mark.parametrize("min_p", [0.01, 0.1, 0.5, 1.0])
def test_min_p_matches_transformers(min_p):
    logits = random_logits(2)
    assert torch.equal(min_p_filter(logits, min_p), hf.MinPLogitsWarper(min_p)(no_tokens(), logits))


@pytest.mark.parametrize("penalty", [0.8, 1.3, 2.0])
def test_repetition_penalty_matches_transformers(penalty):
    logits = random_logits(3)
    history = torch.randint(0, V, (B, 20), generator=torch.Generator().manual_seed(4))
    seen = torch.zeros(B, V, dtype=torch.bool).scatter(1, history, True)
    expected = hf.RepetitionPenaltyLogitsProcessor(penalty)(history, logits)
    assert torch.equal(penalise_repetition(logits, seen, penalty), expected)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 2, 40])
def test_ngram_ban_matches_transformers(n, length):
    logits = random_logits(5)
    # Few distinct tokens, so that n-grams do come again.
    history = torch.randint(0, 3, (B, length), generator=torch.Generator().manual_seed(6))
    banned = [NgramIndex(n, row).banned() for row in history.tolist()]
    expected = hf.NoRepeatNGramLogitsProcessor(n)(history, logits)
    assert torch.equal(ban_tokens(logits, banned), expected)
    if length == 40:
        assert any(banned), "the case must ban something"


def test_a_ban_of_everything_is_lifted():
    logits = random_logits()
    assert torch.equal(ban_tokens(logits, [set(range(V))] + [set()] * (B - 1)), logits)


def test_sampler_matches_transformers_chain_step_by_step():
    config = SamplingConfig(0.7, 12, 0.8, 0.05, 1.4, no_repeat_ngram=2, seed=3)
    history = torch.randint(0, 4, (B, 9), generator=torch.Generator().manual_seed(7))
    chain = [
        hf.RepetitionPenaltyLogitsProcessor(1.4), hf.NoRepeatNGramLogitsProcessor(2), hf.TemperatureLogitsWarper(0.7),
        hf.TopKLogitsWarper(12), hf.TopPLogitsWarper(0.8), hf.MinPLogitsWarper(0.05),
    ]  # fmt: skip
    sampler = Sampler(config, history.tolist())
    for step in range(30):
        logits = expected = random_logits(100 + step)
        for processor in chain:
            expected = processor(history, expected)
        chosen = sampler.sample(logits)
        assert expected.gather(1, chosen[:, None]).isfinite().all(), f"step {step}: a token transformers bans"
        history = torch.cat((history, chosen[:, None]), dim=1)


def test_draw_follows_the_distribution():
    logits = torch.tensor([[0.0, 1.0, float("-inf"), 2.0]])
    uniforms = (torch.arange(40_000, dtype=torch.float64) + 0.5) / 40_000  # an even grid: shares are exact
    chosen = draw(logits.expand(40_000, -1), uniforms)
    shares = torch.bincount(chosen, minlength=4) / 40_000
    torch.testing.assert_close(shares, torch.softmax(logits[0], 0), atol=1e-4, rtol=0)


def test_draw_never_takes_a_banned_token_at_the_edges():
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.1, float("-inf")]] * 2)
    edges = torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)
    assert draw(logits, edges).tolist() == [1, 3]


def test_a_row_samples_the_same_in_any_batch():
    config = SamplingConfig(seed=11)
    rows = [random_logits(20 + step) for step in range(5)]
    together = Sampler(config, [[0]] * B)
    all_chosen = torch.stack([together.sample(logits) for logits in rows])  # (steps, B)
    for index in (0, 4):
        alone = Sampler(config, [[0]], first_index=index)
        assert [alone.sample(logits[index : index + 1]).item() for logits in rows] == all_chosen[:, index].tolist()
    same_logits = random_logits()[:1].expand(B, -1)
    assert Sampler(config, [[0]] * B).sample(same_logits).unique().numel() > 1, "rows must not share their dice"


def test_rows_keep_their_state_when_others_leave():
    config = SamplingConfig(repetition_penalty=1.5, no_repeat_ngram=2, seed=5)
    prompts = [[row, row + 1] for row in range(B)]
    whole, shrinking = Sampler(config, prompts), Sampler(config, prompts)
    whole.sample(random_logits(30)), shrinking.sample(random_logits(30))
    shrinking.keep_rows([1, 4])
    for step in range(10):
        logits = random_logits(31 + step, scale=0.5)
        assert whole.sample(logits)[[1, 4]].tolist() == shrinking.sample(logits[[1, 4]]).tolist()


def test_greedy_takes_the_likeliest():
    logits = random_logits(8)
    assert torch.equal(Sampler(SamplingConfig(temperature=0.0), [[0]] * B).sample(logits), logits.argmax(-1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(temperature=-0.1), "temperature=-0.1 must not be negative"),
        (dict(top_k=-1), "top_k=-1"),
        (dict(top_p=0.0), r"top_p=0.0 must lie in \(0, 1\]"),
        (dict(top_p=1.1), "top_p=1.1"),
        (dict(min_p=1.5), r"min_p=1.5 must lie in \[0, 1\]"),
        (dict(repetition_penalty=0.0), "repetition_penalty=0.0 must be positive"),
        (dict(no_repeat_ngram=-2), "no_repeat_ngram=-2"),
    ],
)
def test_impossible_settings_are_refused(changes, words):
    with pytest.raises(UserError, match=words):
        SamplingConfig(**changes)
