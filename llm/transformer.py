"""The model, and nothing but the model: a decoder-only Transformer on a single device, without parallel code.

Pre-norm blocks with RMSNorm (Zhang & Sennrich 2019), rotary positions (Su et al. 2021, halves paired as Hugging Face
stores them), grouped-query attention (Ainslie et al. 2023), SwiGLU (Shazeer 2020); optional qkv bias (Qwen2), QK-norm
(Qwen3), tied embeddings, mixture of experts (llm/moe.py). Strategies are applied from outside (llm/parallelize.py)
through four seams: a Linear's `matmul`, an attention's `attend`, a block's `checkpoint`, and the names of `blocks`;
fused kernels through
`lookup`, `normalise`, `rotate`, `activate` and `project` (llm/transformer_kernels.py).

Shapes: B batch, T query tokens, S keys, C d_model, F d_ff, H heads, K kv heads, D head_dim, V vocab, L layers,
E experts, N = B*T.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llm.args import ModelConfig, RopeScaling
from llm.kv_cache import KVCache
from llm.moe import MixtureOfExperts
from llm.transformer_attention import BACKENDS, prepare_mask
from llm.transformer_context import BlockContext, make_context
from llm.transformer_layers import Linear, SwiGlu, at_least_float32, project_each

Rope = tuple[Tensor, Tensor]
Head = Callable[[Tensor, Linear], Any]


class Embedding(nn.Module):
    """token ids (B, T) -> vectors (B, T, C), under autocast in `stream_dtype` where it is set."""

    def __init__(self, vocab_size: int, d_model: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))
        self.stream_dtype: torch.dtype | None = None
        self.lookup: Callable[[Tensor, Tensor, torch.dtype], Tensor] = look_up  # a seam

    def forward(self, token_ids: Tensor) -> Tensor:
        lower = self.stream_dtype is not None and torch.is_autocast_enabled(token_ids.device.type)
        return self.lookup(token_ids, self.weight, self.stream_dtype if lower else self.weight.dtype)  # (B, T, C)


def look_up(token_ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return F.embedding(token_ids, weight).to(dtype)


class RmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, in float32 or better.

    `normalise(x, weight, eps, residual) -> (normed, x + residual)` is the seam for a fused kernel.
    """

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps
        self.normalise: Callable = normalise

    def forward(self, x: Tensor) -> Tensor:
        return self.normalise(x, self.weight, self.eps, None)[0]

    def with_stream(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The normed sum of x and the residual stream, and the sum itself; without a residual x is the stream."""
        return self.normalise(x, self.weight, self.eps, residual)


def normalise(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """RMSNorm as it is written, operation by operation."""
    stream = x if residual is None else residual + x
    wide = at_least_float32(stream)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight).to(stream.dtype), stream


class RoPE(nn.Module):
    """Rotary position embedding: the pair (i, i + D/2) of a head turns by position * theta^(-2i/D)."""

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None = None):
        super().__init__()
        frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)  # (D/2,)
        if scaling is not None:
            frequencies = scale_frequencies(frequencies, scaling)
        # Held as bits, so that model.to(bfloat16) moves the float64 values without rounding them.
        self.register_buffer("frequency_bits", frequencies.view(torch.int64), persistent=False)

    def forward(self, token_positions: Tensor) -> Rope:
        """Positions (B, T) -> cos and sin, each (B, T, 1, D) float32, computed once for all blocks."""
        angles = token_positions[..., None] * self.frequency_bits.view(torch.float64)  # (B, T, D/2)
        angles = torch.cat((angles, angles), dim=-1)[:, :, None]  # (B, T, 1, D)
        return angles.cos().float(), angles.sin().float()

    @staticmethod
    def rotate(x: Tensor, rope: Rope) -> Tensor:
        """Turn x (B, T, H, D) by the angles of its positions, in float32 or better."""
        cos, sin = rope
        first, second = x.chunk(2, dim=-1)
        half_turned = torch.cat((-second, first), dim=-1)  # (B, T, H, D)
        return (x * cos + half_turned * sin).to(x.dtype)


def scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3's RoPE scaling: slow pairs are slowed by `factor`, fast ones kept, those between blended."""
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)  # full turns within the original context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)  # 0: slow, 1: fast
    return frequencies * (blend + (1.0 - blend) / scaling.factor)


class ScaledDotProductAttention(nn.Module):
    """Chooses the backend: q (B, T, H, D), k, v (B, S, K, D) -> out (B, T, H, D), lse (B, H, T) or None."""

    def __init__(self, backend: str):
        super().__init__()
        self.backend = backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, ctx: BlockContext) -> tuple[Tensor, Tensor | None]:
        attend = BACKENDS[self.backend] if ctx.attend is None else ctx.attend
        return attend(q, k, v, ctx)


class MultiHeadAttention(nn.Module):
    """Causal self-attention with grouped kv heads: x (B, T, C) -> (B, T, C)."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        C, H, K, D = config.d_model, config.num_heads, config.num_kv_heads, config.head_dim
        self.layer = layer
        self.head_dim = D
        self.q_proj = Linear(C, H * D, bias=config.qkv_bias)
        self.k_proj = Linear(C, K * D, bias=config.qkv_bias)
        self.v_proj = Linear(C, K * D, bias=config.qkv_bias)
        self.o_proj = Linear(H * D, C)
        self.q_norm = RmsNorm(D, config.norm_eps) if config.qk_norm else None
        self.k_norm = RmsNorm(D, config.norm_eps) if config.qk_norm else None
        self.attend: Callable = ScaledDotProductAttention(config.attention)
        self.project: Callable = project_each

    def positioned(self, q: Tensor, k: Tensor, ctx: BlockContext) -> tuple[Tensor, Tensor]:
        """Queries (B, T, H, D) and keys (B, T, K, D) with their positions worked in: here, none."""
        return q, k

    def forward(self, x: Tensor, ctx: BlockContext) -> Tensor:
        q, k, v = self.project(x, (self.q_proj, self.k_proj, self.v_proj))
        B, T, _ = q.shape  # of q: x may be cut by tokens. -1 for the heads, of which a rank may hold some.
        q = q.view(B, T, -1, self.head_dim)  # (B, T, H, D)
        k = k.view(B, T, -1, self.head_dim)  # (B, T, K, D)
        v = v.view(B, T, -1, self.head_dim)  # (B, T, K, D)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.positioned(q, k, ctx)
        if ctx.cache is not None:
            k, v = ctx.cache.update(self.layer, k, v, ctx.token_positions)  # (B, S, K, D)
        out, _ = self.attend(q, k, v, ctx)  # (B, T, H, D)
        return self.o_proj(out.reshape(B, T, -1))  # (B, T, C)


class MultiHeadAttentionWithRoPE(MultiHeadAttention):
    """MultiHeadAttention whose queries and keys are turned by their positions; `rotate(q, k, rope)` is a seam."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        self.rotate: Callable = rotate_both

    def positioned(self, q: Tensor, k: Tensor, ctx: BlockContext) -> tuple[Tensor, Tensor]:
        return (q, k) if ctx.attend_turns else self.rotate(q, k, ctx.rope)


def rotate_both(q: Tensor, k: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    return RoPE.rotate(q, rope), RoPE.rotate(k, rope)


class Pending(NamedTuple):
    """A residual stream (B, T, C) and what is still to be added to it: the next norm adds as it reads."""

    stream: Tensor
    update: Tensor


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)): (B, T, C) -> (B, T, C).

    With `defers_sum` the last sum is left to whoever reads next: it returns Pending, which every block takes.
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.attention_norm = RmsNorm(config.d_model, config.norm_eps)
        self.attention = MultiHeadAttentionWithRoPE(config, layer)
        self.ffn_norm = RmsNorm(config.d_model, config.norm_eps)
        self.ffn = MixtureOfExperts(config) if config.moe.num_experts else SwiGlu(config.d_model, config.d_ff)

        self.defers_sum = False
        self.checkpoint: Callable | None = None  # called as checkpoint(function, *arguments): recompute in backward

    def forward(self, x: Tensor | Pending, ctx: BlockContext) -> Tensor | Pending:
        return self.compute(x, ctx) if self.checkpoint is None else self.checkpoint(self.compute, x, ctx)

    def compute(self, x: Tensor | Pending, ctx: BlockContext) -> Tensor | Pending:
        normed, x = self.attention_norm.with_stream(*read(x))
        normed, x = self.ffn_norm.with_stream(self.attention(normed, ctx), x)
        update = self.ffn(normed)
        return Pending(x, update) if self.defers_sum else x + update


def read(x: Tensor | Pending) -> tuple[Tensor, Tensor | None]:
    """What RmsNorm.with_stream takes: the update and its stream, or the stream alone."""
    return (x.update, x.stream) if isinstance(x, Pending) else (x, None)


class Transformer(nn.Module):
    """token ids (B, T) -> logits (B, T, V).

    `embedding`, `norm` and `output` may be None on a pipeline stage; a stage without the embedding takes hidden
    states (B, T, C) in place of ids. Blocks are named "0".."L-1" in the whole model and keep their names on a stage.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        assert config.vocab_size is not None, "fill in vocab_size first (ModelConfig.with_vocab_of)"
        self.config = config
        self.embedding: Embedding | None = Embedding(config.vocab_size, config.d_model)
        self.rope = RoPE(config.head_dim, config.rope_theta, config.rope_scaling)
        self.blocks = nn.ModuleDict({str(layer): TransformerBlock(config, layer) for layer in range(config.num_layers)})
        self.norm: RmsNorm | None = RmsNorm(config.d_model, config.norm_eps)
        self.output: Linear | None = Linear(config.d_model, config.vocab_size)
        if config.tie_embeddings:
            self.output.weight = self.embedding.weight

    def hidden_states(self, x: Tensor, ctx: BlockContext | None = None) -> Tensor:
        """Ids (B, T), or hidden states on a later stage, -> the states (B, T, C) that `output` reads."""
        ctx = ctx if ctx is not None else make_context(x)
        if not ctx.attend_turns:
            ctx.rope = self.rope(ctx.token_positions)
        prepare_mask(self.config.attention, ctx)
        if self.embedding is not None:
            x = self.embedding(x)  # (B, T, C)
        for block in self.blocks.values():
            x = block(x, ctx)
        if ctx.cache is not None:
            ctx.cache.advance(ctx.token_positions.shape[1])
        if self.norm is None:
            return x.stream + x.update if isinstance(x, Pending) else x
        return self.norm.with_stream(*read(x))[0]

    def forward(self, x: Tensor, ctx: BlockContext | None = None, head: Head | None = None) -> Any:
        """Logits, or with `head` what it makes of the states and the output layer (a loss that needs no logits)."""
        x = self.hidden_states(x, ctx)
        if head is not None:
            return head(x, self.output)
        return self.output(x) if self.output is not None else x  # (B, T, V)

    def make_cache(self, num_rows: int, max_len: int, dtype: torch.dtype | None = None) -> KVCache:
        """An empty cache for `num_rows` sequences of at most `max_len` tokens."""
        weight = self.output.weight
        shape = (num_rows, max_len, self.config.num_kv_heads, self.config.head_dim)
        return KVCache(self.config.num_layers, shape, dtype or weight.dtype, weight.device)
