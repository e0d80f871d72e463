"""What the pictures of a run, its corpus and its cache show, read back from the axes, against the numbers."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from llm.args import ModelConfig
from llm.figures_training import SMOOTHED, Run, Twin, draw_cache, draw_corpus, draw_training
from llm.token_files import ShardMeta, TokenMeta


def line_called(axes, label: str):
    (line,) = [line for line in axes.lines if line.get_label().startswith(label)]
    return line


def test_the_smooth_curve_lies_at_the_middle_of_what_it_is_the_mean_of():
    lines = [{"step": step, "loss": 100.0 - step, "grad_norm": 1.0, "lr": 1e-3 * step} for step in range(1, 31)]
    lines.append({"step": 30, "val_loss": 70.0})
    figure = draw_training(Run("x", {"global_batch_tokens": 1_000_000}, lines))
    loss, norm, rate = figure.axes
    tokens, means = line_called(loss, "training, mean of").get_data()
    assert len(tokens) == 30 - SMOOTHED + 1
    np.testing.assert_allclose(means, 100.0 - tokens, atol=0.5)  # an even number has its middle between two steps
    assert line_called(loss, "training, one").get_xdata().tolist() == list(range(1, 31))
    assert line_called(loss, "validation").get_data() == ([30.0], [70.0])
    assert norm.lines[0].get_ydata().tolist() == [1.0] * 30
    assert rate.lines[0].get_ydata()[-1] == pytest.approx(0.03)


def shard(split: str, tokens: int, documents: int, utf8_bytes: int) -> ShardMeta:
    fields = dict(file="x", split=split, tokens=tokens, documents=documents, utf8_bytes=utf8_bytes)
    return SimpleNamespace(**fields)


def test_a_corpus_is_drawn_by_its_training_shares():
    metas = {
        "small": TokenMeta("small", "", 9, 0, "uint16", [shard("train", 50, 9, 100), shard("val", 5000, 700, 9000)]),
        "large": TokenMeta("large", "", 9, 0, "uint16", [shard("train", 75, 1, 300)]),
    }
    shares, length = draw_corpus(metas).axes
    bars = {container.get_label(): [bar.get_width() for bar in container] for container in shares.containers}
    assert list(bars) == ["large", "small"], "the largest first"
    assert bars["large"] == pytest.approx([300 / 400, 75 / 125, 1 / 10])  # bytes, tokens, documents
    assert bars["small"] == pytest.approx([100 / 400, 50 / 125, 9 / 10])
    assert [bar.get_x() for bar in shares.containers[1]] == pytest.approx(bars["large"])
    assert [bar.get_width() for bar in length.containers[0]] == pytest.approx([4.0, 2.0])
    assert "400 bytes, 125 tokens, 10 documents" in shares.get_title(loc="left")


def twin(name: str, kv_heads: int, cache_bytes: int, losses: list[float]) -> Twin:
    lines = [{"step": step, "val_loss": loss} for step, loss in enumerate(losses, start=1)]
    model = ModelConfig(vocab_size=8, num_heads=4, num_kv_heads=kv_heads, d_model=64)
    return Twin(Run(name, {"global_batch_tokens": 1}, lines), model, cache_bytes)


def test_a_cache_is_drawn_in_bfloat16_and_dashed_as_if_all_heads_had_keys():
    model = ModelConfig(vocab_size=8, num_layers=3, num_heads=8, num_kv_heads=2, d_model=512, head_dim=64)
    twins = [twin("mha", 4, 4096, [5.0, 2.0]), twin("mqa", 1, 1024, [6.0, 2.5])]
    left, right = draw_cache({"shape": model}, twins).axes
    own, all_heads = left.lines[:2]
    context = own.get_xdata()
    assert context[0] == 1024 and context[-1] == pytest.approx(131_072)
    np.testing.assert_allclose(own.get_ydata(), 2 * 3 * 2 * 64 * 2 * context / 2**30)  # k and v, L, K, D, bytes
    np.testing.assert_allclose(all_heads.get_ydata(), 4 * own.get_ydata())
    assert all_heads.get_linestyle() == "--" and own.get_linestyle() == "-"
    assert right.lines[0].get_xydata().tolist() == [[4096.0, 2.0], [1024.0, 2.5]]
    assert [text.get_text().split("\n")[0] for text in right.texts] == ["MHA: 4 of 4", "MQA: 1 of 4"]
    assert math.isclose(float(right.texts[1].get_text().split("\n")[1]), 2.5)
