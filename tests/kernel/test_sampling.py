"""Tokens, log-probabilities and draws of the two kernels against the plain functions of llm/sampling."""

import pytest
import torch

from configs.errors import UserError
from kernel.sampling import RowInputs, choose_tokens
from llm.sampling import draw
from tests.tolerances import FP32_FORWARD

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
R, V = 5, 2500  # three pieces, the last not full


def rows_of(temperatures: list[float], uniforms: list[float]) -> RowInputs:
    slots = torch.arange(len(temperatures), device=DEVICE).flip(0) + 1  # slot and row differ
    of_slots = torch.zeros(len(temperatures) + 2, device=DEVICE)
    of_slots[slots] = torch.tensor(temperatures, device=DEVICE)
    uniforms = torch.tensor(uniforms, dtype=torch.float64, device=DEVICE)
    return RowInputs(slots, uniforms, of_slots, torch.full((len(temperatures) + 2,), -1, device=DEVICE))


def random_scores(dtype: torch.dtype = torch.float32, scale: float = 3.0) -> torch.Tensor:
    return (torch.randn(R, V, generator=torch.Generator().manual_seed(0)) * scale).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_likeliest_token_and_its_log_probability(dtype):
    scores, rows = random_scores(dtype), rows_of([0.0] * R, [0.3] * R)
    scores[2, 7] = scores[2, 2049] = scores[2].max() + 1  # of two equal ones the first
    packed, log_norms = choose_tokens(scores, rows, draws=False)
    expected = scores.float().log_softmax(-1)
    assert packed[:, 0].tolist() == scores.float().argmax(-1).tolist() and packed[2, 0] == 7
    assert rows.last_tokens[rows.slots].tolist() == packed[:, 0].tolist() and rows.last_tokens[0] == -1
    torch.testing.assert_close(packed[:, 1].float(), expected.amax(-1), atol=FP32_FORWARD, rtol=FP32_FORWARD)
    torch.testing.assert_close(log_norms, scores.float().logsumexp(-1), atol=FP32_FORWARD, rtol=FP32_FORWARD)
    assert packed[:, 2].tolist() == [1.0] * R


@pytest.mark.parametrize("seed", range(4))
def test_draws_are_those_of_the_plain_inverse(seed):
    uniforms = torch.rand(R, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).tolist()
    temperatures = [0.5, 1.0, 2.0, 0.0, 1.3]
    scores, rows = random_scores(), rows_of(temperatures, uniforms)
    packed, _ = choose_tokens(scores, rows, draws=True)
    scaled = scores / torch.tensor([t or 1.0 for t in temperatures], device=DEVICE)[:, None]
    expected = draw(scaled, rows.uniforms)
    expected[3] = scores[3].argmax()
    assert packed[:, 0].tolist() == expected.tolist()
    log_probs = scaled.log_softmax(-1).gather(1, expected[:, None])[:, 0]
    torch.testing.assert_close(packed[:, 1].float(), log_probs, atol=FP32_FORWARD, rtol=FP32_FORWARD)


def test_a_banned_token_is_never_drawn():
    scores = torch.full((3, V), float("-inf"), device=DEVICE)
    scores[0, 2400], scores[1, 5], scores[1, 1500], scores[2, 0] = 1.0, 0.0, -1.0, 2.0
    for uniform in (0.0, 0.5, 1.0 - 2**-53):
        packed, _ = choose_tokens(scores, rows_of([1.0] * 3, [uniform] * 3), draws=True)
        assert packed[:, 0].tolist() == [2400, 5 if uniform < 0.7 else 1500, 0]


def test_scores_that_the_kernels_cannot_read_are_refused():
    with pytest.raises(UserError, match="must be rows of"):
        choose_tokens(random_scores().T, rows_of([0.0] * V, [0.0] * V), draws=False)
