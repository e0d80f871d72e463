"""One token each of 2 to 64 sequences through a dense model by the kernels of kernel/few_rows: decoding a small batch.

Seven launches a block: norm with the sum of what the block before left; q, k, v; attention with RoPE and the cache; the
output projection; norm with its sum; gate and up with SwiGLU; the down projection. The model's own layers compute the
same, rounded at the same places. Experts, QK-norm, swapped products, long sequences, float32 on a GPU and ranks that
share a layer stay with the model.
"""

from typing import Any

import torch
from torch import Tensor

from llm.engine_single import has_plain_layers
from llm.transformer import Transformer

LONGEST = 2048  # tokens: up to here one program a row and kv head reads all keys


def runs_few(model: Transformer) -> bool:
    """Whether every layer is one that the kernels replace."""
    from kernel.few_rows import few_rows_run

    return few_rows_run(model.config.d_model, model.config.head_dim, model.output.weight) and has_plain_layers(model)


class FewRows:
    """The buffers of one EngineRunner's rows, and the step that a graph records."""

    def __init__(self, runner: Any):
        from kernel.few_rows import MAX_ROWS, default_few_rows_config

        self.runner, self.model = runner, runner.model
        config, device = self.model.config, runner.device
        self.config = default_few_rows_config(device)
        self.max_rows = min(MAX_ROWS, runner.config.max_running)
        query_width = config.num_heads * config.head_dim
        self.qkv_width = query_width + 2 * config.num_kv_heads * config.head_dim
        empty = lambda width: torch.empty(self.max_rows, width, dtype=runner.dtype, device=device)  # noqa: E731
        self.stream, self.normed = empty(config.d_model), empty(config.d_model)
        self.attended, self.hidden = empty(query_width), empty(config.d_ff)
        self.results = empty(config.vocab_size)
        self.sums: Tensor | None = None  # float32, what products in parts leave

    def takes(self, num_rows: int, max_len: int) -> bool:
        """Whether a step of so many rows, none longer than max_len, is for these kernels."""
        return 1 < num_rows <= self.max_rows and max_len <= LONGEST

    def parts(self, count: int, num_rows: int, width: int) -> Tensor:
        """(count, num_rows, width) float32: the one buffer, which the next kernel has read before it is written."""
        if self.sums is None:
            own, model = self.config, self.model.config
            most = max(own.qkv.parts * self.qkv_width, max(own.out.parts, own.down.parts) * model.d_model)
            self.sums = torch.empty(most * self.max_rows, dtype=torch.float32, device=self.stream.device)
        return self.sums[: count * num_rows * width].view(count, num_rows, width)

    def scores(self, rows: Tensor) -> Tensor:
        """rows (3, M) int64, slots and lengths first -> scores (M, V) of the slots' last tokens."""
        from kernel.few_rows import RowPlaces, embed, product, sum_norm, swiglu_product

        own, model, M = self.config, self.model, rows.shape[1]
        at = RowPlaces(rows, self.runner.tables, self.runner.config.page_size)
        stream, normed, hidden = self.stream[:M], self.normed[:M], self.hidden[:M]
        embed(at, self.runner.last_tokens, model.embedding.weight, stream, own.pdl)
        update = None
        for layer, block in enumerate(model.blocks.values()):
            sum_norm(update, stream, block.attention_norm.weight, block.attention_norm.eps, normed, own.pdl)
            attended = self.attend(layer, block, at)
            update = self.parts(own.out.parts, M, stream.shape[1])
            product(attended, block.attention.o_proj.weight, update, own.out, own.pdl)
            sum_norm(update, stream, block.ffn_norm.weight, block.ffn_norm.eps, normed, own.pdl)
            swiglu_product(normed, block.ffn.project.weight, hidden, own.gated, own.pdl)
            update = self.parts(own.down.parts, M, stream.shape[1])
            product(hidden, block.ffn.down_proj.weight, update, own.down, own.pdl)
        sum_norm(update, stream, model.norm.weight, model.norm.eps, normed, own.pdl)
        product(normed, model.output.weight, self.results[None, :M], own.scores, own.pdl)
        return self.results[:M]

    def attend(self, layer: int, block: Any, at: Any) -> Tensor:
        """Attention of one block over the normed stream, (M, H D), its keys and values put into the cache."""
        from kernel.few_rows import QkvInputs, product, rows_attend

        own, config, M = self.config, self.model.config, at.rows.shape[1]
        joined, cache = block.attention.project, self.runner.cache
        parts = self.parts(own.qkv.parts, M, self.qkv_width)
        product(self.normed[:M], joined.weight, parts, own.qkv, own.pdl)
        inputs = QkvInputs(parts, joined.bias, self.runner.rope, (cache.keys[layer], cache.values[layer]))
        attended = self.attended[:M]
        rows_attend(at, inputs, attended.view(M, config.num_heads, config.head_dim), own)
        return attended
