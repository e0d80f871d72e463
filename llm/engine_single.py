"""One token of one sequence through a dense model by the matrix-vector kernels of kernel/matvec: decoding at batch 1.

Five launches a block: norm with q, k, v, RoPE and the cache; attention over the pages; the output projection with the
residual sum; norm with SwiGLU; the down projection with the residual sum. Long sequences take flash_attention_decode,
which cuts the keys. The model's own layers compute the same, rounded at the same places. Experts, QK-norm, swapped
products and ranks that share a layer stay with the model.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from llm.engine_weights import JoinedProjection
from llm.transformer import Transformer
from llm.transformer_layers import SwiGlu

SHORT = 1024  # tokens: up to here one program a head reads all keys


def runs_single(model: Transformer) -> bool:
    """Whether every layer is one that the kernels replace."""
    from kernel.matvec import matvec_runs

    config = model.config
    widths = [config.d_model, config.d_ff, config.num_heads * config.head_dim]
    return matvec_runs(widths, config.head_dim, model.output.weight.device) and has_plain_layers(model)


def has_plain_layers(model: Transformer) -> bool:
    """Whether its blocks are dense, without QK-norm, their projections joined and no product swapped."""
    if model.config.moe.num_experts or model.config.qk_norm:
        return False
    for block in model.blocks.values():
        attention, ffn = block.attention, block.ffn
        joined = isinstance(attention.project, JoinedProjection) and isinstance(ffn.project, JoinedProjection)
        plain = attention.o_proj.matmul is F.linear and ffn.down_proj.matmul is F.linear
        if not (joined and plain and isinstance(ffn, SwiGlu)):
            return False
    return model.output.matmul is F.linear


class SingleToken:
    """The buffers of one EngineRunner's token, and the step that a graph records."""

    def __init__(self, runner: Any):
        from kernel.matvec import TokenBuffers, default_matvec_config

        self.runner, self.model = runner, runner.model
        config, device, dtype = self.model.config, runner.device, runner.dtype
        empty = lambda *shape: torch.empty(*shape, dtype=dtype, device=device)  # noqa: E731
        self.buffers = TokenBuffers(
            stream=empty(config.d_model),
            queries=empty(1, 1, config.num_heads, config.head_dim),
            attended=empty(1, 1, config.num_heads, config.head_dim),
            hidden=empty(config.d_ff),
            scores=empty(1, config.vocab_size),
            table=torch.zeros(1, runner.tables.shape[1], dtype=torch.int32, device=device),
            length=torch.ones(1, dtype=torch.int32, device=device),
        )
        self.config = default_matvec_config(device)

    def scores(self, rows: Tensor, max_len: int) -> Tensor:
        """rows (3, 1) int64, slot and length (at most max_len) first -> scores (1, V) of the slot's last token."""
        from kernel.matvec import TokenPlace, add_matvec, norm_scores, norm_swiglu, start_token

        runner, to, own = self.runner, self.buffers, self.config
        at = TokenPlace(rows, runner.tables, runner.config.page_size)
        start_token(at, runner.last_tokens, self.model.embedding.weight, to, own)
        for layer, block in enumerate(self.model.blocks.values()):
            attended = self.attend(layer, block, at, max_len)
            add_matvec(attended, block.attention.o_proj.weight, to.stream, own)
            norm_swiglu(block.ffn_norm.weight, block.ffn.project.weight, block.ffn_norm.eps, to, own)
            add_matvec(to.hidden, block.ffn.down_proj.weight, to.stream, own)
        norm_scores(self.model.norm.weight, self.model.output.weight, self.model.norm.eps, to, own)
        return to.scores

    def attend(self, layer: int, block: Any, at: Any, max_len: int) -> Tensor:
        """Attention of one block, (1, 1, H, D): its queries, and its keys and values into the cache, then the pages."""
        from kernel.flash_attention_triton_decode import DecodeOptions, flash_attention_decode
        from kernel.matvec import QkvWeights, attend_short, norm_qkv

        config, to = self.model.config, self.buffers
        norm, joined = block.attention_norm, block.attention.project
        pages = self.runner.cache.keys[layer], self.runner.cache.values[layer]
        shape = (config.num_heads, config.num_kv_heads, config.head_dim)
        weights = QkvWeights(norm.weight, joined.weight, joined.bias, self.runner.rope, norm.eps, *shape)
        norm_qkv(weights, at, pages, to, self.config)
        if max_len <= SHORT:
            attend_short(at, pages, to, self.config)
            return to.attended
        return flash_attention_decode(to.queries, *pages, to.length, to.table, DecodeOptions(max_length=max_len))[0]
