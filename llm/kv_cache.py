"""The keys and values of tokens already seen, so that a new token costs one row of attention, not all of them.

One contiguous buffer a layer. A token's slot is its position in its row, which makes batches of unequal prompts
simple: rows are padded on the right, a query at position p sees slots 0..p, and what padding wrote in slots beyond
a row's end is overwritten when that row's own tokens get there. The engine's paged cache is another class.
"""

import torch
from torch import Tensor


class KVCache:
    """Keys and values of all layers, each (B, max_len, K, D).

    `length` is the number of slots in use in the longest row; Transformer advances it once per forward pass.
    """

    def __init__(self, num_layers: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device):
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.max_len = shape[1]
        self.length = 0

    @property
    def num_bytes(self) -> int:
        return 2 * len(self.keys) * self.keys[0].numel() * self.keys[0].element_size()

    def update(self, layer: int, k: Tensor, v: Tensor, token_positions: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B, T, K, D) at their positions (B, T); return all keys and values in use (B, S, K, D)."""
        end = self.length + k.shape[1]
        assert end <= self.max_len, f"the cache holds {self.max_len} tokens, {end} are needed"
        rows = torch.arange(k.shape[0], device=k.device)[:, None]  # (B, 1)
        self.keys[layer][rows, token_positions] = k.to(self.keys[layer].dtype)
        self.values[layer][rows, token_positions] = v.to(self.values[layer].dtype)
        return self.keys[layer][:, :end], self.values[layer][:, :end]

    def advance(self, num_tokens: int) -> None:
        self.length += num_tokens

    def keep_rows(self, rows: Tensor) -> None:
        """Drop finished rows: `rows` (B',) are the ones to keep."""
        self.keys = [keys[rows] for keys in self.keys]
        self.values = [values[rows] for values in self.values]
