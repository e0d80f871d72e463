"""A GGUF file as an HfSource: llama.cpp's names and metadata keys to ours.

Two things are not as in a Hugging Face directory. For architecture "llama" the rows of q_proj and k_proj stand in
another order (llama.cpp turns neighbouring pairs, we turn i with i + D/2), which is undone here; and Llama 3's RoPE
scaling is stored as a tensor of factors, from which its four numbers are found again.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.errors import UserError
from llm.args import ModelConfig, MoeConfig, RopeScaling
from llm.hf_config import family_of
from llm.hf_gguf_file import GgufFile
from llm.hf_gguf_tokenizer import tokenizer_files
from llm.hf_source import HfSource, match_tensors
from llm.hf_tensors import StoredTensor
from llm.transformer import scale_frequencies

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")
MODEL_NAMES = {
    "embedding.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "output.weight": "output.weight",
}
BLOCK_NAMES = {
    "attention_norm": "attn_norm",
    "attention.q_proj": "attn_q",
    "attention.k_proj": "attn_k",
    "attention.v_proj": "attn_v",
    "attention.o_proj": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "ffn_norm": "ffn_norm",
    "ffn.gate_proj": "ffn_gate",
    "ffn.up_proj": "ffn_up",
    "ffn.down_proj": "ffn_down",
    "ffn.router": "ffn_gate_inp",
}
ROPE_FACTORS = "rope_freqs.weight"


def open_gguf(path: str | Path) -> HfSource:
    """Describe a GGUF model without reading its weights; UserError for what is not a model of ours."""
    file = GgufFile(path)
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UserError(
            f"{path} has general.architecture={architecture!r}, not one of {', '.join(ARCHITECTURES)}; use another"
        )
    stored = {name: file.stored(name) for name in file.infos}
    config = described_config(file, architecture)
    stored.pop(ROPE_FACTORS, None)
    if architecture == "llama":
        stored = {name: in_our_order(name, tensor, config) for name, tensor in stored.items()}
    tensors = match_tensors(str(path), config, stored, gguf_names)
    return HfSource(str(path), family_of(config), config, tensors, tokenizer_files(file))


def described_config(file: GgufFile, architecture: str) -> ModelConfig:
    """Our config from the metadata; UserError for what is missing, of a wrong type, or not built."""
    try:
        return gguf_config(file, architecture)
    except KeyError as error:
        raise UserError(f"{file.path} lacks the metadata {error}; fetch the file again") from error
    except (TypeError, AttributeError, ZeroDivisionError, OverflowError) as error:
        raise UserError(f"{file.path} has metadata of a wrong type ({error}); fetch the file again") from error


def gguf_names(name: str) -> list[str]:
    if name in MODEL_NAMES:
        return [MODEL_NAMES[name]]
    _, layer, rest = name.split(".", 2)
    part, _, kind = rest.rpartition(".")
    if part == "ffn":  # stacked experts: a parameter without ".weight"
        return [f"blk.{layer}.{BLOCK_NAMES[rest]}_exps.weight"]
    return [f"blk.{layer}.{BLOCK_NAMES[part]}.{kind}"]


def gguf_config(file: GgufFile, architecture: str) -> ModelConfig:
    """Our config from the metadata; KeyError names a key that is missing."""
    metadata = file.metadata

    def get(key: str) -> Any:
        return metadata[f"{architecture}.{key}"]

    scaling_type = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling_type != "none":
        raise UserError(f"{file.path} has RoPE scaling {scaling_type!r}; only llama3's, as factors, is built")
    heads, width = get("attention.head_count"), get("embedding_length")
    experts = metadata.get(f"{architecture}.expert_count", 0)
    moe = MoeConfig()
    if experts:
        expert_width = metadata.get(f"{architecture}.expert_feed_forward_length", get("feed_forward_length"))
        moe = MoeConfig(experts, get("expert_used_count"), expert_width)
    config = ModelConfig(
        vocab_size=file.infos["token_embd.weight"].shape[0] if "token_embd.weight" in file.infos else get("vocab_size"),
        max_seq_len=get("context_length"),
        d_model=width,
        num_layers=get("block_count"),
        num_heads=heads,
        num_kv_heads=metadata.get(f"{architecture}.attention.head_count_kv", heads),
        head_dim=metadata.get(f"{architecture}.attention.key_length", width // heads),
        d_ff=get("feed_forward_length"),
        rope_theta=float(metadata.get(f"{architecture}.rope.freq_base", 10_000.0)),
        norm_eps=rounded(get("attention.layer_norm_rms_epsilon")),
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture.startswith("qwen3"),
        tie_embeddings="output.weight" not in file.infos,
        moe=moe,
    )
    rotated = metadata.get(f"{architecture}.rope.dimension_count", config.head_dim)
    if rotated != config.head_dim:
        raise UserError(f"{file.path} turns {rotated} of {config.head_dim} dims of a head; only all are built")
    if ROPE_FACTORS in file.infos:
        return replace(config, rope_scaling=scaling_of(file, config))
    return config


def rounded(value: float) -> float:
    """A float32 in the metadata as the short decimal that was meant: 9.999999747378752e-06 is 1e-05."""
    return float(f"{value:.6g}")


def scaling_of(file: GgufFile, config: ModelConfig) -> RopeScaling:
    """Llama 3's scaling whose factors (D/2,) the file holds: the largest one is `factor`, the rest is as published."""
    factors = file.read(ROPE_FACTORS).double().flatten()
    plain = config.rope_theta ** (-torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim)  # (D/2,)
    scaling = RopeScaling(factor=round(float(factors.max()), 3))
    expected = plain / scale_frequencies(plain, scaling)
    if factors.shape != expected.shape or not torch.allclose(factors, expected, rtol=1e-4):
        raise UserError(f"{file.path}: {ROPE_FACTORS} is not Llama 3's RoPE scaling of {scaling}; only that is built")
    return scaling


def in_our_order(name: str, tensor: StoredTensor, config: ModelConfig) -> StoredTensor:
    """Undo llama.cpp's order of rows in q and k: within a head row 2i + j of theirs is row i + j D/2 of ours."""
    part = name.split(".")[-2] if "." in name else ""
    if part not in ("attn_q", "attn_k"):
        return tensor
    heads = config.num_heads if part == "attn_q" else config.num_kv_heads
    return replace(tensor, read=unpermuted(tensor.read, heads, config.head_dim))


def unpermuted(read: Callable[[], Tensor], heads: int, head_dim: int) -> Callable[[], Tensor]:
    def read_in_order() -> Tensor:
        rows = read()  # (H*D, C) or (H*D,)
        return rows.view(heads, head_dim // 2, 2, -1).transpose(1, 2).reshape(rows.shape)

    return read_in_order
