"""How fast this device does generic work: matrix products, element-wise passes, attention, one tiny operation.

About three seconds. It never times a model of ours: the predictions made from it would then only repeat the
measurement. Sizes lie on a fixed grid; the cost model interpolates between them.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch.nn import functional as F

HELD_BYTES = 24 * 2**20
NEWTON_SCHULZ_WIDTH = 256  # of the bfloat16 product that stands for Muon's
Points = tuple[tuple[float, float], ...]  # (size, seconds or rate), sizes rising


@dataclass(frozen=True)
class Rates:
    """What was measured. Passes give seconds by bytes moved; matmul and attention give FLOP/s."""

    matmul: Points  # by the smaller of the inner and outer width
    new_pass: Points  # a * b into a new tensor
    inplace_pass: Points  # a *= 2
    exp_pass: Points  # silu(a) into a new tensor
    attention: tuple[tuple[int, Points, Points], ...]  # head_dim, forward and backward FLOP/s by sequence length
    bf16_matmul: float  # FLOP/s of a bfloat16 product of 256 x 256, for Muon's iteration; slow on most CPUs
    op_overhead_s: float  # of one operation on a tiny tensor, launch included
    other_passes: dict[str, Points] = field(default_factory=dict)  # those of KINDS; without one it is a new_pass

    def pass_points(self, kind: str) -> Points:
        """Seconds by bytes of "plain" passes, "exp", or one of KINDS."""
        return self.exp_pass if kind == "exp" else self.other_passes.get(kind, self.new_pass)


@dataclass(frozen=True)
class Grid:
    """The sizes to try on a kind of device."""

    widths: tuple[int, ...]
    rows: int
    elements: tuple[int, ...]
    head_dims: tuple[int, ...]
    seq_lens: tuple[int, ...]
    heads: int
    attention_tokens: int


# Attention on a GPU: large enough that the host, which needs 0.2 ms for forward and backward, does not hold it up.
GRIDS = {
    "cpu": Grid((64, 128, 256, 512, 1024), 1024, (2**12, 2**15, 2**18, 2**20, 2**22),
                (32, 64, 128), (128, 512), 4, 512),
    "cuda": Grid((512, 1024, 2048, 4096, 8192), 16384, (2**16, 2**20, 2**24, 2**26, 2**28),
                 (64, 128), (1024, 2048, 4096, 16384), 16, 32768),
}  # fmt: skip

BURST_S = 1e-3
# Products of a step that has little else run at the clocks that a GPU's power allows for long, and not at its highest.
SUSTAINED_S = 0.05


ROW_WIDTH, HALVES_WIDTH, BATCH = 1024, 64, 4


@dataclass(frozen=True)
class Operands:
    """What the passes of KINDS read: rows of ROW_WIDTH elements, float32 and in the dtype of products."""

    wide: torch.Tensor  # (rows, ROW_WIDTH)
    narrow: torch.Tensor  # the same cut (BATCH, rows / BATCH, ROW_WIDTH / HALVES_WIDTH, HALVES_WIDTH)
    column: torch.Tensor  # (rows, 1)
    table: torch.Tensor  # (rows / BATCH, 1, HALVES_WIDTH) float32, for the pieces of all batches

    @staticmethod
    def of(elements: int, device: torch.device, dtype: torch.dtype) -> "Operands":
        """BATCH rows or more."""
        rows = max(1, elements // (BATCH * ROW_WIDTH))
        wide = torch.ones(BATCH * rows, ROW_WIDTH, device=device)
        table = torch.ones(rows, 1, HALVES_WIDTH, device=device)
        return Operands(wide, wide.to(dtype).view(BATCH, rows, -1, HALVES_WIDTH), wide[:, :1].contiguous(), table)

    def join(self) -> torch.Tensor:
        first, second = self.narrow.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)


@dataclass(frozen=True)
class Kind:
    """A pass that torch's kernels do not run at the speed of a copy: bytes of an element, wide and narrow tensors'."""

    wide: int  # float32 tensors read or written, in elements of one
    narrow: int  # tensors in the dtype of products
    work: Callable[[Operands], torch.Tensor]


# On an H200 a * b moves 4.3 TB/s, these from 1 to 3: kernels that are not vectorised, and the more dimensions they have
# to find their way in, the slower.
KINDS = {
    "broadcast": Kind(2, 0, lambda x: x.wide * x.column),
    "widen": Kind(1, 1, lambda x: x.narrow.float()),
    "mixed": Kind(1, 1, lambda x: x.narrow * x.table),
    "join": Kind(0, 3, Operands.join),  # half of them negated, read and written; then all
    "sum": Kind(1, 0, lambda x: x.wide.sum(-1)),
}
NARROW_KINDS = ("widen", "mixed")  # there are none where products are float32


class Stopwatch:
    """Times a callable on a device: the best of the calls that fit the budget, after warming up.

    What the machine can do when nobody disturbs it. Where other processes take its cores, a run measures more than is
    predicted, and the ratio says so: averages tried before told of the disturbance during two seconds, not of the run's
    (a product of 1 ms waits 8 ms for a core, and two threads wait for each other). With `hold`, results are kept up to
    HELD_BYTES, so that each lands in memory that left the caches, as in a model.
    """

    def __init__(self, device: torch.device, now_s: Callable[[], float] = time.perf_counter):
        self.device, self.now_s = device, now_s
        self.budget_s, self.fewest, self.most = 0.015, 5, 40

    def __call__(self, work: Callable[[], torch.Tensor | None], hold: bool = False) -> float:
        return self.on_gpu(work) if self.device.type == "cuda" else self.on_cpu(work, hold)

    def on_gpu(self, work: Callable[[], torch.Tensor | None]) -> float:
        """Calls are issued in bursts of about a millisecond between two events, as a step issues its own: a call timed
        alone would count the wait for the host as well."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        burst, seconds = 1, []
        for _ in range(2 + self.fewest):  # the first two are for warming up and for finding the burst's length
            start.record()
            for _ in range(burst):
                work()
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3 / burst)
            burst = max(1, min(100, math.ceil(BURST_S / seconds[-1])))
        return min(seconds[2:])

    def sustained(self, work: Callable[[], torch.Tensor | None]) -> float:
        """A call's seconds after as long a time of nothing but such calls; on a CPU the best, as ever."""
        if self.device.type != "cuda":
            return self(work)
        count = max(1, math.ceil(SUSTAINED_S / self.on_gpu(work)))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for call in range(2 * count):
            if call == count:
                start.record()
            work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / count

    def on_cpu(self, work: Callable[[], torch.Tensor | None], hold: bool) -> float:
        held = deque([work()], maxlen=1)
        if hold:
            held = deque(maxlen=min(2048, max(1, HELD_BYTES // work().nbytes)))
            held.extend(work() for _ in range(held.maxlen))
        times: list[float] = []
        while len(times) < self.fewest or (len(times) < self.most and sum(times) < self.budget_s):
            start_s = self.now_s()
            held.append(work())
            times.append(self.now_s() - start_s)
        return min(times)


def calibrate(device: torch.device, dtype: torch.dtype, now_s: Callable[[], float] = time.perf_counter) -> Rates:
    """Measure `device`; matrix products and attention in `dtype`, passes in float32; a CPU by the clock `now_s`."""
    grid = GRIDS[device.type]
    if device.type == "cuda":
        raise_clocks(device)
    stopwatch = Stopwatch(device, now_s)
    return Rates(
        matmul=tuple((width, matmul_rate(width, grid.rows, device, dtype, stopwatch)) for width in grid.widths),
        new_pass=pass_times(grid, device, lambda a, b: a * b, 3, stopwatch),
        inplace_pass=pass_times(grid, device, lambda a, b: a.mul_(1.0), 2, stopwatch),
        exp_pass=pass_times(grid, device, lambda a, b: F.silu(a), 2, stopwatch),
        attention=tuple(attention_rates(head_dim, grid, device, dtype, stopwatch) for head_dim in grid.head_dims),
        bf16_matmul=square_bf16_rate(device, stopwatch),
        op_overhead_s=op_overhead(device, stopwatch),
        other_passes={
            name: kind_times(kind, grid, device, dtype, stopwatch)
            for name, kind in KINDS.items()
            if dtype.itemsize < 4 or name not in NARROW_KINDS
        },
    )


def raise_clocks(device: torch.device, seconds: float = 0.2) -> None:
    """Keep an idle GPU busy for a moment, until its clocks are those of work."""
    square = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        square @ square
        torch.cuda.synchronize(device)


def matmul_rate(width: int, rows: int, device: torch.device, dtype: torch.dtype, stopwatch: Stopwatch) -> float:
    """FLOP/s of the three products of a linear layer (rows, width) x (width, width) together."""
    # Random numbers: products of ones run faster, since fewer bits change.
    x, gradient = torch.randn(2, rows, width, device=device, dtype=dtype)
    weight = torch.randn(width, width, device=device, dtype=dtype)
    products = [lambda: F.linear(x, weight), lambda: gradient @ weight, lambda: gradient.t() @ x]
    return 6 * rows * width * width / sum(stopwatch.sustained(product) for product in products)


def square_bf16_rate(device: torch.device, stopwatch: Stopwatch) -> float:
    square = torch.ones(NEWTON_SCHULZ_WIDTH, NEWTON_SCHULZ_WIDTH, device=device, dtype=torch.bfloat16)
    return 2 * NEWTON_SCHULZ_WIDTH**3 / stopwatch(lambda: square @ square)


def pass_times(grid: Grid, device: torch.device, work: Callable, tensors: int, stopwatch: Stopwatch) -> Points:
    """(bytes moved, seconds) of an element-wise operation that touches so many float32 tensors."""
    points = []
    for elements in grid.elements:
        a, b = torch.ones(elements, device=device), torch.ones(elements, device=device)
        points.append((4.0 * tensors * elements, stopwatch(lambda a=a, b=b: work(a, b), hold=True)))
    return tuple(points)


def kind_times(kind: Kind, grid: Grid, device: torch.device, dtype: torch.dtype, stopwatch: Stopwatch) -> Points:
    """(bytes moved, seconds) of a pass of KINDS."""
    points = []
    for elements in grid.elements:
        inputs = Operands.of(elements, device, dtype)
        moved = (kind.wide * inputs.wide.itemsize + kind.narrow * dtype.itemsize) * inputs.wide.numel()
        points.append((float(moved), stopwatch(lambda inputs=inputs: kind.work(inputs), hold=True)))
    return tuple(points)


def attention_rates(
    head_dim: int, grid: Grid, device: torch.device, dtype: torch.dtype, stopwatch: Stopwatch
) -> tuple[int, Points, Points]:
    """FLOP/s of torch's causal attention, forward and backward, counting half of the scores."""
    forward, backward = [], []
    for seq_len in grid.seq_lens:
        batch = max(1, grid.attention_tokens // seq_len)
        shape = (batch, seq_len, grid.heads, head_dim)  # (B, T, H, D), as projections write it
        q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))

        def attend(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> torch.Tensor:
            q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))  # (B, H, T, D)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def both(attend: Callable = attend, inputs: tuple = (q, k, v), gradient: torch.Tensor = attend().detach()):
            torch.autograd.grad(attend(), inputs, gradient)

        flops = 2 * batch * grid.heads * seq_len * seq_len * head_dim
        with torch.enable_grad():
            forward_s, both_s = stopwatch.sustained(attend), stopwatch.sustained(both)
        forward.append((seq_len, flops / forward_s))
        backward.append((seq_len, 2 * flops / max(both_s - forward_s, 0.1 * both_s)))
    return head_dim, tuple(forward), tuple(backward)


def op_overhead(device: torch.device, stopwatch: Stopwatch, count: int = 200) -> float:
    """Seconds that the host needs to issue one operation and its backward's, halved."""
    x = torch.ones(16, device=device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(count):
            y = y * 1.5
        y.backward(torch.ones_like(y))

    # By the host's clock on a GPU too, whose kernels are shorter; the best of many, since threads wait for each other.
    patient = Stopwatch(device, stopwatch.now_s)
    patient.budget_s = 0.1
    with torch.enable_grad():
        return patient.on_cpu(chain, hold=False) / (2 * count)


def interpolate(points: Points, size: float) -> float:
    """The value at `size`, straight between the points on logarithmic axes and constant beyond their ends."""
    if size <= points[0][0]:
        return points[0][1]
    for (low, low_value), (high, high_value) in pairwise(points):
        if size <= high:
            share = math.log(size / low) / math.log(high / low)
            return low_value * (high_value / low_value) ** share
    return points[-1][1]


def pass_time(points: Points, size_bytes: float) -> float:
    """Seconds to move so many bytes in one pass: interpolated, and in proportion beyond the largest size tried."""
    largest_bytes, largest_s = points[-1]
    return largest_s * size_bytes / largest_bytes if size_bytes > largest_bytes else interpolate(points, size_bytes)
