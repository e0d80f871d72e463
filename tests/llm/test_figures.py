"""Every figure is drawn from a real run; the parts of them that compute something, against formulas."""

import json
import lzma
import math
import shutil

import numpy as np
import pytest
import torch
import yaml

from configs.errors import UserError
from configs.loader import compose_config
from llm.args import TrainConfig
from llm.evaluation_attention import attention_maps
from llm.evaluation_context import Targets, losses_by_context
from llm.evaluation_windows import ScoreConfig, TextScorer, sum_by_source
from llm.figures import FIGURES, draw_all
from llm.figures_material import FiguresConfig, Material
from llm.figures_positions import rope_product
from llm.figures_standing import STANDING
from llm.figures_text import COLUMNS, LINES, ShadedToken, layout, short, surprises, xz_bits_per_byte
from llm.figures_training import Run
from llm.training import train
from llm.transformer import RoPE
from tests.tolerances import FP32_FORWARD

SMALL = dict(shapes=["llama-3.2-1b"], new_tokens=12, max_bytes=3000, max_tokens=512, context_targets=20, device="cpu",
             scaling_min_tokens=1, prompt="The cat", text="The cat ran home and ate.")  # fmt: skip


@pytest.fixture(scope="module")
def runs(tiny_corpus, tmp_path_factory):
    """A run whose model may read further than it was trained to, and a twin with one kv head."""
    root = tmp_path_factory.mktemp("runs")
    for name, heads in (("figures", 2), ("figures-kv1", 1)):
        overrides = [*tiny_corpus.overrides(root), f"name={name}", "max_steps=8", "validate_every=4", "data.seq_len=16",
                     f"model.num_kv_heads={heads}", "model.vocab_size=384"]  # fmt: skip
        train(compose_config(TrainConfig, "training", overrides))
    return root


@pytest.fixture
def few_standing(monkeypatch):
    """Without the plan of a 7B model, which takes seconds and has its own tests."""
    monkeypatch.delitem(STANDING, "plan_7b_memory")


def config_of(runs, tmp_path, **changes) -> FiguresConfig:
    settings = dict(run=str(runs / "figures"), twins=[str(runs / "figures-kv*")], output=str(tmp_path)) | SMALL
    return FiguresConfig(**settings | {"scaling": [str(runs / "none-*")]} | changes)


def test_every_figure_with_data_is_drawn_and_the_others_are_named(runs, few_standing, tmp_path, capsys):
    left_out = draw_all(config_of(runs, tmp_path))
    assert list(left_out) == ["scaling_laws"] and "holds no run" in left_out["scaling_laws"]
    for name in (FIGURES.keys() | STANDING.keys()) - left_out.keys():
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG", name
        assert (tmp_path / f"{name}.pdf").read_bytes()[:4] == b"%PDF", name
    written = json.loads((tmp_path / "figures.json").read_text())
    assert set(written) == (FIGURES.keys() | STANDING.keys()) - left_out.keys()
    kv = written["kv_cache"]["numbers"]
    assert written["rope"]["run"] == str(runs / "figures") and written["rope"]["settings"]["max_tokens"] == 512
    assert kv["figures"]["cache_bytes_per_token"] == 2 * kv["figures-kv1"]["cache_bytes_per_token"] == 2 * 2 * 2 * 8 * 4
    assert written["confidence_sample"]["numbers"]["text"].startswith("The cat")
    context = written["context_utilisation"]["numbers"]
    assert [entry["context"] for entry in context["by_context"]] == [1, 2, 4, 8, 16] and context["beyond"]
    assert "left out scaling_laws" in capsys.readouterr().out


def test_a_figure_asked_for_by_name_that_cannot_be_drawn_is_an_error(runs, tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        draw_all(config_of(runs, tmp_path, only=["scaling_laws"]))
    with pytest.raises(UserError, match="only='portrait' is unknown"):
        draw_all(config_of(runs, tmp_path, only=["portrait"]))
    with pytest.raises(UserError, match="is not a run directory"):
        draw_all(config_of(runs, tmp_path, run=str(tmp_path)))
    with pytest.raises(UserError, match="name files of configs/model"):
        draw_all(config_of(runs, tmp_path, only=["kv_cache"], shapes=["no-such"]))


def test_twins_that_differ_in_more_than_kv_heads_are_refused(runs, tmp_path):
    other = tmp_path / "figures-kv9"
    other.mkdir()
    shutil.copy(runs / "figures" / "metrics.jsonl", other)
    config = yaml.safe_load((runs / "figures" / "config.yaml").read_text())
    config["model"]["d_ff"] += 8
    (other / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(UserError, match="differs from figures in more than"):
        Material(config_of(runs, tmp_path, twins=[str(other)])).twins()


def test_equal_runs_give_equal_files(runs, tmp_path):
    for name in ("a", "b"):
        draw_all(config_of(runs, tmp_path / name, only=["training_curves"]))
    for suffix in ("png", "pdf"):
        first, second = ((tmp_path / name / f"training_curves.{suffix}").read_bytes() for name in ("a", "b"))
        assert first == second


def test_ropes_product_is_the_mean_cosine():
    rope, distances = RoPE(16, 1e4), torch.tensor([0, 1, 7, 300])
    frequencies = 1e4 ** (-np.arange(0, 16, 2) / 16)
    expected = np.cos(np.outer(distances.numpy(), frequencies)).mean(1)
    np.testing.assert_allclose(rope_product(rope, 16, distances), expected, atol=FP32_FORWARD)


def test_columns_of_a_run_are_by_training_tokens():
    lines = [{"step": 1, "loss": 3.0}, {"step": 2, "val_loss": 2.5}, {"step": 4, "loss": None}, {"step": 5, "loss": 2}]
    tokens, values = Run("x", {"global_batch_tokens": 1_000_000}, lines).column("loss")
    assert tokens.tolist() == [1.0, 5.0] and values.tolist() == [3.0, 2.0]
    assert Run("x", {"global_batch_tokens": 1}, lines).column("mfu")[0].shape == (0,)


def test_the_sample_is_laid_out_by_lines_and_columns():
    placed = layout([("ab\ncd", None), ("x" * (COLUMNS + 3), 0.5), ("\n\n", 0.1)])
    assert placed[:3] == [(0, 0, "ab", None), (0, 2, "\u21b5", None), (1, 0, "cd", None)]
    assert [(line, column, len(text)) for line, column, text, _ in placed[3:5]] == [(1, 2, COLUMNS - 2), (2, 0, 5)]
    assert [entry[0] for entry in placed[5:]] == [2, 3]
    assert max(line for line, *_ in layout([("y\n" * 200, 0.5)])) == LINES - 1


def test_surprises_are_the_least_likely_tokens_first():
    tokens = [ShadedToken(t, p, [("the", 0.5)]) for t, p in (("a", 0.9), ("b", 0.001), ("c", 0.2))]
    lines = surprises(tokens, count=2).split("\n")
    assert "'b' 1.0e-03" in lines[1] and "'c'" in lines[2] and len(lines) == 3
    assert short("ab") == "'ab'" and len(short("abcdefghijklmnop")) == 11


def test_a_picture_of_the_model_begins_with_end_of_text_and_leaves_padded_ids_out(runs, tmp_path):
    material = Material(config_of(runs, tmp_path))
    model, tokenizer = material.loaded.model, material.loaded.tokenizer
    attention, _ = FIGURES["attention_heads"](material)
    ids = torch.tensor([[tokenizer.eot_id, *tokenizer.encode(SMALL["text"])]])
    expected = attention_maps(model, ids)[0].flatten(0, 1)  # (L x H, T, T)
    for axes, one in zip(attention.axes, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(axes.images[0].get_array().data), one.sqrt())
    embeddings, _ = FIGURES["embedding_map"](material)
    assert model.config.vocab_size > tokenizer.vocab_size, "or the next line shows nothing"
    assert sum(len(dots.get_offsets()) for dots in embeddings.axes[0].collections) == tokenizer.vocab_size


def test_the_numbers_of_text_are_those_of_half_overlapping_windows_and_of_end_of_text_first(runs, tmp_path):
    material = Material(config_of(runs, tmp_path))
    model, tokenizer, cpu = material.loaded.model, material.loaded.tokenizer, torch.device("cpu")
    _, bits = FIGURES["bits_per_byte"](material)
    (score,) = sum_by_source(TextScorer(model, tokenizer, ScoreConfig(16, 8), cpu).score(material.texts)).values()
    assert bits["stories"]["model"] == pytest.approx(score.bits_per_byte)
    assert bits["stories"]["xz"] == xz_bits_per_byte(material.texts)["stories"]
    assert bits["stories"]["bytes"] == sum(len(text.text.encode()) for text in material.texts) <= SMALL["max_bytes"]
    _, context = FIGURES["context_utilisation"](material)
    rows = [np.array([tokenizer.eot_id, *tokenizer.encode(text.text)]) for text in material.texts]
    expected = losses_by_context(model, Targets.draw(rows, 16, SMALL["context_targets"]), 64)
    assert [entry["loss"] for entry in context["by_context"]] == pytest.approx([entry.loss for entry in expected])
    assert context["beyond"][-1]["last"] == 31 and material.loss_by_position(16)[-1]["last"] == 15


def test_a_compressor_is_measured_in_bits_per_byte(runs, tmp_path):
    texts = Material(config_of(runs, tmp_path)).texts
    ((source, bits),) = xz_bits_per_byte(texts).items()
    joined = b"\n".join(text.text.encode() for text in texts)
    assert source == "stories" and lzma.decompress(lzma.compress(joined, preset=9)) == joined
    assert bits == pytest.approx(8 * len(lzma.compress(joined, preset=9)) / len(joined)) and 0 < bits < 8
    assert not math.isnan(bits)
