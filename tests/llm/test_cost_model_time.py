"""The bytes that the time model counts for a block, held against what torch's dispatcher runs, kind by kind."""

import math
from collections import Counter
from dataclasses import fields, replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llm.args import KernelsConfig, ModelConfig
from llm.cost_model import Workload
from llm.cost_model_memory import BF16, FP32
from llm.cost_model_time import (
    DISPATCHES_PER_KERNEL,
    PYTHON_NODE_OPS,
    TRITON_LAUNCH_OPS,
    end_passes,
    predict_step_time,
)
from llm.cost_model_time_passes import Moved, Passes, block_passes, loss_moved
from llm.hardware_calibration import KINDS, Rates
from llm.loss import CrossEntropyLoss
from llm.transformer import Transformer
from llm.transformer_init import initialise

BASE = ModelConfig(vocab_size=96, max_seq_len=64, d_model=64, num_layers=1, num_heads=4, d_ff=160)
SHAPES = {
    "plain": BASE,
    "gqa": replace(BASE, num_kv_heads=2),
    "qwen": replace(BASE, num_kv_heads=2, qkv_bias=True, qk_norm=True, head_dim=32),
}
ROWS, LENGTH = 2, 32
VIEWS = {"view", "t", "transpose", "expand", "unsqueeze", "squeeze", "split", "slice", "alias", "detach", "permute"}
VIEWS |= {"_unsafe_view", "select", "promote_types", "scalar_tensor", "arange", "empty_like", "zeros", "ones_like"}
PRODUCTS = {"mm", "addmm", "embedding", "embedding_dense_backward", "gather", "scatter_"}
FLAT, FAST, SLOW = ((1.0, 1e15),), ((1.0, 1e-12), (1e9, 1e-3)), ((1.0, 1e-9), (1e9, 1.0))  # FLOP/s; TB/s, GB/s


class Dispatched(TorchDispatchMode):
    """Bytes by kind and kernels, of tensors that have a dimension of tokens."""

    def __init__(self, smallest: int, cast_dims: tuple[int, ...] = (2, 3, 4)):
        super().__init__()
        self.smallest, self.cast_dims, self.moved, self.kernels = smallest, cast_dims, Counter(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        inputs = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        if name in VIEWS or name in PRODUCTS or "attention" in name or not inputs:
            return result
        self.kernels += 1
        large = max(tensor.numel() for tensor in (result, *inputs)) >= self.smallest
        if large and (name != "_to_copy" or result.ndim in self.cast_dims):
            self.count(name, inputs, result)
        return result

    def count(self, name: str, inputs: list[torch.Tensor], result: torch.Tensor) -> None:
        if name == "copy_":
            inputs = inputs[1:]  # the first is only written
        large = [tensor for tensor in inputs if distinct(tensor) >= self.smallest]
        read, written = sum(size(tensor) for tensor in large), size(result)
        mixed = len({tensor.dtype for tensor in inputs}) > 1
        if name in ("sum", "mean", "amax"):
            self.moved["sum"] += read
        elif name in ("cat", "neg", "clone"):
            self.moved["join"] += read + written
        elif name.startswith(("silu", "exp")):
            self.moved["exp"] += read + written
        elif name == "logsumexp":  # on a GPU four kernels: maximum, difference, exponential, sum
            self.moved.update({"sum": 2 * read, "broadcast": 2 * read, "exp": 2 * read})
        elif name in ("_to_copy", "copy_"):
            self.moved["widen" if result.itemsize > inputs[-1].itemsize else "plain"] += read + written
        elif len(large) < len(inputs) and inputs[-1].ndim:
            self.moved["mixed" if mixed else "broadcast"] += read + written
        else:
            self.moved["broadcast" if mixed else "plain"] += read + written


def distinct(tensor: torch.Tensor) -> int:
    """Elements that differ in address: an expanded tensor is read once."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(length for length, stride in pairs if stride)


def size(tensor: torch.Tensor) -> int:
    return distinct(tensor) * tensor.itemsize


def dispatched(model: ModelConfig, dtype: str, layers: int) -> Dispatched:
    built = Transformer(replace(model, num_layers=layers))
    initialise(built, seed=0)
    token_ids = torch.randint(model.vocab_size, (ROWS, LENGTH))
    # Casts of matrices are weights' and their gradients': accumulation_time has those.
    seen = Dispatched(ROWS * LENGTH * model.num_kv_heads * model.head_dim // 2, cast_dims=(3, 4))
    with seen:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            states = built.hidden_states(token_ids)
        states.backward(torch.ones_like(states))
    return seen


def nonzero(elements: float, moved: Moved) -> Counter:
    return Counter({kind.name: elements * getattr(moved, kind.name) for kind in fields(Moved)}) + Counter()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_block_moves_the_bytes_that_the_dispatcher_counts(name, dtype):
    model = SHAPES[name]
    one, two = (dispatched(model, dtype, layers) for layers in (1, 2))
    passes = block_passes(Workload(model, ROWS, LENGTH, dtype=dtype))
    counted = sum((nonzero(ROWS * LENGTH * own.width, own.moved) for own in passes), Counter())
    assert counted == two.moved - one.moved
    assert sum(own.kernels for own in passes) == two.kernels - one.kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_moves_the_bytes_that_the_dispatcher_counts(dtype):
    rows, vocab_size = 4096, 64  # in two chunks on a CPU
    logits, targets = torch.randn(rows, vocab_size, dtype=dtype, requires_grad=True), torch.zeros(rows).long()
    seen = Dispatched(smallest=rows * vocab_size // 2)
    with seen:
        CrossEntropyLoss()(logits, targets).loss_sum.backward()
    assert seen.moved == nonzero(rows * vocab_size, loss_moved(logits.dtype.itemsize))


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_that_is_slow_slows_the_blocks_that_have_it(kind):
    work = Workload(BASE, ROWS, LENGTH, device="cuda", dtype="bfloat16")
    rates = Rates(FLAT, FAST, FAST, FAST, ((16, FLAT, FLAT),), 1e15, 0.0, dict.fromkeys(KINDS, FAST))
    slow = replace(rates, other_passes=rates.other_passes | {kind: SLOW})
    passes = [*block_passes(work), *end_passes(work), Passes("loss", BASE.vocab_size, loss_moved(BF16), 0)]
    moved = ROWS * LENGTH * sum(own.width * getattr(own.moved, kind) for own in passes)
    if kind == "widen":  # gradients of weights
        moved += (FP32 + BF16) * (4 * 64 * 64 + 3 * 64 * 160 + 64 * BASE.vocab_size)
    added = predict_step_time(work, slow).step_s - predict_step_time(work, rates).step_s
    assert moved and added == pytest.approx(moved * (1e-9 - 1e-12), rel=1e-6)


def test_a_fused_step_costs_its_host_what_python_nodes_and_launches_cost_there():
    work = Workload(replace(BASE, num_layers=3), ROWS, LENGTH, device="cuda", kernels=KernelsConfig(swiglu=True))
    plain = replace(work, kernels=KernelsConfig())
    rates = Rates(FLAT, FAST, FAST, FAST, ((16, FLAT, FLAT),), 1e15, 1e-6)
    fused, eager = (predict_step_time(each, rates).host_s for each in (work, plain))
    # A node and two launches a block, and two kernels in place of five.
    own = PYTHON_NODE_OPS + 2 * TRITON_LAUNCH_OPS - 3 * DISPATCHES_PER_KERNEL
    assert fused - eager == pytest.approx(3 * own * 1e-6)
