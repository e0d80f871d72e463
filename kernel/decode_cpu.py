"""One decoding step of a dense float32 model on a CPU as one call of decode_cpu.cpp, over the engine's paged cache.

A step of a small model is some 200 operations of PyTorch, each a few microseconds of the host around less work. The
library reads weights and pages where they lie: the caller gives addresses, and keeps the tensors alive.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernel.decode_cpu_build import decode_library

# A layer's float32 tensors in the order of the struct Layer, 0 for one that the model lacks: norms (C,) or (D,),
# weights (out, in), biases (out,), keys and values (pages, page_size, K, D).
LAYER_POINTERS = (
    *("attention_norm", "q", "k", "v", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "o"),
    *("ffn_norm", "gate", "up", "down", "keys", "values"),
)
# Of the whole model: embedding and output (vocabulary, C), norm (C,), cos and sin (longest, D/2) float32, the slots'
# block tables (slots, columns) int32 and last tokens (slots,) int64.
MODEL_POINTERS = ("embedding", "norm", "output", "cos", "sin", "tables", "last_tokens")
LANES = 8  # floats of a vector: rows of every weight and heads are whole vectors
WORK_PER_THREAD = 1_500_000  # multiply-adds of a step: with less, waiting for a second thread costs what it saves


class Sizes(ctypes.Structure):
    """The struct Sizes: layers, C d_model, F d_ff, H heads, K kv heads, D head_dim, V scores to compute.

    page_size: of the cache. columns: of the block tables. longest: tokens of a sequence. threads: set by each step.
    """

    _fields_ = [(name, ctypes.c_int64) for name in "layers C F H K D V page_size columns longest threads".split()] + [
        ("eps", ctypes.c_double)
    ]


class Outputs(ctypes.Structure):
    """The struct Outputs: addresses."""

    _fields_ = [
        (name, ctypes.c_void_p) for name in ("scores", "packed", "norms", "uniforms", "temperatures", "scratch")
    ]


@dataclass
class Decoded:
    """scores (B, V) float32, the step's own until the next one, and where a token was chosen what it is.

    packed: (B, 3) float64, id, log softmax(scores / temperature) of it, and 1, the mass that no filter has cut.
    log_norms: (B,) float32, log of the sum of e^(scores / temperature).
    """

    scores: Tensor
    packed: Tensor | None = None
    log_norms: Tensor | None = None


def decode_runs(widths: list[int], head_dim: int) -> bool:
    """Whether the library takes a model whose weights have rows of `widths`, and can be had on this machine."""
    return all(width % LANES == 0 for width in (*widths, head_dim)) and decode_library() is not None


class CpuDecoder:
    """Steps of one model's shape; buffers grow with the batch."""

    def __init__(self, sizes: Sizes):
        self.library, self.sizes = decode_library(), sizes
        self.library.scratch_floats.restype = ctypes.c_int64
        self.scores = self.scratch = torch.empty(0)
        attention = (2 * sizes.H + 2 * sizes.K) * sizes.D
        self.work = sizes.layers * (sizes.C * (attention + 3 * sizes.F)) + sizes.C * sizes.V  # multiply-adds a token

    def step(self, model: np.ndarray, layers: np.ndarray, rows: Tensor, temperatures: Tensor | None) -> Decoded:
        """One token each of rows (3, B) int64: slots, lengths with the token itself, bits of uniforms in [0, 1).

        model (7,) and layers (L, 16) int64: addresses in the order of MODEL_POINTERS and LAYER_POINTERS. The tokens are
        the slots' last tokens. With temperatures (B,) float32 the next ones take their place: drawn by inverting the
        cumulative distribution at the uniforms, or the likeliest where it is 0. Keys and values go into the pages.
        """
        count, sizes = rows.shape[1], self.sizes
        sizes.threads = max(1, min(torch.get_num_threads(), count * self.work // WORK_PER_THREAD))
        self.grow(count)
        decoded, slots, stride = Decoded(self.scores[:count]), rows.data_ptr(), 8 * rows.stride(0)
        outputs = Outputs(scores=self.scores.data_ptr(), scratch=self.scratch.data_ptr())
        if temperatures is not None:
            decoded.packed, decoded.log_norms = torch.empty(count, 3, dtype=torch.float64), torch.empty(count)
            outputs.packed, outputs.norms = decoded.packed.data_ptr(), decoded.log_norms.data_ptr()
            outputs.uniforms, outputs.temperatures = slots + 2 * stride, temperatures.data_ptr()
        self.library.decode(
            ctypes.byref(sizes), ctypes.c_void_p(model.ctypes.data), ctypes.c_void_p(layers.ctypes.data),
            ctypes.c_void_p(slots), ctypes.c_void_p(slots + stride), ctypes.c_int64(count), ctypes.byref(outputs),
        )  # fmt: skip
        return decoded

    def grow(self, count: int) -> None:
        """Make the buffers large enough for `count` tokens."""
        needed = self.library.scratch_floats(ctypes.byref(self.sizes), ctypes.c_int64(count))
        if self.scratch.numel() < needed:
            self.scratch = torch.empty(needed)
        if self.scores.shape[0] < count:
            self.scores = torch.empty(count, self.sizes.V)
