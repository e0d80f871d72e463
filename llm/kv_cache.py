"""The keys and values of tokens already seen, so that a new token costs one row of attention, not all of them.

One contiguous buffer a layer. A token's slot is its position in its row, which makes batches of unequal prompts
simple: rows are padded on the right, a query at position p sees slots 0..p, and what padding wrote in slots beyond
a row's end is overwritten when that row's own tokens get there. The engine's paged cache is another class.
"""

import torch
from torch import Tensor


class KVCache:
    """Keys and values of all layers, each (B, max_len, K, D), and how many tokens each row holds.

    `row_lengths` holds the rows' lengths on the host, `positions` (B,) int64 the same on the device: the slots that
    the next tokens take. Transformer calls `advance` once per forward pass. After a prefill of right-padded prompts
    `trim` sets each row to its true length.
    """

    def __init__(self, num_layers: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device):
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.max_len = shape[1]
        self.row_lengths = [0] * shape[0]
        self.positions = torch.zeros(shape[0], dtype=torch.int64, device=device)

    @property
    def length(self) -> int:
        """Tokens in the longest row: no key beyond this slot is read."""
        return max(self.row_lengths, default=0)

    @property
    def num_bytes(self) -> int:
        return 2 * len(self.keys) * self.keys[0].numel() * self.keys[0].element_size()

    def update(self, layer: int, k: Tensor, v: Tensor, token_positions: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B, T, K, D) at their positions (B or 1, T), all below `length` + T.

        Returns the keys and values of slots 0 .. length + T - 1 (B, S, K, D). Shorter rows have slots among them
        that are not theirs yet; the context's mask hides these.
        """
        end = self.length + k.shape[1]
        assert end <= self.max_len, f"the cache holds {self.max_len} tokens, {end} are needed"
        rows = torch.arange(k.shape[0], device=k.device)[:, None]  # (B, 1)
        self.keys[layer][rows, token_positions] = k.to(self.keys[layer].dtype)
        self.values[layer][rows, token_positions] = v.to(self.values[layer].dtype)
        return self.keys[layer][:, :end], self.values[layer][:, :end]  # (B, S, K, D)

    def advance(self, num_tokens: int) -> None:
        """Every row grew by `num_tokens`, padding included."""
        self.row_lengths = [length + num_tokens for length in self.row_lengths]
        self.positions += num_tokens

    def trim(self, row_lengths: list[int]) -> None:
        """Forget what padding wrote: row i keeps its first `row_lengths[i]` tokens."""
        assert len(row_lengths) == len(self.row_lengths), f"{len(row_lengths)} lengths, {len(self.row_lengths)} rows"
        longer = [(new, old) for new, old in zip(row_lengths, self.row_lengths, strict=True) if new > old]
        assert not longer, f"a row cannot be trimmed to more tokens than it holds: (new, old) {longer}"
        self.row_lengths = list(row_lengths)
        self.positions.copy_(torch.tensor(row_lengths))

    def keep_rows(self, rows: list[int]) -> None:
        """Drop the other rows, finished ones: layer by layer, so that one layer at most is held twice."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.positions.device)  # (B',)
        for layer in range(len(self.keys)):
            self.keys[layer] = self.keys[layer][index]
            self.values[layer] = self.values[layer][index]
        self.row_lengths = [self.row_lengths[row] for row in rows]
        self.positions = self.positions[index]
