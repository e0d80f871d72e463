"""The two long operations of the fused benchmark: output layer with cross-entropy, and AdamW with clipping.

Both are timed as they are called. For the loss the peak of memory beside inputs and returned gradients is taken too.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench_mark.bench_mark_flash_attention_cases import time_ms
from bench_mark.bench_mark_fused_ops_cases import has_liger, leaf
from kernel.adamw import AdamWRates, FusedAdamW
from kernel.cost_model import Peaks, predict
from kernel.cost_model_fused import adamw_update, predict_loss
from kernel.cross_entropy import LossOptions, linear_cross_entropy

N, C, V = 16_384, 2048, 32_768
# The shapes of a 124M model's parameters: 12 layers of width 768, feed-forward 2048, vocabulary 32,768 untied.
BLOCK_SHAPES = [(768, 768)] * 4 + [(2048, 768)] * 2 + [(768, 2048)] + [(768,)] * 2
SHAPES = BLOCK_SHAPES * 12 + [(32_768, 768)] * 2 + [(768,)]


def failing(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `call` found, or why it failed."""
    try:
        return call()
    except (RuntimeError, ValueError, AssertionError, TypeError) as error:
        torch.cuda.synchronize()
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}


def eager_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), targets)


def fused_loss(options: LossOptions) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda x, weight, targets: linear_cross_entropy(x, weight, targets, options)[0] / options.num_targets


def loss_contestants() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    found = {
        "mew": fused_loss(LossOptions(num_targets=N)),
        "mew, fp32 sums": fused_loss(LossOptions(num_targets=N, accumulate=torch.float32, chunk_bytes=1 << 27)),
        "torch": eager_loss,
        "compile": torch.compile(eager_loss, dynamic=False),
    }
    if has_liger():
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Liger

        found["liger"] = lambda x, weight, targets: Liger.apply(x, weight, targets)[0]
    return found


def time_loss(loss: Callable[..., Tensor], inputs: list[Tensor], targets: Tensor) -> dict[str, float]:
    """Milliseconds of forward and backward, and the peak of memory beside inputs and the two returned gradients."""

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss(*inputs, targets), inputs)

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    returned = sum(gradient.nbytes for gradient in step())
    extra = torch.cuda.max_memory_allocated() - before - returned
    return {"ms": time_ms(step, 300), "extra_bytes": extra}


def time_products(inputs: list[Tensor]) -> dict[str, float]:
    """The three products alone, with all logits in memory."""
    x, weight = (tensor.detach() for tensor in inputs)
    logits = torch.empty(N, V, device="cuda", dtype=x.dtype)

    def products() -> tuple[Tensor, ...]:
        return torch.mm(x, weight.t(), out=logits), logits @ weight, logits.t() @ x

    return {"ms": time_ms(products, 300)}


def measure_loss(peaks: Peaks) -> dict[str, Any]:
    """Output layer and cross-entropy at N16384 d2048 V32768 in bf16, forward and backward together."""
    torch.compiler.reset()
    inputs = [leaf(N, C), (leaf(V, C).detach() * 0.02).requires_grad_()]
    targets = torch.randint(V, (N,), device="cuda")
    found = {}
    for name, loss in loss_contestants().items():
        found[name] = failing(lambda loss=loss: time_loss(loss, inputs, targets))
        torch.cuda.empty_cache()
    found["three products alone"] = failing(lambda: time_products(inputs))
    predicted = predict_loss(N, C, V, 2, peaks)
    return {
        "case": f"cross_entropy N{N} d{C} V{V}",
        "found": found,
        "predicted": {"ms": 1e3 * predicted.seconds, "bound": predicted.bound},
    }


def measure_adamw(peaks: Peaks) -> dict[str, Any]:
    """One clipped update of a 124M model's parameters, float32: ours beside torch's fused and foreach AdamW."""
    params = [leaf(*shape, dtype=torch.float32) for shape in SHAPES]
    for param in params:
        param.grad = torch.randn_like(param)
    scale = torch.full((), 0.999, device="cuda")
    kernel, moments = FusedAdamW(), [[torch.zeros_like(param) for param in params] for _ in range(2)]

    @torch.no_grad()
    def ours() -> None:
        rates = AdamWRates(1e-4, 0.9, 0.95, 1e-8, 0.1, 10)
        kernel.update(params, [param.grad for param in params], tuple(moments), rates, scale)

    def torch_step(**kind: bool) -> Callable[[], None]:
        optimizer = torch.optim.AdamW(params, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, **kind)

        def step() -> None:
            torch._foreach_mul_([param.grad for param in params], scale)
            optimizer.step()

        return step

    steps = {"mew": lambda: ours, "torch fused": lambda: torch_step(fused=True), "torch foreach": torch_step}
    found = {name: failing(lambda make=make: {"ms": time_ms(make(), 100)}) for name, make in steps.items()}
    predicted = predict(adamw_update(sum(param.numel() for param in params), 4, 4), peaks)
    return {
        "case": "adamw 135M fp32, clipped",
        "found": found,
        "predicted": {"ms": 1e3 * predicted.seconds, "bound": predicted.bound},
    }
