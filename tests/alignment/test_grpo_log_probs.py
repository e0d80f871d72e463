"""Log-probs and entropies against torch's log_softmax; the shift, temperature and padding through a small model."""

import pytest
import torch

from alignment.grpo_log_probs import token_entropies, token_log_probs
from llm import loss
from llm.args import ModelConfig
from llm.transformer import Transformer
from llm.transformer_context import make_context
from llm.transformer_init import initialise
from tests.tolerances import BF16_ROUNDING, FP32_FORWARD, FP64

B, T, V = 2, 5, 31
SHAPE = ModelConfig(vocab_size=V, max_seq_len=16, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=48)


@pytest.fixture(scope="module")
def model():
    made = Transformer(SHAPE)
    initialise(made, seed=5)
    with torch.no_grad():  # larger than at the start of training, so that probabilities are far from equal
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    return made.double()


def example():
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(B, T, V, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, V, (B, T), generator=generator)
    targets[1, 3:] = -100
    return logits.requires_grad_(), targets


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("num_ids", [None, 29])
@pytest.mark.parametrize("chunk", [1 << 17, 3 * V])
def test_log_probs_and_gradient_match_log_softmax(monkeypatch, temperature, num_ids, chunk):
    monkeypatch.setattr(loss, "CPU_CHUNK_ELEMENTS", chunk)
    logits, targets = example()
    targets = targets.clamp(max=28)
    weights = torch.arange(1.0, 1 + B * T, dtype=torch.float64).view(B, T)
    result = token_log_probs(logits, targets, temperature, num_ids)
    (gradient,) = torch.autograd.grad((result * weights).sum(), logits)
    plain = torch.log_softmax(logits[..., :num_ids] / temperature, dim=-1)
    plain = plain.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets >= 0)
    (wanted,) = torch.autograd.grad((plain * weights).sum(), logits)
    torch.testing.assert_close(result, plain, rtol=FP64, atol=FP64)
    torch.testing.assert_close(gradient, wanted, rtol=FP64, atol=FP64)


def test_gradient_of_a_likely_token_in_bfloat16_is_not_rounded_away():
    """p = 0.9993 rounds to 1 in bfloat16: 1 - p must be made before rounding."""
    logits = torch.tensor([[[8.0, 0.0, 0.0]]], dtype=torch.bfloat16, requires_grad=True)
    token_log_probs(logits, torch.tensor([[0]])).sum().backward()
    exact = 1.0 - torch.softmax(logits.detach().double(), -1)[0, 0, 0]
    torch.testing.assert_close(logits.grad[0, 0, 0].double(), exact, rtol=BF16_ROUNDING, atol=0.0)


def test_entropy_is_the_whole_sum_and_not_a_sample():
    assert token_entropies(torch.zeros(1, 1, 8)).item() == pytest.approx(torch.log(torch.tensor(8.0)).item())
    probabilities = torch.tensor([0.7, 0.2, 0.1])
    logits = probabilities.log()[None, None]
    wanted = -(probabilities * probabilities.log()).sum()
    torch.testing.assert_close(token_entropies(logits)[0, 0], wanted)
    assert token_entropies(logits, temperature=1e-3).item() == pytest.approx(0.0, abs=1e-6)
    forbidden = torch.tensor([[[0.0, 0.0, float("-inf")]]])
    torch.testing.assert_close(token_entropies(forbidden)[0, 0], torch.log(torch.tensor(2.0)))


def test_a_token_after_the_prompt_matches_a_one_step_forward(model):
    """The shift: what stands at position t belongs to token t + 1, seen from the tokens up to t."""
    ids = torch.tensor([[3, 1, 4, 15, 9, 26, 5]])  # 15 is there once
    log_probs = token_log_probs(model(ids[:, :-1]), ids[:, 1:])
    one_step = torch.log_softmax(model(ids[:, :3])[0, -1], -1)[15]
    torch.testing.assert_close(log_probs[0, 2], one_step, rtol=FP64, atol=FP64)
    assert abs(log_probs[0, 3] - one_step) > 1e-3 and abs(log_probs[0, 1] - one_step) > 1e-3


def test_temperature_of_the_sampler_must_be_the_trainers(model):
    """Sampled at 0.6: log-probs recomputed at 0.6 agree, at 1.0 they are far off."""
    ids = torch.tensor([[3, 1, 4]])
    generator = torch.Generator().manual_seed(0)
    sampled, at_sampling = [], []
    for _ in range(8):
        scores = torch.log_softmax(model(ids)[0, -1] / 0.6, -1)
        chosen = torch.multinomial(scores.exp(), 1, generator=generator)
        sampled.append(chosen)
        at_sampling.append(scores[chosen])
        ids = torch.cat((ids, chosen[None]), dim=1)
    mask = torch.arange(ids.shape[1] - 1) >= 2
    logits = model(ids[:, :-1])
    right = token_log_probs(logits, ids[:, 1:], 0.6)[0, mask]
    wrong = token_log_probs(logits, ids[:, 1:], 1.0)[0, mask]
    wanted = torch.cat(at_sampling)
    assert (right - wanted).abs().max() < 1e-4
    assert (wrong - wanted).abs().mean() > 0.1


def padded(rows, width, left):
    """Rows of ids in a batch of `width`: ids, targets, positions, doc_ids; padding is a document of its own."""
    ids = torch.full((len(rows), width), 7)  # an id that also stands in the rows: padding is known by place alone
    targets, positions, docs = torch.full_like(ids, -100), torch.zeros_like(ids), torch.zeros_like(ids)
    for i, row in enumerate(rows):
        start = width - len(row) if left else 0
        span = slice(start, start + len(row))
        ids[i, span], positions[i, span], docs[i, span] = torch.tensor(row), torch.arange(len(row)), 1
        targets[i, start : start + len(row) - 1] = torch.tensor(row[1:])
    return ids, targets, positions, docs


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
def test_padding_changes_no_log_prob_and_no_gradient(model, left):
    rows = [[3, 1, 4, 15, 9], [7, 7], [2, 6, 5, 7, 3, 8, 30, 1]]
    parameters = list(model.parameters())
    alone = [token_log_probs(model(torch.tensor([row[:-1]])), torch.tensor([row[1:]]))[0] for row in rows]
    wanted = torch.autograd.grad(sum(row.sum() for row in alone), parameters)
    ids, targets, positions, docs = padded(rows, 11, left)
    together = token_log_probs(model(ids, make_context(ids, positions, docs)), targets)
    torch.testing.assert_close(together[targets >= 0], torch.cat(alone), rtol=FP64, atol=FP64)
    for gradient, expected in zip(torch.autograd.grad(together.sum(), parameters), wanted, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=FP64)


def test_float32_logits_keep_float32_precision():
    logits, targets = example()
    single = token_log_probs(logits.float(), targets)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), token_log_probs(logits, targets), rtol=FP32_FORWARD, atol=FP32_FORWARD)
