"""The element-wise work of a block, pass by pass: bytes that each kind of torch's kernels moves for an element.

Counted as it runs, operation by operation (tests/llm/test_cost_model_time.py holds the counts against torch's
dispatcher). A kind has a speed of its own, since torch vectorises only what has one dtype and one shape: "plain" and
"exp", and those of llm/hardware_calibration.KINDS.
"""

from dataclasses import dataclass, fields, replace

from llm.args import KernelsConfig
from llm.cost_model_counts import Workload, kv_width, query_width
from llm.cost_model_memory import BF16, FP32, matmul_bytes, stream_bytes
from llm.hardware_calibration import Rates, pass_time


@dataclass(frozen=True)
class Moved:
    """Bytes an element that forward and backward read and write, by kind."""

    plain: float = 0.0
    exp: float = 0.0  # computes an exponential, which on a CPU is slower than the memory
    broadcast: float = 0.0  # an operand is a row or a column, or two dtypes are added
    widen: float = 0.0  # the dtype of products to float32
    mixed: float = 0.0  # a product of two dtypes, one operand broadcast
    join: float = 0.0  # halves or repeated heads written side by side
    sum: float = 0.0

    def __add__(self, other: "Moved") -> "Moved":
        return Moved(*(getattr(self, kind.name) + getattr(other, kind.name) for kind in fields(Moved)))


# Of one call, an element: what the calibration times. A pass of a kind is taken to be so many calls of that size.
CALL_BYTES = Moved(plain=3 * FP32, exp=2 * FP32, broadcast=2 * FP32, widen=6, mixed=6, join=6, sum=FP32)


@dataclass(frozen=True)
class Passes:
    """Element-wise work on `width` elements a token; `kernels` is the operations of forward and backward."""

    what: str
    width: float
    moved: Moved
    kernels: int
    on_stream: bool = False  # between the layers, where sequence parallelism leaves a rank its share of the tokens


def passes_time(passes: Passes, work: Workload, rates: Rates) -> float:
    """Seconds of forward and backward together."""
    elements = (work.stream_tokens if passes.on_stream else work.tokens) * passes.width
    seconds = 0.0
    for kind in fields(Moved):
        moved, call = getattr(passes.moved, kind.name), getattr(CALL_BYTES, kind.name)
        if moved:
            seconds += moved / call * pass_time(rates.pass_points(kind.name), call * elements)
    return seconds


def block_passes(work: Workload) -> list[Passes]:
    """Every element-wise operation of one block, forward and backward."""
    if work.compile != "none":
        return compiled_passes(work)
    fused = {"norm": fused_norm_passes, "rope": fused_rope_passes, "swiglu": fused_swiglu_passes}
    passes = [own for operation, make in fused.items() if work.fuses(operation) for own in make(work)]
    return passes + [own for operation, own in eager_passes(work) if not work.fuses(operation)]


def fused_norm_passes(work: Workload) -> list[Passes]:
    """Two norms with the sums before them, and back: tensors of the stream and of e bytes (kernel/)."""
    S, e = stream_bytes(work), matmul_bytes(work)
    forward = (S + e) + (2 * S + 2 * e) + (2 * S + e)
    backward = (3 * S + e) + (3 * S + 2 * e if e != S else 4 * S) + (0 if e == S else S + e)
    moved = Moved(plain=forward + backward)
    return [Passes("two norms with the residual sums", work.model.d_model, moved, 8, on_stream=True)]


def fused_rope_passes(work: Workload) -> list[Passes]:
    width, e = query_width(work.model) + kv_width(work.model), matmul_bytes(work)
    return [Passes("rotate q and k", width, Moved(plain=4 * e), 2)]


def fused_swiglu_passes(work: Workload) -> list[Passes]:
    """Dense blocks; experts stay as they are."""
    if work.model.moe.num_experts:
        return [own for operation, own in eager_passes(replace(work, kernels=KernelsConfig())) if operation == "swiglu"]
    return [Passes("silu times up", work.model.d_ff, Moved(plain=(3 + 5) * matmul_bytes(work)), 2)]


def eager_passes(work: Workload) -> list[tuple[str, Passes]]:
    """As torch runs the model's lines one by one, each with the fused operation that would replace it ("" for none)."""
    model, e = work.model, matmul_bytes(work)
    C, Q, K = model.d_model, query_width(model), kv_width(model)
    shared = e if work.fuses("norm") else FP32  # of a gradient that several projections give to one input
    passes = [
        ("norm", Passes("two norms", 2 * C, norm_moved(), 2 * 21, on_stream=True)),
        ("norm", Passes("residual sums", C, residual_moved(e), 2 if e == FP32 else 4, on_stream=True)),
        ("linear", Passes("gradients of shared inputs", C, Moved(plain=3 * 3 * shared), 3, on_stream=True)),
        ("rope", Passes("rotate q and k", Q + K, rope_moved(e), 28 if e < FP32 else 20)),
        *(("swiglu", own) for own in ffn_passes(work)),
    ]
    if e == BF16:
        inputs = Moved(plain=5 * (FP32 + BF16), widen=5 * (FP32 + BF16))
        passes.append(("norm", Passes("inputs of projections to bfloat16, gradients back", C, inputs, 10)))
        # Their seconds are accumulation_time's, which knows how often a step casts them.
        passes.append(("linear", Passes("weights to bfloat16, gradients back", 0, Moved(), 14)))
    if model.num_kv_heads != model.num_heads and model.attention != "triton":
        repeats = Moved(join=e + e * K / Q, sum=e)
        passes.append(("", Passes("repeat k and v to all heads, sum their gradients", 2 * Q, repeats, 4)))
    if model.qkv_bias:
        passes.append(("", Passes("gradients of the biases", Q + 2 * K, Moved(sum=e), 3 if e == FP32 else 9)))
    if model.qk_norm:
        casts = Moved(plain=2 * (FP32 + e), widen=2 * (FP32 + e)) if e < FP32 else Moved()
        passes.append(("norm", Passes("norms of q and k", Q + K, norm_moved(adds=1) + casts, 40 if e == FP32 else 48)))
    return passes


def norm_moved(adds: int = 2) -> Moved:
    """Square, mean, scale, weight; and back, with `adds` sums of gradients that meet at the norm's input."""
    forward = Moved(plain=8, sum=4, broadcast=8 + 8)
    # Two products for the weight's gradient and for the mean's, power, factor and product of the square's, sums.
    backward = Moved(plain=12 + 12 + 8 + 8 + 12 + 12 * adds, sum=4 + 4, broadcast=8 + 8 + 4)
    return forward + backward


def residual_moved(e: int) -> Moved:
    """Two sums of the float32 stream and an output of e bytes, and the cast of each one's gradient."""
    return Moved(plain=2 * 3 * FP32) if e == FP32 else Moved(broadcast=2 * (2 * FP32 + e), plain=2 * (FP32 + e))


def rope_moved(e: int) -> Moved:
    """(x cos + joined sin).to(x.dtype), with float32 tables; and back, where each product's gradient is cast."""
    if e == FP32:
        return Moved(join=2 * 3 * e, broadcast=4 * 2 * FP32, plain=2 * 3 * FP32)
    casts, sums = 3 * (FP32 + e), 3 * FP32 + 3 * e
    return Moved(join=2 * 3 * e, mixed=2 * (e + FP32), broadcast=2 * 2 * FP32, plain=casts + sums, widen=FP32 + e)


def loss_moved(e: int) -> Moved:
    """Of a logit in llm/loss.py: maximum, difference, exponential, sum; and back difference, exponential, scale, copy.

    Both ways start with a cast to float32 where logits are narrower.
    """
    widened = 2 * (FP32 + e) if e < FP32 else 0
    return Moved(sum=2 * FP32, broadcast=3 * 2 * FP32, exp=2 * 2 * FP32, plain=FP32 + e, widen=widened)


def ffn_passes(work: Workload) -> list[Passes]:
    model, e = work.model, matmul_bytes(work)
    moe = model.moe
    F = moe.experts_per_token * moe.d_ff if moe.num_experts else model.d_ff
    experts = max(1, moe.num_experts)
    passes = [
        Passes("silu, and its backward", F, Moved(exp=(2 + 3) * e), 2 * experts),
        Passes("silu times up, and its two gradients", F, Moved(plain=(3 + 6) * e), 3 * experts),
    ]
    if moe.num_experts:
        kC = moe.experts_per_token * model.d_model
        passes.append(Passes("gather by expert, weigh, scatter; and back", kC, Moved(plain=24 * FP32), 30))
    return passes


def compiled_passes(work: Workload) -> list[Passes]:
    """Inductor fuses what lies between two matrix products into one kernel each, at the speed of a copy.

    Read off the kernels of a compiled block. Forward: norm, norm with sum, sum. Backward: a cast of the gradient, and
    each norm's with the gradients that meet there, the second one's written for the projection before it too.
    """
    model, S, e = work.model, FP32, matmul_bytes(work)
    C, Q, K = model.d_model, query_width(model), kv_width(model)
    F = model.moe.experts_per_token * model.moe.d_ff if model.moe.num_experts else model.d_ff
    forward = (S + e) + (S + 2 * e) + (2 * S + 2 * e)
    backward = (S + e if e < S else 0) + (3 * S + 4 * e) + (3 * S + 3 * e)
    repeated = 2 * (K + Q) if model.num_kv_heads != model.num_heads and model.attention != "triton" else 0
    return [
        Passes("residual sum with norm, twice", C, Moved(plain=forward + backward), 6, on_stream=True),
        Passes("rotate q and k, repeat k and v", Q + K + repeated / 2, Moved(plain=4 * e), 6),
        Passes("silu times up", F, Moved(exp=(3 + 5) * e), 2),
    ]
