"""What the pictures of text show, read back from the axes: bits per byte by source, and a sample by its confidence."""

import math

import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from llm.args import ModelConfig
from llm.bpe_tokenizer import Tokenizer
from llm.engine import Engine, EngineConfig, RequestParams
from llm.evaluation_text import Text
from llm.evaluation_windows import SourceScore
from llm.figures_text import ShadedToken, draw_bits, draw_sample, sample_tokens, xz_bits_per_byte
from llm.figures_training import Run
from llm.sampling import SamplingConfig
from llm.transformer import Transformer
from llm.transformer_init import initialise
from tests.tolerances import FP32_FORWARD


def test_each_source_stands_beside_its_own_compressor_the_best_first():
    scores = {name: SourceScore(name, 1, 10, 100, bits * 100 * math.log(2)) for name, bits in (("a", 3.0), ("b", 1.0))}
    lines = [{"step": 2, "val_bits_per_byte": 2.5}]
    run = Run("mine", {"global_batch_tokens": 1_000_000}, lines)
    over, by_source = draw_bits([run], scores, {"a": 5.0, "b": 4.0}).axes
    assert over.lines[0].get_data() == ([2.0], [2.5])
    assert [label.get_text() for label in by_source.get_yticklabels()] == ["b", "a"]
    bars = {container.get_label(): [bar.get_width() for bar in container] for container in by_source.containers}
    assert bars == {"mine": pytest.approx([1.0, 3.0]), "xz -9 on this text alone": [4.0, 5.0]}


def test_a_compressor_is_divided_by_bytes_source_by_source():
    texts = [Text("wide", "0", "\u20ac" * 4000), Text("narrow", "1", "e" * 4000)]  # three bytes, and one
    bits = xz_bits_per_byte(texts)
    assert bits["wide"] < bits["narrow"] < 8, "the same few bytes of xz over three times as many bytes of text"


@pytest.fixture(scope="module")
def sampler(tiny_corpus):
    tokenizer = Tokenizer.load(tiny_corpus.tokenizer)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, max_seq_len=32, d_model=32, num_layers=1, num_heads=2, d_ff=48
    )
    model = Transformer(config)
    initialise(model, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)  # a fresh model hardly looks at its context; this one does
    return model.eval(), tokenizer


def test_a_sampled_token_has_the_probability_that_the_model_gives_it_after_the_prompt(sampler):
    model, tokenizer = sampler
    engine = Engine(model, EngineConfig(max_running=1, num_ids=tokenizer.vocab_size, fuse=False), tokenizer)
    params = RequestParams(SamplingConfig(temperature=0.0), 1, top_log_probs=3)
    (token,) = sample_tokens(engine, tokenizer, "The cat", params)
    ids = [tokenizer.eot_id, *tokenizer.encode("The cat")]
    with torch.no_grad():
        expected, best = model(torch.tensor([ids]))[0, -1].softmax(-1).topk(3)
    assert token.text == tokenizer.decode(best[:1].tolist())
    assert token.probability == pytest.approx(expected[0].item(), rel=FP32_FORWARD)
    assert [text for text, _ in token.alternatives] == [tokenizer.decode([i]) for i in best.tolist()]
    assert [p for _, p in token.alternatives] == pytest.approx(expected.tolist(), rel=FP32_FORWARD)


def test_an_unlikely_token_has_the_darker_shade():
    tokens = [ShadedToken("sure", 1.0, []), ShadedToken("odd", 1e-4, []), ShadedToken("so", 0.1, [])]
    axes = draw_sample("Go", tokens, "title").axes[0]
    patches = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    light = [sum(to_rgb(patch.get_facecolor())) for patch in patches]
    assert len(patches) == 3, "the prompt has no shade"
    assert light[0] == pytest.approx(3.0) and light[1] < light[2] < light[0]
    assert [patch.get_x() for patch in patches] == [2, 6, 9] and [patch.get_width() for patch in patches] == [4, 3, 2]
    assert "".join(text.get_text() for text in axes.texts) == "Gosureoddso"
