"""What the attention benchmark and its sweep share: shapes, inputs, the industrial kernels, timing and errors."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernel.cost_model import AttentionShape, Peaks, causal_pairs, exp_rate

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v to out, each in the layout of its kernel


@dataclass(frozen=True)
class Case:
    """One shape of the table, causal self-attention in bf16."""

    name: str
    B: int
    T: int
    H: int
    K: int
    D: int

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(self.B, self.T, self.T, self.H, self.K, self.D)

    @property
    def pairs(self) -> float:
        return causal_pairs(self.T, self.T)


CASES = [
    Case("B4 H16 T4096 D128", 4, 4096, 16, 16, 128),
    Case("B4 H16 T4096 D64", 4, 4096, 16, 16, 64),
    Case("B1 H16 T16384 D128", 1, 16384, 16, 16, 128),
    Case("B16 H16 T1024 D64", 16, 1024, 16, 16, 64),
    Case("B4 H32/8 T4096 D64", 4, 4096, 32, 8, 64),
    Case("B4 H32/8 T4096 D128", 4, 4096, 32, 8, 128),
    Case("packed 32 documents", 1, 16384, 16, 16, 128),
]


def make_inputs(case: Case, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """q (B, T, H, D), k and v (B, T, K, D), dout: fresh normal numbers, requiring gradients."""
    sizes = [case.H, case.K, case.K, case.H]
    tensors = [torch.randn(case.B, case.T, heads, case.D, device="cuda", dtype=dtype) for heads in sizes]
    return [x.requires_grad_() for x in tensors[:3]] + tensors[3:]


def document_lengths(total: int, count: int = 32, seed: int = 0) -> list[int]:
    """`count` lengths that sum to `total`, log-normal: most documents short, a few long."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(count, generator=generator).exp()
    lengths = (weights / weights.sum() * (total - count)).int() + 1
    lengths[-1] += total - lengths.sum()
    return lengths.tolist()


def document_ids(total: int) -> Tensor:
    """The document (T,) of each of `total` tokens, on the GPU."""
    lengths = torch.tensor(document_lengths(total))
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths).cuda()


def heads_first(tensors: list[Tensor]) -> list[Tensor]:
    """The same numbers as contiguous (B, H, T, D), the layout PyTorch's kernels are usually measured in."""
    return [x.detach().transpose(1, 2).contiguous().requires_grad_(x.requires_grad) for x in tensors]


def sdpa(backend: SDPBackend) -> Attend:
    """PyTorch's attention through one of its kernels, causal; inputs (B, H, T, D)."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])

    return attend


def flex(num_tokens: int, doc_ids: Tensor | None = None) -> Attend:
    """Compiled FlexAttention, causal, inside documents (T,) where given; inputs (B, H, T, D)."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(b, h, query, key):
        causal = query >= key
        return causal if doc_ids is None else causal & (doc_ids[query] == doc_ids[key])

    mask = create_block_mask(visible, None, None, num_tokens, num_tokens, device="cuda")
    torch._dynamo.reset()  # else the shapes before this one count against its limit of recompilations
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def peers(case: Case) -> dict[str, Callable[[], Attend]]:
    """The industrial kernels, each made when it is wanted."""
    return {
        "cudnn": lambda: sdpa(SDPBackend.CUDNN_ATTENTION),
        "flash": lambda: sdpa(SDPBackend.FLASH_ATTENTION),
        "flex": lambda: flex(case.T),
    }


def time_ms(call: Callable[[], object], rep_ms: int = 100) -> float:
    """Median milliseconds of a call between device events, L2 emptied before each."""
    return triton.testing.do_bench(call, warmup=25, rep=rep_ms, return_mode="median")


def graph_ms(call: Callable[[], object], rep_ms: int = 100) -> float:
    """The same, replayed from a CUDA graph: what the device needs, however slow the host is."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm-up off the capturing stream, as PyTorch asks
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return time_ms(graph.replay, rep_ms)


def time_passes(attend: Attend, tensors: list[Tensor], captured: bool = True, rep_ms: int = 100) -> dict[str, float]:
    """Milliseconds of one kernel, `tensors` being q, k, v, dout in its layout.

    forward and backward as eager calls; device: both together from a CUDA graph, without the host.
    """
    q, k, v, dout = tensors
    with torch.no_grad():
        forward = time_ms(lambda: attend(q, k, v), rep_ms)
    out = attend(q, k, v)
    backward = time_ms(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), rep_ms)
    times = {"forward": forward, "backward": backward}
    if captured:
        del out  # its graph lives on this stream, which a capture may not wait for
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        times["device"] = graph_ms(lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), dout), rep_ms)
    return times


def measured_peaks() -> Peaks:
    """This device's own rates: an 8192^3 product, a large copy; exponentials from its clock."""
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    matmul_flops = 2 * 8192**3 / (time_ms(lambda: a @ b) * 1e-3)
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    memory_bytes = 2 * source.nbytes / (time_ms(lambda: target.copy_(source)) * 1e-3)
    properties = torch.cuda.get_device_properties(0)
    clock_hz = getattr(properties, "clock_rate", 1_755_000) * 1e3
    return Peaks(matmul_flops, exp_rate(properties.multi_processor_count, clock_hz), memory_bytes)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected|| in float64; nan where anything is not finite."""
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def exact_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention in float64, (B, T, H, D) in and out, and lse (B, H, T); differentiable."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
    causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~causal, -math.inf)
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v), scores.logsumexp(-1)
