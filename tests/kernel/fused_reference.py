"""What the tests of the fused operations share: errors against float64, ours beside PyTorch's in the same precision."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.tolerances import PEER_ERROR

Operation = Callable[..., tuple[Tensor, ...]]
INTERPRETED = not torch.cuda.is_available()
DEVICE = "cpu" if INTERPRETED else "cuda"


def relative_error(x: Tensor, exact: Tensor) -> float:
    assert x.shape == exact.shape, f"{x.shape} for {exact.shape}"
    return ((x.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def results_and_gradients(operation: Operation, inputs: Sequence[Tensor], upstream: Sequence[Tensor]) -> list[Tensor]:
    """The operation's outputs and the gradients of its inputs, all detached; the inputs are copied first."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = operation(*leaves)
    upstream = [g.to(out.dtype) for g, out in zip(upstream, outputs, strict=True)]
    return [x.detach() for x in (*outputs, *torch.autograd.grad(outputs, leaves, upstream))]


def shaken(x: Tensor) -> Tensor:
    """x with each number half a float32 ulp up or down, as a rounding may leave it."""
    sign = torch.randint(2, x.shape, device=x.device).to(x.dtype) * 2 - 1
    return x * (1 + sign * torch.finfo(torch.float32).eps / 2)


def check_against_float64(
    ours: Operation, reference: Operation, inputs: Sequence[Tensor], upstream: Sequence[Tensor], least: float = 0.0
):
    """Each result's error against the reference in float64 is at most PEER_ERROR times that of the reference itself.

    An error up to `least` is always allowed: what the hardware's approximate functions may add. So is what one float32
    rounding of the inputs would change, which is much where a result is a small difference of large terms.
    """
    mine, theirs = (results_and_gradients(operation, inputs, upstream) for operation in (ours, reference))
    wide, gradients = [x.double() for x in inputs], [g.double() for g in upstream]
    exact = results_and_gradients(reference, wide, gradients)
    rounded = [
        results_and_gradients(reference, [shaken(x) for x in wide], [shaken(g) for g in gradients]) for _ in range(4)
    ]
    for index, (a, b, x, *shaken_results) in enumerate(zip(mine, theirs, exact, *rounded, strict=True)):
        assert a.dtype == b.dtype and a.is_contiguous(), f"result {index}: {a.dtype} for {b.dtype}"
        # One rounding is nobody's fault. An error in a single number is one draw, with no average: any may be near 0.
        floor = max(torch.finfo(a.dtype).eps / 2, *(relative_error(y, x) for y in (b, *shaken_results)))
        bound = max(PEER_ERROR * floor * (3.0 if a.numel() == 1 else 1.0), least)
        assert relative_error(a, x) <= bound, f"result {index}: {relative_error(a, x):.2e} above {bound:.2e}"
