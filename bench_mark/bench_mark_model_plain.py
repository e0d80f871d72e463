"""The baseline: the same model as a careful user of plain PyTorch writes it, with torch's own modules alone."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llm.args import ModelConfig


class PlainBlock(nn.Module):
    """Pre-norm attention with rotary positions and grouped kv heads, then SwiGLU."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        C, D = config.d_model, config.head_dim
        self.head_dim, self.grouped = D, config.num_kv_heads != config.num_heads
        self.attention_norm = nn.RMSNorm(C, eps=config.norm_eps)
        self.ffn_norm = nn.RMSNorm(C, eps=config.norm_eps)
        self.q_proj = nn.Linear(C, config.num_heads * D, bias=False)
        self.k_proj = nn.Linear(C, config.num_kv_heads * D, bias=False)
        self.v_proj = nn.Linear(C, config.num_kv_heads * D, bias=False)
        self.o_proj = nn.Linear(config.num_heads * D, C, bias=False)
        self.gate_proj = nn.Linear(C, config.d_ff, bias=False)
        self.up_proj = nn.Linear(C, config.d_ff, bias=False)
        self.down_proj = nn.Linear(config.d_ff, C, bias=False)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H, T, D)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.attention_norm(x)
        q, k, v = self.heads(self.q_proj(y)), self.heads(self.k_proj(y)), self.heads(self.v_proj(y))
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        x = x + self.o_proj(out.transpose(1, 2).flatten(2))
        y = self.ffn_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class PlainModel(nn.Module):
    """Dense models without qkv bias and QK-norm, token ids (B, T) -> logits (B, T, V)."""

    def __init__(self, config: ModelConfig, seq_len: int):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.output = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.output.weight = self.embedding.weight
        frequencies = config.rope_theta ** (-torch.arange(0, config.head_dim, 2).double() / config.head_dim)
        angles = torch.outer(torch.arange(seq_len).double(), frequencies).repeat(1, 2)  # (T, D)
        self.register_buffer("cos", angles.cos().float())
        self.register_buffer("sin", angles.sin().float())

    def forward(self, token_ids: Tensor) -> Tensor:
        x = self.embedding(token_ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.output(self.norm(x))

    @torch.no_grad()
    def copy_weights(self, ours: nn.Module) -> None:
        """Take the weights of our Transformer, whose names differ by the attention. and ffn. in them."""
        weights = {name.replace("attention.", "").replace("ffn.", ""): p for name, p in ours.named_parameters()}
        mine = dict(self.named_parameters())
        assert mine.keys() == weights.keys(), f"{sorted(mine.keys() ^ weights.keys())}"
        for name, parameter in mine.items():
            parameter.copy_(weights[name])


def plain_optimizer(model: nn.Module, lr: float, weight_decay: float, betas: tuple[float, float]) -> torch.optim.AdamW:
    """Fused AdamW that decays matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)
