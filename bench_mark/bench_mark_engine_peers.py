"""Who the engine is measured beside: transformers' generate, its compiled static cache, and a compiled decode step.

All have the engine's weights. The last is what gpt-fast does (pytorch-labs/gpt-fast, generate.py and model.py of 2024):
one token through a static cache, joined projections, F.scaled_dot_product_attention over the whole cache under a mask,
torch.compile(mode="reduce-overhead", fullgraph=True) around model and choice, the token fed back on the device.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llm.args import ModelConfig
from llm.transformer import Transformer

NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "ffn_norm": "post_attention_layernorm",
    "ffn": "mlp",
}


def foreign_name(name: str) -> str:
    """Our parameter's name in transformers' LlamaForCausalLM."""
    parts = [NAMES.get(part, part) for part in name.split(".")]
    return ".".join(["model.layers", *parts[1:]] if parts[0] == "blocks" else parts)


def transformers_model(model: Transformer) -> Any:
    """LlamaForCausalLM with our weights, on the same device, in the same dtype, with SDPA."""
    from transformers import LlamaConfig, LlamaForCausalLM

    own: ModelConfig = model.config
    config = LlamaConfig(
        vocab_size=own.vocab_size, hidden_size=own.d_model, intermediate_size=own.d_ff, head_dim=own.head_dim,
        num_hidden_layers=own.num_layers, num_attention_heads=own.num_heads, num_key_value_heads=own.num_kv_heads,
        max_position_embeddings=own.max_seq_len, rms_norm_eps=own.norm_eps, tie_word_embeddings=own.tie_embeddings,
        rope_theta=own.rope_theta, bos_token_id=None, eos_token_id=None, attn_implementation="sdpa",
    )  # fmt: skip
    weight = model.output.weight
    with torch.device(weight.device):
        foreign = LlamaForCausalLM(config).to(weight.dtype).eval()
    state = {foreign_name(name): tensor for name, tensor in model.state_dict().items()}
    foreign.load_state_dict(state)
    return foreign


def transformers_generate(foreign: Any, prompts: list[list[int]], new_tokens: int, **options: Any) -> Tensor:
    """Greedy, exactly `new_tokens` each, prompts padded on the left: (B, new_tokens)."""
    device, longest = foreign.device, max(map(len, prompts))
    rows = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    with torch.inference_mode():
        out = foreign.generate(
            rows, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens, min_new_tokens=new_tokens,
            pad_token_id=0, **options,
        )  # fmt: skip
    return out[:, longest:]


class StaticDecoder(nn.Module):
    """One token of one sequence through static caches, as gpt-fast has it."""

    def __init__(self, model: Transformer, max_len: int):
        super().__init__()
        config, blocks = model.config, list(model.blocks.values())
        self.config, self.model = config, model
        self.qkv = [torch.cat([getattr(b.attention, f"{x}_proj").weight for x in "qkv"]).detach() for b in blocks]
        self.gate_up = [torch.cat((b.ffn.gate_proj.weight, b.ffn.up_proj.weight)).detach() for b in blocks]
        weight = model.output.weight
        shape = (1, config.num_kv_heads, max_len, config.head_dim)
        self.keys = [torch.zeros(shape, device=weight.device, dtype=weight.dtype) for _ in blocks]
        self.values = [torch.zeros(shape, device=weight.device, dtype=weight.dtype) for _ in blocks]
        positions = torch.arange(max_len, device=weight.device)
        self.cos, self.sin = (table[0, :, 0] for table in model.rope(positions[None]))  # (S, D)
        self.masks = torch.ones(max_len, max_len, dtype=torch.bool, device=weight.device).tril()

    def turn(self, x: Tensor, place: Tensor) -> Tensor:
        """Rotate x (1, T, heads, D)."""
        first, second = x.float().chunk(2, dim=-1)
        cos, sin = self.cos[place][None, :, None], self.sin[place][None, :, None]
        return (x.float() * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.norm_eps)).to(x.dtype) * weight

    def forward(self, token_ids: Tensor, place: Tensor) -> Tensor:
        """token_ids (1, T) at places (T,) -> the next token (1, 1)."""
        config = self.config
        T, H, K, D = token_ids.shape[1], config.num_heads, config.num_kv_heads, config.head_dim
        x = F.embedding(token_ids, self.model.embedding.weight)
        mask = self.masks[place][None, None]
        for layer, block in enumerate(self.model.blocks.values()):
            h = self.norm(x, block.attention_norm.weight)
            q, k, v = F.linear(h, self.qkv[layer]).split([H * D, K * D, K * D], dim=-1)
            q, k = self.turn(q.view(1, T, H, D), place), self.turn(k.view(1, T, K, D), place)
            self.keys[layer][:, :, place] = k.transpose(1, 2)
            self.values[layer][:, :, place] = v.view(1, T, K, D).transpose(1, 2)
            keys = self.keys[layer].repeat_interleave(H // K, dim=1)
            values = self.values[layer].repeat_interleave(H // K, dim=1)
            out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask)
            x = x + F.linear(out.transpose(1, 2).reshape(1, T, H * D), block.attention.o_proj.weight)
            gate, up = F.linear(self.norm(x, block.ffn_norm.weight), self.gate_up[layer]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, block.ffn.down_proj.weight)
        return F.linear(self.norm(x[:, -1:], self.model.norm.weight), self.model.output.weight)[0].argmax(-1)[None]


def compiled_decoder(model: Transformer, max_len: int) -> Callable[[list[int], int], list[int]]:
    """generate(prompt, new_tokens) whose decode step is one compiled graph."""
    decoder = StaticDecoder(model, max_len)
    step = torch.compile(decoder, mode="reduce-overhead", fullgraph=True)
    device = model.output.weight.device

    @torch.inference_mode()
    def generate(prompt: list[int], new_tokens: int) -> list[int]:
        token = decoder(torch.tensor([prompt], device=device), torch.arange(len(prompt), device=device)).clone()
        place, tokens = torch.tensor([len(prompt)], device=device), [token]
        for _ in range(new_tokens - 1):
            token = step(token.clone(), place).clone()
            tokens.append(token)
            place = place + 1
        return torch.cat(tokens, dim=1)[0].tolist()

    return generate
