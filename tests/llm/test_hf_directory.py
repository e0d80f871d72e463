"""Directories that are not what they say: each ends in one line that names what is wrong, and nothing is written."""

import json
from pathlib import Path

import pytest

from configs.errors import UserError
from llm.bpe_tokenizer import Tokenizer

pytest.importorskip("transformers")
hf_models = pytest.importorskip("tests.llm.hf_models")


@pytest.fixture(scope="module")
def tokenizer_files(tiny_corpus, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("hf") / "tokenizer"
    hf_models.write_tokenizer(tiny_corpus.tokenizer, directory)
    return directory


def edit_config(directory: Path, **fields) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gemma2"}, "model_type='gemma2'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "RoPE scaling 'yarn'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config="),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
        ({"num_hidden_layers": 3}, r"model.layers.2.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 1}, r"model.layers.1.input_layernorm.weight is unknown"),
        ({"intermediate_size": 56}, r"model.layers.0.mlp.gate_proj.weight is \[48, 32\] instead of \[56, 32\]"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs"),
        ({"vocab_size": 100}, r"instead of \[100, 32\]"),
        ({"training_seq_len": 10**6}, "training_seq_len=1000000; it must be a whole number in 1..max_position"),
        ({"training_seq_len": "16"}, "training_seq_len='16'"),
        ({"hidden_size": "wide"}, "hidden_size='wide' is no positive whole number"),
        ({"num_attention_heads": 4.5}, "num_attention_heads=4.5"),
        ({"layer_types": 3}, "does not describe a model"),
        ({"model_type": ["llama"]}, r"model_type=\['llama'\]"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3"),
    ],
)
def test_what_a_config_asks_for_and_the_files_do_not_give_is_one_line(tmp_path, tokenizer_files, fields, message):
    hf_models.saved("llama", tmp_path / "theirs", tokenizer_files)
    edit_config(tmp_path / "theirs", **fields)
    with pytest.raises(UserError, match=message) as caught:
        hf_models.imported(tmp_path / "theirs", tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "run").glob("checkpoints/*"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: (d / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda d: (d / "model.safetensors").unlink(), "neither model.safetensors nor"),
        (lambda d: (d / "model.safetensors").write_bytes(b"\xff" * 64), "no readable safetensors"),
        (lambda d: (d / "config.json").write_text("{"), "not valid JSON"),
        (lambda d: (d / "config.json").write_text("[]"), "names no model_type"),
        (
            lambda d: (
                (d / "model.safetensors").unlink(),
                (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}'),
            ),
            "lies elsewhere",
        ),
        (
            lambda d: (
                (d / "model.safetensors").unlink(),
                (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}'),
            ),
            "no readable safetensors",
        ),
    ],
)
def test_broken_directories_are_one_line(tmp_path, tokenizer_files, spoil, message):
    hf_models.saved("llama", tmp_path / "theirs", tokenizer_files)
    spoil(tmp_path / "theirs")
    with pytest.raises(UserError, match=message) as caught:
        hf_models.imported(tmp_path / "theirs", tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(tmp_path, tokenizer_files):
    hf_models.saved("llama", tmp_path / "theirs", tokenizer_files)
    value = json.loads((tmp_path / "theirs/tokenizer.json").read_text())
    value["added_tokens"].append(value["added_tokens"][0] | {"id": 5000, "content": "<far>"})
    (tmp_path / "theirs/tokenizer.json").write_text(json.dumps(value))
    with pytest.raises(UserError, match="smaller than the tokenizer's 5001"):
        hf_models.imported(tmp_path / "theirs", tmp_path / "run")
    assert Tokenizer.load(tokenizer_files).vocab_size <= hf_models.SMALL["vocab_size"]
