"""Predictions of bench_mark_cp: blocks at the kernels' own rates, messages on the datasheet's link, sums in memory.

Rates are measured once, on one kernel over CALIBRATED_TOKENS, a length that no row has. So a row's prediction says
what cutting and sending should cost, and not how far the kernel is from the datasheet's peak, which is the subject of
bench_mark_flash_attention. Where the host is slower than the device, its own time counts: that of the same calls over
so few tokens that the device has nothing to do.
"""

from dataclasses import dataclass, replace

from kernel.cost_model import AttentionShape, KernelWork, Peaks, attention_backward, attention_forward, predict
from parallel.cost_model import Cluster, Ring, collective_seconds
from parallel.cost_model_context import ContextShape, RingTime, context_messages, ring_backward_time, ring_forward_time
from parallel.cost_model_context_layer import SumsTraffic, backward_traffic, forward_traffic

CALIBRATED_TOKENS, HOST_TOKENS = 12288, 4096


@dataclass(frozen=True)
class Rates:
    """The datasheet's peaks, with the FLOP/s that one kernel reached in forward and in backward."""

    peaks: Peaks
    forward_flops: float
    backward_flops: float

    def forward_s(self, shape: AttentionShape, pairs: float, hidden_bytes: float = 0.0) -> float:
        return self.seconds(attention_forward(shape, pairs), self.forward_flops, hidden_bytes)

    def backward_s(self, shape: AttentionShape, pairs: float, hidden_bytes: float = 0.0) -> float:
        return self.seconds(attention_backward(shape, pairs), self.backward_flops, hidden_bytes)

    def seconds(self, work: KernelWork, flops: float, hidden_bytes: float) -> float:
        work = replace(work, bytes=work.bytes + hidden_bytes)
        return predict(work, replace(self.peaks, matmul_flops=flops)).seconds


def calibrated(peaks: Peaks, shape: AttentionShape, measured: tuple[float, float]) -> Rates:
    """Rates from the seconds of one causal kernel of `shape`, forward and backward."""
    pairs = shape.T * shape.S / 2
    works = attention_forward(shape, pairs), attention_backward(shape, pairs)
    return Rates(peaks, *(work.flops / seconds for work, seconds in zip(works, measured, strict=True)))


def rank_shape(shape: AttentionShape, ranks: int) -> AttentionShape:
    """A rank's queries and keys of a causal sequence."""
    return replace(shape, T=shape.T // ranks, S=shape.S // ranks)


def block_seconds(shape: AttentionShape, ranks: int, rates: Rates) -> tuple[float, float]:
    """Forward and backward of one block of a rank: its own and each of the others have half of T/P x T/P pairs."""
    own = rank_shape(shape, ranks)
    hidden = [traffic.hidden / ranks for traffic in traffic_of(shape, ranks)]
    pairs = own.T * own.S / 2
    return rates.forward_s(own, pairs, hidden[0]), rates.backward_s(own, pairs, hidden[1])


def traffic_of(shape: AttentionShape, ranks: int) -> tuple[SumsTraffic, SumsTraffic]:
    """What a rank's sums move in forward and in backward."""
    rows = shape.B * shape.T // ranks
    return (
        forward_traffic(ranks, rows, shape.H * shape.D, shape.itemsize),
        backward_traffic(ranks, rows, shape.H * shape.D, shape.K * shape.D, shape.itemsize),
    )


def simulated_s(shape: AttentionShape, ranks: int, rates: Rates) -> tuple[float, float]:
    """Forward and backward of all ranks of a ring, one after the other on one device."""
    blocks, traffic = block_seconds(shape, ranks, rates), traffic_of(shape, ranks)
    return tuple(
        ranks * (ranks * block + joined.passes / rates.peaks.memory_bytes)
        for block, joined in zip(blocks, traffic, strict=True)
    )


def context_shape(shape: AttentionShape, ranks: int, way: str) -> ContextShape:
    """One layer as cost_model_context takes it; `alone` is a ring of one."""
    mode, dtype = ("ring", "bfloat16") if way == "alone" else (way, "bfloat16")
    if shape.itemsize == 4:
        dtype = "float32"
    return ContextShape(ranks, mode, shape.H, shape.K, shape.D, 1, dtype)


def way_time(way: str, shape: AttentionShape, ranks: int, rates: Rates, cluster: Cluster) -> RingTime:
    """Seconds of a layer, forward and backward, on each rank, and of them those spent waiting for messages."""
    if way == "ring":
        return ring_time(shape, ranks, rates, cluster)
    whole = sum(block_seconds(shape, 1, rates))
    messages = list(context_messages(context_shape(shape, ranks, way), [shape.B * shape.T // ranks]))
    waited = sum(collective_seconds(message.op, message.nbytes, Ring(ranks), cluster) for message in messages)
    return RingTime(whole / ranks + waited, waited)


def ring_time(shape: AttentionShape, ranks: int, rates: Rates, cluster: Cluster) -> RingTime:
    forward_s, backward_s = block_seconds(shape, ranks, rates)
    keys = 2 * shape.B * shape.T // ranks * shape.K * shape.D
    keys_s, sums_s = (collective_seconds("exchange", size * keys, Ring(ranks), cluster) for size in (shape.itemsize, 4))
    forward = ring_forward_time(ranks, forward_s, keys_s)
    backward = ring_backward_time(ranks, backward_s, keys_s, sums_s)
    passes = sum(traffic.passes for traffic in traffic_of(shape, ranks)) / rates.peaks.memory_bytes
    return RingTime(forward.seconds + backward.seconds + passes, forward.exposed_s + backward.exposed_s)
