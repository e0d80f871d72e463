"""Our parameter names and Hugging Face's, for the families that differ from each other by config alone."""

MODEL_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "attention_norm": "input_layernorm",
    "attention.q_proj": "self_attn.q_proj",
    "attention.k_proj": "self_attn.k_proj",
    "attention.v_proj": "self_attn.v_proj",
    "attention.o_proj": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate_proj": "mlp.gate_proj",
    "ffn.up_proj": "mlp.up_proj",
    "ffn.down_proj": "mlp.down_proj",
    "ffn.router": "mlp.gate",
}
# A parameter of stacked experts has no ".weight" behind it; the families name an expert's three matrices differently.
EXPERTS = {
    "qwen3_moe": ("mlp.experts", {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}),
    "mixtral": ("block_sparse_moe.experts", {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}),
}
ROUTERS = {"qwen3_moe": "mlp.gate", "mixtral": "block_sparse_moe.gate"}


def hf_names(name: str, family: str, num_experts: int) -> list[str]:
    """The names in a Hugging Face directory of one of our parameters: one, or one an expert."""
    if name in MODEL_NAMES:
        return [MODEL_NAMES[name]]
    _, layer, rest = name.split(".", 2)
    block = f"model.layers.{layer}."
    part, _, kind = rest.rpartition(".")
    if part == "ffn" and family in EXPERTS:
        folder, matrices = EXPERTS[family]
        return [f"{block}{folder}.{expert}.{matrices[kind]}.weight" for expert in range(num_experts)]
    if part == "ffn.router":
        return [f"{block}{ROUTERS[family]}.{kind}"]
    return [f"{block}{BLOCK_NAMES[part]}.{kind}"]
