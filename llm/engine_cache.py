"""The paged key-value cache, and attention of a step's tokens over it.

A step's tokens lie in one row (1, N): first one token of each decoding request, then pieces of prompts. Each layer
writes all their keys and values into pages, then decoding tokens attend through the block tables and each piece attends
to its own request's tokens. On a GPU that is flash_attention_decode for the first and flash_attention over keys packed
request after request for the second; elsewhere plain PyTorch on gathered pages.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from llm.transformer_context import BlockContext

KERNEL_HEAD_DIMS = (32, 64, 80, 96, 128, 256)


class PagedCache:
    """Keys and values of all layers, each (pages, page_size, K, D) with K the kv heads of this rank."""

    def __init__(self, num_layers: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device):
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.page_size = shape[1]

    @property
    def num_bytes(self) -> int:
        return 2 * len(self.keys) * self.keys[0].numel() * self.keys[0].element_size()

    def write(self, layer: int, k: Tensor, v: Tensor, places: Tensor) -> None:
        """Store k and v (N, K, D) at `places` (N,) int64: page * page_size + offset."""
        self.keys[layer].flatten(0, 1).index_copy_(0, places, k.to(self.keys[layer].dtype))
        self.values[layer].flatten(0, 1).index_copy_(0, places, v.to(self.values[layer].dtype))

    def read(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (..., K, D) of the tokens at `places` (...)."""
        return self.keys[layer].flatten(0, 1)[places], self.values[layer].flatten(0, 1)[places]


@dataclass
class DecodeRows:
    """The decoding tokens of a step: one a row, `lens` (B,) int32 tokens each with itself, `tables` (B, P) int32.

    max_len: no row is longer, which the host knows where no graph is captured; pages beyond it are not gathered.
    split_keys: keys a chunk of the decode kernel, fixed in batch-invariant mode. span: where the pages of rows lie one
    after the other, and the rows at equal distances, the place of the first token and that distance in tokens: nothing
    has to be gathered then.
    """

    lens: Tensor
    tables: Tensor
    max_len: int
    split_keys: int | None = None
    span: tuple[int, int] | None = None
    mask: Tensor | None = None  # (B, 1, 1, S), made once a step where pages are gathered


@dataclass
class PromptPieces:
    """The prompt tokens of a step: piece i has tokens offsets[i] .. offsets[i + 1] and sees `places[i]`'s keys.

    places: of each request's tokens so far, the piece's own included, (S_i,) int64. packed: the same one after the
    other, for the kernel.
    """

    offsets: list[int]
    places: list[Tensor]
    packed: Tensor | None = None
    ranges: object = None  # kernel.flash_attention_ranges.KeyRanges, for the kernel


@dataclass
class StepCache:
    """What BlockContext.cache is in the engine: where a step's tokens go, and what they attend to."""

    cache: PagedCache
    places: Tensor  # (N,) int64
    decode: DecodeRows | None
    prompts: PromptPieces | None
    rope: Any  # kernel.rope_cache.RopeTables where the kernels run; else cos and sin (N, 1, D), sin as `turn` has it
    use_kernels: bool

    def update(self, layer: int, k: Tensor, v: Tensor, token_positions: Tensor) -> tuple[tuple, tuple]:
        """What `attend`, which turns and stores k and v (1, N, K, D), gets in their place: (layer, k), (layer, v)."""
        return (layer, k), (layer, v)

    def advance(self, num_tokens: int) -> None:
        """Nothing: the scheduler counts."""

    def attend(self, q: Tensor, k: tuple, v: tuple, ctx: BlockContext) -> tuple[Tensor, None]:
        """q (1, N, H, D) over the pages -> (1, N, H, D)."""
        layer, num_decoding = k[0], 0 if self.decode is None else self.decode.lens.shape[0]
        if self.use_kernels:
            from kernel.rope_cache import rope_cache

            pages = self.cache.keys[layer], self.cache.values[layer]
            q = rope_cache(q[0], k[1][0], v[1][0], self.rope, pages, self.places)[None]
        else:
            q, turned = turn_both(q[0], k[1][0], self.rope)
            self.cache.write(layer, turned, v[1][0], self.places)
            q, k = q[None], (layer, turned[None])
        if self.prompts is None:
            return self.attend_decode(layer, q[0])[None], None
        if self.decode is None:
            return self.attend_prompts(layer, q[0], k[1][0], v[1][0])[None], None
        decoded = self.attend_decode(layer, q[0, :num_decoding])  # (B, H, D)
        k_new, v_new = k[1][0, num_decoding:], v[1][0, num_decoding:]
        return torch.cat((decoded, self.attend_prompts(layer, q[0, num_decoding:], k_new, v_new)))[None], None

    def attend_decode(self, layer: int, q: Tensor) -> Tensor:
        """One token a row, q (B, H, D) -> (B, H, D)."""
        rows = self.decode
        if self.use_kernels:
            from kernel.flash_attention_triton_decode import DecodeOptions, flash_attention_decode

            options = DecodeOptions(max_length=rows.max_len, split_keys=rows.split_keys)
            pages = self.cache.keys[layer], self.cache.values[layer]
            return flash_attention_decode(q[:, None], *pages, rows.lens, rows.tables, options)[0][:, 0]
        k, v = (self.gather_rows(pages[layer]).to(q.dtype) for pages in (self.cache.keys, self.cache.values))
        if rows.mask is None and not (rows.span is not None and len(rows.lens) == 1):
            rows.mask = (torch.arange(k.shape[1], device=q.device) < rows.lens[:, None])[:, None, None]
        return gathered_decode(q, k, v, rows.mask)

    def gather_rows(self, pages: Tensor) -> Tensor:
        """The keys or values of each decoding row side by side: (B, S, K, D)."""
        rows = self.decode
        if rows.span is not None:
            (first, distance), (K, D) = rows.span, pages.shape[2:]
            shape, strides = (len(rows.lens), rows.max_len, K, D), (distance * K * D, K * D, D, 1)
            return pages.as_strided(shape, strides, first * K * D)
        return pages[rows.tables[:, : -(-rows.max_len // self.cache.page_size)]].flatten(1, 2)

    def attend_prompts(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Pieces of prompts, q (M, H, D) with their own keys k and v (M, K, D) -> (M, H, D)."""
        pieces = self.prompts
        if self.use_kernels:
            from kernel.flash_attention_triton import AttentionMask, flash_attention

            k, v = self.cache.read(layer, pieces.packed)  # (S, K, D)
            return flash_attention(q[None], k[None], v[None], AttentionMask(ranges=pieces.ranges))[0][0]
        outs = []
        for index, places in enumerate(pieces.places):
            first, end = pieces.offsets[index], pieces.offsets[index + 1]
            keys, values = k[first:end], v[first:end]
            if len(places) > end - first:
                keys, values = (x.to(q.dtype) for x in self.cache.read(layer, places))  # (S, K, D)
            outs.append(causal_piece(q[first:end], keys, values))
        return torch.cat(outs)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of x (N, heads, D); cos and sin (N, 1, D) float32, the first half of sin negative."""
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


def turn_both(q: Tensor, k: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """turn of q (N, H, D) and k (N, K, D), at once where they are columns of one projection."""
    (N, H, D), K = q.shape, k.shape[1]
    strides = q.stride()
    if k.stride() != strides or strides[1:] != (D, 1) or k.data_ptr() != q.data_ptr() + H * D * q.element_size():
        return turn(q, *rope), turn(k, *rope)
    return turn(q.as_strided((N, H + K, D), strides), *rope).split((H, K), dim=1)


def gathered_decode(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q (B, H, D) over k and v (B, S, K, D) where mask (B, 1, 1, S) is true -> (B, H, D).

    The query heads of a kv head stand in for query tokens, so keys are read once and not repeated.
    """
    (B, H, D), K = q.shape, k.shape[2]
    out = F.scaled_dot_product_attention(
        q.reshape(B, K, H // K, D), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=1 / math.sqrt(D)
    )
    return out.reshape(B, H, D)


def causal_piece(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q (T, H, D), the last T tokens of those whose keys are k and v (S, K, D) -> (T, H, D)."""
    (T, H, _), (S, K) = q.shape, k.shape[:2]
    if H != K:
        k, v = k.repeat_interleave(H // K, dim=1), v.repeat_interleave(H // K, dim=1)  # (S, H, D)
    mask = None
    if 1 < T < S:
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # (1, H, T or S, D)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=T == S and T > 1)
    return out[0].transpose(0, 1)  # (T, H, D)
