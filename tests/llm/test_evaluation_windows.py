"""Sliding windows and the losses by token and by block, against one forward pass a token."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from configs.errors import UserError
from configs.loader import compose_config
from llm.args import ModelConfig, TrainConfig
from llm.bpe_tokenizer import Tokenizer
from llm.evaluating import EvaluateConfig, run_evaluation
from llm.evaluation_text import Text
from llm.evaluation_windows import BLOCK_BYTES, ScoreConfig, TextScorer, sliding_windows, sum_by_source
from llm.training import train
from llm.transformer import Transformer
from llm.transformer_init import initialise
from tests.tolerances import FP32_FORWARD

CPU = torch.device("cpu")
TEXTS = [
    Text("a", "0", "The quick brown fox jumps over the lazy dog, and the dog does not mind it much."),
    Text("b", "1", "é€😀 naïve"),
    Text("a", "2", "x"),
]


class UniformModel(nn.Module):
    """Gives each of `vocab_size` ids the same probability."""

    def __init__(self, vocab_size: int):
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, token_ids, ctx):
        return torch.zeros(*token_ids.shape, self.vocab_size)


@pytest.fixture(scope="module")
def tokenizer(tiny_corpus):
    return Tokenizer.load(tiny_corpus.tokenizer)


@pytest.fixture(scope="module")
def model(tokenizer):
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, max_seq_len=16, d_model=32, num_layers=2, num_heads=4, d_ff=48
    )
    model = Transformer(config)
    initialise(model, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8.0)  # a fresh model hardly looks at its context; this one does
    return model.eval()


@pytest.mark.parametrize("num_targets", [1, 7, 8, 9, 12, 13, 40])
@pytest.mark.parametrize("stride", [1, 3, 8])
def test_windows_count_each_target_once_with_enough_context(num_targets, stride):
    seq_len, counted = 8, []
    for window in sliding_windows(num_targets, seq_len, stride):
        assert 0 <= window.begin <= window.counted < window.end <= num_targets and window.end - window.begin <= seq_len
        assert window.begin == 0 or window.counted - window.begin >= seq_len - stride
        counted += range(window.counted, window.end)
    assert counted == list(range(num_targets))


def nats_by_hand(model, tokenizer, text, seq_len, stride):
    """One forward pass a token: what the window that counts it would see, and nothing behind it."""
    row = [tokenizer.eot_id, *tokenizer.encode(text)]
    nats = []
    for window in sliding_windows(len(row) - 1, seq_len, stride):
        for target in range(window.counted, window.end):
            logits = model(torch.tensor([row[window.begin : target + 1]]))[0, -1]
            nats.append(-torch.log_softmax(logits.double(), -1)[row[target + 1]].item())
    return np.array(nats)


@pytest.mark.parametrize(("seq_len", "stride", "batch_size"), [(16, 16, 4), (16, 5, 3), (7, 1, 8)])
def test_scores_match_one_forward_pass_a_token(model, tokenizer, seq_len, stride, batch_size):
    scorer = TextScorer(model, tokenizer, ScoreConfig(seq_len, stride, batch_size), CPU)
    scored = list(scorer.score(TEXTS))
    assert [one.text for one in scored] == TEXTS
    for one in scored:
        expected = nats_by_hand(model, tokenizer, one.text.text, seq_len, stride)
        np.testing.assert_allclose(one.token_nats, expected, rtol=FP32_FORWARD, atol=FP32_FORWARD)
    total = sum(one.nats for one in scored)
    result = scorer.sums.result(1.0)
    assert result.num_tokens == sum(len(one.token_ids) for one in scored)
    assert result.loss * result.num_tokens == pytest.approx(total, rel=1e-6)


def test_more_context_changes_the_score(model, tokenizer):
    """The test above would pass with a model that ignores its context; this one fails then."""
    by_stride = [list(TextScorer(model, tokenizer, ScoreConfig(8, s), CPU).score(TEXTS[:1])) for s in (8, 1)]
    assert abs(by_stride[0][0].nats - by_stride[1][0].nats) > 0.1


def test_a_uniform_model_has_log2_of_the_vocabulary_a_token_over_the_exact_bytes(tokenizer):
    scorer = TextScorer(UniformModel(1024), tokenizer, ScoreConfig(16, 4), CPU)
    by_source = sum_by_source(scorer.score(TEXTS))
    assert list(by_source) == ["a", "b"] and by_source["a"].documents == 2
    for name, score in by_source.items():
        texts = [text.text for text in TEXTS if text.source == name]
        num_tokens, num_bytes = sum(len(tokenizer.encode(t)) for t in texts), sum(len(t.encode()) for t in texts)
        assert (score.num_tokens, score.num_bytes) == (num_tokens, num_bytes)
        assert score.bits_per_byte == pytest.approx(10 * num_tokens / num_bytes)
        assert score.perplexity == pytest.approx(1024)


def test_blocks_hold_all_bytes_and_all_nats(tokenizer):
    text = Text("long", "0", "Words é € " * 1500)
    (one,) = TextScorer(UniformModel(512), tokenizer, ScoreConfig(64, 64), CPU).score([text])
    assert len(one.block_bytes) == -(-text.num_bytes // BLOCK_BYTES) > 3
    assert one.block_bytes.sum() == text.num_bytes and one.block_bytes[:-1].tolist() == [BLOCK_BYTES] * 4
    assert one.block_nats.sum() == pytest.approx(one.nats)
    per_token = math.log(512)
    first_block_tokens = round(one.block_nats[0] / per_token)
    begins = len(tokenizer.decode_bytes(one.token_ids[:first_block_tokens]))
    assert begins >= BLOCK_BYTES > begins - len(tokenizer.token_bytes(int(one.token_ids[first_block_tokens - 1])))


@pytest.mark.parametrize("stride", [0, 9, -1])
def test_a_stride_that_leaves_tokens_out_is_refused(stride):
    with pytest.raises(UserError, match=r"must lie in 1\.\.seq_len=8"):
        ScoreConfig(8, stride)


def test_the_script_scores_a_file_and_records_it(tiny_corpus, tmp_path, capsys):
    train(compose_config(TrainConfig, "training", [*tiny_corpus.overrides(tmp_path), "max_steps=2"]))
    (tmp_path / "mine.txt").write_text(TEXTS[0].text)
    config = dict(run=str(tmp_path / "tiny"), text=str(tmp_path / "mine.txt"), device="cpu")
    result = run_evaluation(EvaluateConfig(**config, stride=4))
    written = json.loads((tmp_path / "tiny" / "evaluation_text.json").read_text())
    assert written["sources"][0]["source"] == "mine" and written["num_bytes"] == len(TEXTS[0].text)
    assert written["bits_per_byte"] == result.total.bits_per_byte
    assert f"bits per byte {result.total.bits_per_byte:.4f}" in capsys.readouterr().out
    assert written["loss"] == result.total.nats / result.total.num_tokens
    with pytest.raises(UserError, match="exclude each other"):
        EvaluateConfig(**config, tokens="data/x/tokens")
    for name in ("stride", "seq_len", "max_bytes", "batch_size"):
        with pytest.raises(UserError, match=f"{name}=0 must be positive"):
            EvaluateConfig(**config | {name: 0})


def test_all_sources_add_up_and_windows_overlap_by_half_unless_told_otherwise(tiny_corpus, tmp_path):
    train(compose_config(TrainConfig, "training", [*tiny_corpus.overrides(tmp_path / "runs"), "max_steps=2"]))
    (tmp_path / "texts").mkdir()
    for number, name in enumerate(("one", "two", "three"), start=1):
        (tmp_path / "texts" / f"{name}.txt").write_text(TEXTS[0].text * number)
    config = dict(run=str(tmp_path / "runs" / "tiny"), text=str(tmp_path / "texts"), device="cpu")
    found, half, none = (run_evaluation(EvaluateConfig(**config, stride=stride)) for stride in (None, 16, 32))
    assert {source.source for source in found.sources} == {"one", "two", "three"}
    for name in ("documents", "num_bytes", "num_tokens", "nats"):
        total = sum(getattr(source, name) for source in found.sources)
        assert getattr(found.total, name) == pytest.approx(total), name
    assert found.total.nats == half.total.nats != none.total.nats
