"""Loss, perplexity and bits per byte against numbers known beforehand; the two scripts on a trained run."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from configs.errors import UserError
from configs.loader import compose_config
from llm.args import TrainConfig
from llm.data_loader import ValidationSet, open_sources
from llm.evaluating import EvaluateConfig, run_evaluation
from llm.evaluation import evaluate, evaluate_sums
from llm.generating import GenerateConfig, run_generation
from llm.training import train
from tests.llm.token_corpus import write_source


class UniformModel(nn.Module):
    """Gives every id the same probability."""

    def __init__(self, vocab_size: int):
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, token_ids, ctx):
        return torch.zeros(*token_ids.shape, self.vocab_size)


class PositionModel(nn.Module):
    """Sure of the label (token + 1) from position 4 of the window on, uniform before."""

    def forward(self, token_ids, ctx):
        logits = torch.zeros(*token_ids.shape, 64)
        logits[:, 4:].scatter_(2, token_ids[:, 4:, None] + 1, 100.0)
        return logits


def validation_set(tmp_path, tokens: np.ndarray, seq_len: int, bytes_per_token: float) -> ValidationSet:
    write_source(tmp_path, {"val": [tokens]}, vocab_size=300)
    validation = ValidationSet(list(open_sources(tmp_path, "val").values()), seq_len, max_tokens=10**6)
    assert validation.bytes_per_token == pytest.approx(4 * len(tokens) / (len(tokens) - 1))
    validation.bytes_per_token = bytes_per_token
    return validation


@pytest.mark.parametrize(("vocab_size", "bytes_per_token"), [(256, 1.0), (65_536, 2.0)])
def test_a_uniform_model_has_eight_bits_a_byte_whatever_its_tokens(tmp_path, vocab_size, bytes_per_token):
    """256 tokens of one byte each, or 65,536 of two: the text is equally unpredictable."""
    validation = validation_set(tmp_path / "bytes", np.arange(50), seq_len=8, bytes_per_token=bytes_per_token)
    result = evaluate(UniformModel(vocab_size), validation.batches(3), 8, bytes_per_token, torch.device("cpu"))
    assert result.bits_per_byte == pytest.approx(8.0) and result.num_tokens == 49
    assert result.loss == pytest.approx(math.log(vocab_size)) and result.perplexity == pytest.approx(vocab_size)


def test_loss_by_position_sees_where_a_model_learns(tmp_path):
    validation = validation_set(tmp_path / "bytes", np.arange(41), seq_len=8, bytes_per_token=1.0)
    result = evaluate(PositionModel(), validation.batches(4), 8, 1.0, torch.device("cpu"))
    for bucket in result.loss_by_position:
        assert bucket["last"] < 4 or bucket["first"] >= 4, "edges of the buckets happen to fit this test"
        assert bucket["loss"] == pytest.approx(math.log(64) if bucket["last"] < 4 else 0.0, abs=1e-5)
    assert sum(bucket["num_tokens"] for bucket in result.loss_by_position) == 40


def test_the_sums_of_ranks_add_up(tmp_path):
    validation = validation_set(tmp_path / "bytes", np.arange(45), seq_len=8, bytes_per_token=1.0)
    whole = evaluate_sums(PositionModel(), validation.batches(2), 8, torch.device("cpu")).tensor
    shares = [
        evaluate_sums(PositionModel(), validation.batches(2, r, 3), 8, torch.device("cpu")).tensor for r in range(3)
    ]
    torch.testing.assert_close(sum(shares), whole)


@pytest.fixture(scope="module")
def run(tiny_corpus, tmp_path_factory):
    """A trained run, as the scripts find it."""
    root = tmp_path_factory.mktemp("runs")
    train(compose_config(TrainConfig, "training", [*tiny_corpus.overrides(root), "max_steps=20", "log_every=10"]))
    return root / "tiny"


def test_evaluating_a_run_agrees_with_its_own_validation(run):
    result = run_evaluation(EvaluateConfig(run=str(run), device="cpu", max_tokens=2048))
    validation = json.loads((run / "report.json").read_text())["validation"]
    assert result.loss == pytest.approx(validation["loss"], rel=1e-6)
    assert result.bits_per_byte == pytest.approx(validation["bits_per_byte"], rel=1e-6)
    written = json.loads((run / "evaluation.json").read_text())
    assert written["checkpoint"] == "step_00000020" and written["loss"] == result.loss


def test_generating_from_a_run_repeats_with_its_seed_and_is_recorded(run, capsys):
    config = dict(run=str(run), prompt="The", max_new_tokens=12, device="cpu")
    first, again, other = (run_generation(GenerateConfig(**config, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other and first[0].startswith("The") and len(first[0]) > 3
    assert first[0] in capsys.readouterr().out
    assert (run / "samples.txt").read_text().count("seed 1 ") >= 2
    several = run_generation(
        GenerateConfig(run=str(run), prompts=["The", "A"], max_new_tokens=12, device="cpu", seed=1)
    )
    assert several[0] == first[0], "a row does not depend on its batch"


@pytest.mark.parametrize(
    ("script", "config", "words"),
    [
        (run_evaluation, lambda run: EvaluateConfig(run="/nowhere"), "is not a directory"),
        (run_evaluation, lambda run: EvaluateConfig(), "give exactly one"),
        (run_evaluation, lambda run: EvaluateConfig(run=str(run), seq_len=64), "must not exceed"),
        (run_generation, lambda run: GenerateConfig(run=str(run), prompt="x " * 40), "shorten it"),
        (run_generation, lambda run: GenerateConfig(run=str(run), temperature=-1), "temperature"),
        (run_generation, lambda run: GenerateConfig(run=str(run), prompts_file="/nowhere"), "prompts_file"),
    ],
)
def test_what_cannot_be_done_is_refused(run, script, config, words):
    with pytest.raises(UserError, match=words):
        script(config(run))
