"""What the fused operations must do (KernelWork), each tensor read once and written once; bytes an element are given.

All but the loss are bound by memory. The loss is two kinds of work that do not overlap: three products, and a pass over
the logits between them. N rows, C width, F hidden width, V vocabulary.
"""

from kernel.cost_model import KernelPrediction, KernelWork, Peaks, predict


def norm_forward(N: int, C: int, itemsize: int, stream_itemsize: int = 0) -> KernelWork:
    """x in, normed out, and with a residual stream that in and the sum out; 1 / rms of each row."""
    return KernelWork(0.0, 0.0, float(N * C * (2 * itemsize + 2 * stream_itemsize) + 4 * N))


def norm_backward(N: int, C: int, itemsize: int, stream_itemsize: int = 0) -> KernelWork:
    """stream and dnormed in, dx out, and with a residual its gradient in and out."""
    own = 3 * itemsize if not stream_itemsize else 2 * itemsize + 3 * stream_itemsize
    return KernelWork(0.0, 0.0, float(N * C * own + 4 * N))


def rope_pass(N: int, heads: int, D: int, itemsize: int) -> KernelWork:
    """All heads of q and k in and out; of the tables half a head a token."""
    return KernelWork(0.0, 0.0, float(2 * N * heads * D * itemsize + 4 * N * D))


def swiglu_forward(N: int, F: int, itemsize: int) -> KernelWork:
    return KernelWork(0.0, float(N * F), float(3 * N * F * itemsize))


def swiglu_backward(N: int, F: int, itemsize: int) -> KernelWork:
    """gate, up and the incoming gradient in, their two gradients out."""
    return KernelWork(0.0, float(N * F), float(5 * N * F * itemsize))


def adamw_update(num_elements: int, itemsize: int, gradient_itemsize: int) -> KernelWork:
    """Weight and two float32 moments in and out, the gradient in."""
    return KernelWork(0.0, 0.0, float(num_elements * (2 * itemsize + gradient_itemsize + 16)))


def loss_products(N: int, C: int, V: int, itemsize: int) -> KernelWork:
    """Logits, dx and dW: three products, whose own traffic is small beside their FLOPs."""
    return KernelWork(6.0 * N * C * V, 0.0, float(itemsize * (3 * N * V + 3 * N * C + 3 * V * C)))


def loss_pass(N: int, V: int, itemsize: int) -> KernelWork:
    """Logits in, their gradient out; an exponential for the sum and one for the gradient."""
    return KernelWork(0.0, 2.0 * N * V, float(2 * N * V * itemsize))


def predict_loss(N: int, C: int, V: int, itemsize: int, peaks: Peaks) -> KernelPrediction:
    """The output layer with its loss, forward and backward: the products, then the pass, one after the other."""
    products, rows = predict(loss_products(N, C, V, itemsize), peaks), predict(loss_pass(N, V, itemsize), peaks)
    units = {"matmul": products.seconds, rows.bound: rows.seconds}
    return KernelPrediction(products.seconds + rows.seconds, products.bound, units)
