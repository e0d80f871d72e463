"""GGUF: blocks beside the `gguf` package, whole files beside transformers, hostile files, and the real SmolLM2.

The real file is looked for in data/hf/ (docs/hugging_face.md says how to get it); its test is skipped without it.
"""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import UserError
from llm.args import ModelConfig, MoeConfig, RopeScaling
from llm.bpe_tokenizer import Tokenizer
from llm.chat_template import load_chat_template, stop_ids
from llm.generating_loop import GenerationLimits, generate
from llm.hf_checkpoint import write_checkpoint
from llm.hf_directory_write import write_directory
from llm.hf_gguf import described_config, gguf_names, open_gguf
from llm.hf_gguf_blocks import FORMATS, dequantise
from llm.hf_gguf_file import GgufFile
from llm.hf_gguf_tokenizer import tokenizer_files
from llm.model_loading import load_model
from llm.sampling import SamplingConfig
from llm.transformer import RoPE, Transformer
from llm.transformer_init import initialise
from tests.tolerances import FP32_FORWARD

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
SMOLLM2 = ROOT / "data/hf/SmolLM2-135M-Instruct.Q4_1.gguf"
SHAPE = {
    "vocab_size": 320, "max_seq_len": 64, "d_model": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "d_ff": 96,
}  # fmt: skip
SHAPES = {
    "llama": ModelConfig(**SHAPE, tie_embeddings=True),
    "llama_scaled": ModelConfig(**SHAPE, rope_theta=5e5, rope_scaling=RopeScaling(factor=32.0)),
    "qwen2": ModelConfig(**SHAPE, qkv_bias=True, norm_eps=1e-6),
    "qwen3": ModelConfig(**SHAPE, qk_norm=True, head_dim=32),
    "qwen3moe": ModelConfig(**SHAPE, qk_norm=True, moe=MoeConfig(4, 2, 32)),
}


def random_blocks(kind: int, count: int) -> np.ndarray:
    """Bytes of `count` blocks with random contents and finite scales."""
    generator = np.random.default_rng(kind)
    form = FORMATS[kind]
    raw = generator.integers(0, 256, (count, form.record.itemsize), dtype=np.uint8)
    blocks = raw.view(form.record)[:, 0]
    for name in {"d", "m", "dmin"} & set(form.record.names):
        blocks[name] = generator.normal(size=count).astype(np.float16)
    return raw


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: FORMATS[kind].name)
def test_blocks_unpack_as_the_gguf_package_does_bit_for_bit(kind, monkeypatch):
    monkeypatch.setattr("llm.hf_gguf_blocks.CHUNK_BLOCKS", 7)  # several chunks, the last one shorter
    raw = random_blocks(kind, 50)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType(kind))
    assert FORMATS[kind].name == gguf.GGMLQuantizationType(kind).name
    assert np.array_equal(dequantise(raw.reshape(-1), FORMATS[kind]), expected.reshape(-1))


def write_gguf(path: Path, name: str, tokenizer: Tokenizer, quantise: str | None = None) -> Transformer:
    """A GGUF file as llama.cpp's converter writes it, by the gguf package, and the model that is in it."""
    config = SHAPES[name]
    architecture = name.split("_")[0]
    model = Transformer(config).eval()
    initialise(model, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0) if parameter.ndim > 1 else parameter.uniform_(0.5, 1.5)
    writer = gguf.GGUFWriter(path, architecture)
    write_metadata(writer, config, tokenizer)
    with torch.no_grad():
        for own, parameter in model.named_parameters():
            (foreign,) = gguf_names(own)
            values = parameter.clone()
            if architecture == "llama" and foreign.split(".")[-2] in ("attn_q", "attn_k"):
                values = permuted(values, config.head_dim)
            if quantise is not None and parameter.ndim > 1:
                kind = gguf.GGMLQuantizationType[quantise]
                packed = gguf.quantize(values.numpy(), kind)
                writer.add_tensor(foreign, packed, raw_dtype=kind)
                parameter.copy_(in_place_of(values, packed, kind, foreign, config))
            else:
                writer.add_tensor(foreign, values.numpy())
    if config.rope_scaling is not None:
        scaled = model.rope.frequency_bits.view(torch.float64)
        plain = RoPE(config.head_dim, config.rope_theta).frequency_bits.view(torch.float64)
        writer.add_tensor("rope_freqs.weight", (plain / scaled).float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def in_place_of(values, packed, kind, foreign, config) -> torch.Tensor:
    """What the packed tensor holds, in our order of rows."""
    unpacked = torch.from_numpy(gguf.dequantize(packed, kind).reshape(values.shape))
    if config.qkv_bias or config.qk_norm or foreign.split(".")[-2] not in ("attn_q", "attn_k"):
        return unpacked
    heads = values.shape[0] // config.head_dim
    return unpacked.view(heads, -1, 2, values.shape[1]).transpose(1, 2).reshape(values.shape)


def permuted(values: torch.Tensor, head_dim: int) -> torch.Tensor:
    """LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py."""
    heads = values.shape[0] // head_dim
    return values.reshape(heads, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(values.shape)


def write_metadata(writer, config: ModelConfig, tokenizer: Tokenizer) -> None:
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_seq_len)
    writer.add_embedding_length(config.d_model)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    if config.moe.num_experts:
        writer.add_expert_count(config.moe.num_experts)
        writer.add_expert_used_count(config.moe.experts_per_token)
        writer.add_expert_feed_forward_length(config.moe.d_ff)
    value = json.loads(tokenizer.content)
    vocab = sorted(value["model"]["vocab"], key=value["model"]["vocab"].get)
    special = {token["content"] for token in value["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocab)
    writer.add_token_types([3 if token in special else 1 for token in vocab])
    writer.add_token_merges([" ".join(pair) for pair in value["model"]["merges"]])
    writer.add_eos_token_id(tokenizer.eot_id)
    writer.add_chat_template("{{ messages[0]['content'] }}")


@pytest.fixture(scope="module")
def tokenizer(tiny_corpus) -> Tokenizer:
    return Tokenizer.load(tiny_corpus.tokenizer)


@pytest.mark.parametrize("name", SHAPES)
def test_a_file_as_llama_cpp_writes_it_imports_bit_for_bit(name, tmp_path, tokenizer):
    model = write_gguf(tmp_path / "model.gguf", name, tokenizer)
    source = open_gguf(tmp_path / "model.gguf")
    assert source.config == SHAPES[name]
    checkpoint = write_checkpoint(source, tmp_path / "run")
    ours, read_back, _ = load_model(checkpoint, torch.device("cpu"))
    expected = dict(model.named_parameters())
    assert all(torch.equal(tensor, expected[key]) for key, tensor in ours.named_parameters())
    text = "Once upon a time<|endoftext|> there was 12"
    assert read_back.encode(text, "all") == tokenizer.encode(text, "all")
    assert (checkpoint / "chat_template.jinja").read_text() == "{{ messages[0]['content'] }}"
    assert json.loads((checkpoint / "generation_config.json").read_text())["eos_token_id"] == tokenizer.eot_id


def by_transformers(path: Path):
    """The model as transformers dequantises it; older versions do so unasked."""
    asks = hasattr(transformers, "GgufConfig")
    config = {"quantization_config": transformers.GgufConfig(dequantize=True)} if asks else {}
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(path.parent, gguf_file=path.name, dtype=torch.float32, **config).eval()


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "F16"])
def test_logits_of_a_quantised_file_match_transformers(kind, tmp_path, tokenizer):
    model = write_gguf(tmp_path / "model.gguf", "llama", tokenizer, quantise=kind)
    theirs = by_transformers(tmp_path / "model.gguf")
    ours, _, _ = load_model(write_checkpoint(open_gguf(tmp_path / "model.gguf"), tmp_path / "run"), torch.device("cpu"))
    ids = torch.arange(40)[None] * 7 % 320
    with torch.inference_mode():
        expected = theirs(ids).logits
        assert (ours(ids) - expected).abs().max() <= FP32_FORWARD * expected.abs().max()
        assert torch.equal(ours(ids), model(ids))


@pytest.fixture(scope="module")
def good_file(tmp_path_factory, tokenizer) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, "llama", tokenizer, quantise="Q8_0")
    return path.read_bytes()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_refused_in_one_line_or_read(good_file, tmp_path_factory, data):
    head = 12_000  # metadata, vocabulary and descriptions lie here, the weights behind
    place = data.draw(st.integers(0, head))
    damaged = bytearray(good_file)
    if data.draw(st.booleans()):
        damaged[place : place + 8] = struct.pack(
            "<Q", data.draw(st.sampled_from([0, 1, 2**31, 2**40, 2**63, 2**64 - 1]))
        )
    else:
        damaged = damaged[:place]
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        source = open_gguf(path)
        for _, tensor in source.tensors:
            assert tensor.read().shape == tensor.shape
    except UserError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda raw: b"GGML" + raw[4:], "does not begin with GGUF"),
        (lambda raw: raw[:4] + struct.pack("<I", 1) + raw[8:], "version 1"),
        (lambda raw: raw[:-1000], "ends beyond the file"),
        (lambda raw: raw[:8] + struct.pack("<Q", 2**60) + raw[16:], "tensors in"),
        (lambda raw: raw[:16] + struct.pack("<Q", 2**60) + raw[24:], "no whole GGUF file"),
        (lambda raw: raw.replace(b"blk.0.attn_q.weight", b"blk.0.attn_x.weight"), "blk.0.attn_q.weight is missing"),
        (
            lambda raw: raw.replace(b"\x04\x00\x00\x00\x00\x00\x00\x00gpt2", b"\x04\x00\x00\x00\x00\x00\x00\x00bert"),
            "'bert'",
        ),
        (lambda raw: raw.replace(b"gpt-2", b"gpt-9"), "tokenizer.ggml.pre='gpt-9'"),
        (lambda raw: raw.replace(b"llama.block_count", b"llama.block_cound"), "lacks the metadata 'llama.block_count'"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(good_file, tmp_path, spoil, message):
    (tmp_path / "model.gguf").write_bytes(spoil(good_file))
    with pytest.raises(UserError, match=message):
        open_gguf(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokenizer.ggml.tokens": [1, 2]}, "lacks tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": None}, "lacks tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "1 token types"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "none of its 320 tokens"),
        ({"tokenizer.ggml.bos_token_id": "x"}, "bos_token_id='x'"),
        ({"tokenizer.ggml.model": "llama"}, "only byte-level BPE"),
    ],
)
def test_a_tokenizer_that_a_file_does_not_hold_is_named(good_file, tmp_path, fields, message):
    (tmp_path / "model.gguf").write_bytes(good_file)
    file = GgufFile(tmp_path / "model.gguf")
    file.metadata |= fields
    with pytest.raises(UserError, match=message):
        tokenizer_files(file)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"llama.attention.head_count": "many"}, "metadata of a wrong type"),
        ({"llama.embedding_length": None}, "metadata of a wrong type"),
        ({"llama.attention.head_count": 0}, "metadata of a wrong type"),
        ({"llama.rope.scaling.type": "yarn"}, "RoPE scaling 'yarn'"),
        ({"llama.rope.dimension_count": 8}, "turns 8 of 16 dims"),
        ({"llama.attention.head_count_kv": 3}, "num_kv_heads=3"),
    ],
)
def test_metadata_that_describes_no_model_of_ours_is_named(good_file, tmp_path, fields, message):
    (tmp_path / "model.gguf").write_bytes(good_file)
    file = GgufFile(tmp_path / "model.gguf")
    file.metadata |= fields
    with pytest.raises(UserError, match=message):
        described_config(file, "llama")


def test_scaling_factors_that_are_not_llama3s_are_refused(tmp_path, tokenizer):
    write_gguf(tmp_path / "model.gguf", "llama_scaled", tokenizer)
    file = GgufFile(tmp_path / "model.gguf")
    raw = bytearray((tmp_path / "model.gguf").read_bytes())
    place = file.infos["rope_freqs.weight"].offset
    raw[place : place + 4] = struct.pack("<f", 3.0)
    (tmp_path / "model.gguf").write_bytes(raw)
    with pytest.raises(UserError, match="is not Llama 3's"):
        open_gguf(tmp_path / "model.gguf")


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.exists(), reason=f"{SMOLLM2} is not there; docs/hugging_face.md says how to get it")
def test_smollm2_and_its_export_match_transformers(tmp_path):
    theirs = by_transformers(SMOLLM2)
    checkpoint = write_checkpoint(open_gguf(SMOLLM2), tmp_path / "run")
    ours, tokenizer, _ = load_model(checkpoint, torch.device("cpu"))
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.encode(load_chat_template(checkpoint).render(messages), "all")
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits
        found = ours(torch.tensor([ids]))
    assert (found - expected).abs().max() <= FP32_FORWARD * expected.abs().max()
    (tokens,) = generate(ours, [ids], SamplingConfig(temperature=0.0), GenerationLimits(12, stop_ids(checkpoint)))
    assert "Paris" in tokenizer.decode(tokens)
    write_directory(checkpoint, tmp_path / "back", None, 10**9)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    fast = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert fast.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == tokenizer.decode(ids)
    assert fast(tokenizer.decode(ids))["input_ids"] == ids
    for model in (theirs, back):
        made = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
        assert tokens == made
