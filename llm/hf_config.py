"""config.json of Hugging Face to our ModelConfig and back.

A family (model_type) is a set of shapes that our model has by config alone. Whatever a config.json asks for beyond
them (sliding windows, other activations, other RoPE scalings, quantised weights) is refused by name: a model that runs
but computes something else is the worst outcome.
"""

from typing import Any

import torch

from configs.errors import UserError
from llm.args import ModelConfig, MoeConfig, RopeScaling

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
# What a config.json leaves out has the value of the family's class in transformers, not of ours.
DEFAULTS = {
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    "mistral": {"rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "num_key_value_heads": 8},
    "qwen2": {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
    "mixtral": {
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_key_value_heads": 8, "num_local_experts": 8,
        "num_experts_per_tok": 2, "rope_theta": 1e6,
    },
    "qwen3_moe": {
        "rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 4, "num_experts_per_tok": 8,
        "norm_topk_prob": False, "moe_intermediate_size": 768,
    },
}  # fmt: skip
# Values that change what is computed, and the only ones that our model computes.
FIXED = {
    "hidden_act": (None, "silu"),
    "mlp_bias": (None, False),
    "use_sliding_window": (None, False),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "mlp_only_layers": (None, []),
    "decoder_sparse_step": (None, 1),
    "shared_expert_intermediate_size": (None, 0),
}
TRAINING_SEQ_LEN = "training_seq_len"  # ours alone: positions that the model may take (max_position_embeddings) and the
# window that it has seen differ, and evaluation uses the second; transformers and vLLM keep or drop the field unread


def read_config(value: Any, where: str) -> tuple[ModelConfig, str]:
    """Our config and the family from a parsed config.json; UserError for what our model cannot compute."""
    if not isinstance(value, dict) or "model_type" not in value:
        raise UserError(f"{where} names no model_type; use the config.json of a causal language model")
    family = value["model_type"]
    if not isinstance(family, str) or family not in FAMILIES:
        raise UserError(f"{where} has model_type={family!r}, which is not read; use one of {', '.join(FAMILIES)}")
    value = DEFAULTS[family] | {key: entry for key, entry in value.items() if entry is not None}
    try:
        refuse_foreign(value, family, where)
        return model_config(value, family, where), family
    except UserError:
        raise
    except KeyError as error:
        raise UserError(f"{where} lacks {error}; fetch the file again") from error
    except (TypeError, AttributeError, ValueError, OverflowError) as error:
        raise UserError(f"{where} does not describe a model ({error}); fetch the file again") from error


def refuse_foreign(value: dict[str, Any], family: str, where: str) -> None:
    for name, allowed in FIXED.items():
        if value.get(name) not in allowed:
            raise UserError(f"{where} has {name}={value[name]!r}, which our model does not have; use {allowed[-1]!r}")
    if family in ("mistral", "mixtral") and value.get("sliding_window") is not None:
        raise UserError(f"{where} has sliding_window={value['sliding_window']}: attention over a window is not built")
    windows = [kind for kind in value.get("layer_types") or [] if kind != "full_attention"]
    if windows:
        raise UserError(f"{where} has layers of type {windows[0]!r}; only full_attention is built")
    if family != "qwen2" and value.get("attention_bias"):
        raise UserError(f"{where} has attention_bias=true, a bias on o_proj too, which our model does not have")


def model_config(value: dict[str, Any], family: str, where: str) -> ModelConfig:
    """ModelConfig from a config.json whose family is known and whose foreign features have been refused."""
    theta, scaling = read_rope(value, where)
    return ModelConfig(
        vocab_size=whole(value, "vocab_size"),
        max_seq_len=whole(value, "max_position_embeddings"),
        d_model=whole(value, "hidden_size"),
        num_layers=whole(value, "num_hidden_layers"),
        num_heads=whole(value, "num_attention_heads"),
        num_kv_heads=whole(value, "num_key_value_heads") if "num_key_value_heads" in value else None,
        head_dim=whole(value, "head_dim") if "head_dim" in value else None,
        d_ff=whole(value, "intermediate_size"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=float(value["rms_norm_eps"]),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        tie_embeddings=bool(value.get("tie_word_embeddings", False)),
        moe=read_moe(value, family),
    )


def read_training_seq_len(value: dict[str, Any], config: ModelConfig, where: str) -> int | None:
    """The training window of a config.json that we wrote, None in any other; UserError where it cannot be one."""
    seq_len = value.get(TRAINING_SEQ_LEN)
    if seq_len is None:
        return None
    if type(seq_len) is not int or not 0 < seq_len <= config.max_seq_len:
        raise UserError(
            f"{where} has {TRAINING_SEQ_LEN}={seq_len!r}; it must be a whole number in 1..max_position_embeddings="
            f"{config.max_seq_len}, or be left out"
        )
    return seq_len


def whole(value: dict[str, Any], name: str) -> int:
    """A field that counts something."""
    if type(value[name]) is not int or value[name] <= 0:
        raise ValueError(f"{name}={value[name]!r} is no positive whole number")
    return value[name]


def read_moe(value: dict[str, Any], family: str) -> MoeConfig:
    if family == "mixtral":
        width = whole(value, "intermediate_size")
        return MoeConfig(whole(value, "num_local_experts"), whole(value, "num_experts_per_tok"), width)
    if family == "qwen3_moe":
        count = "num_experts" if "num_experts" in value else "num_local_experts"  # transformers 4, then 5
        per_token, width = whole(value, "num_experts_per_tok"), whole(value, "moe_intermediate_size")
        return MoeConfig(whole({count: 128} | value, count), per_token, width, bool(value["norm_topk_prob"]))
    return MoeConfig()


def read_rope(value: dict[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """theta and scaling from rope_theta + rope_scaling (transformers 4) or rope_parameters (transformers 5)."""
    rope = value.get("rope_parameters") or value.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta", value.get("rope_theta", 10_000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f"{where} has RoPE scaling {kind!r}; only 'default' and 'llama3' are built")
    return theta, RopeScaling(
        float(rope["factor"]),
        float(rope["low_freq_factor"]),
        float(rope["high_freq_factor"]),
        whole(rope, "original_max_position_embeddings"),
    )


def family_of(config: ModelConfig) -> str:
    """The Hugging Face family that computes what this shape computes; UserError when there is none."""
    if config.moe.num_experts:
        if config.qkv_bias:
            raise UserError("qkv_bias=true with experts has no Hugging Face family (Mixtral, Qwen3-MoE); train without")
        if not config.qk_norm and not config.moe.normalise_top_k:
            raise UserError("moe.normalise_top_k=false needs qk_norm=true (Qwen3-MoE): Mixtral always normalises")
        return "qwen3_moe" if config.qk_norm else "mixtral"
    if config.qk_norm and config.qkv_bias:
        raise UserError("qk_norm=true with qkv_bias=true has no Hugging Face family: Qwen3 has norms, Qwen2 the bias")
    return "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"


def write_config(config: ModelConfig, family: str, dtype: torch.dtype) -> dict[str, Any]:
    """config.json for AutoModelForCausalLM and vLLM; RoPE in the keys that transformers 4 and 5 both read."""
    value = {
        "architectures": [FAMILIES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.d_ff,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if family != "qwen2":
        value["attention_bias"] = False
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        value["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
    return value | moe_fields(config, family)


def moe_fields(config: ModelConfig, family: str) -> dict[str, Any]:
    moe = config.moe
    if family == "mixtral":
        return {
            "num_local_experts": moe.num_experts,
            "num_experts_per_tok": moe.experts_per_token,
            "intermediate_size": moe.d_ff,
            "sliding_window": None,
        }
    if family == "qwen3_moe":
        return {
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.experts_per_token,
            "moe_intermediate_size": moe.d_ff,
            "norm_topk_prob": moe.normalise_top_k,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return {}
