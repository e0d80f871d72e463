"""Step time of one rank: the model's work at a datasheet's rates, and what its messages add.

Where no such GPU is at hand nothing can be calibrated, so rates are shares of the datasheet's peaks. The shares were
measured on one H200 (docs/benchmarks, torch 2.11, bfloat16) or lie between such points; for other devices they are
assumed to be the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from configs.errors import UserError
from llm.args import HardwareConfig
from llm.cost_model_counts import Workload
from llm.cost_model_time import optimizer_time, output_product_s, predict_step_time
from llm.hardware_calibration import Points, Rates
from parallel.cost_model import Cluster, Link, Ring, collective_seconds, lost_seconds
from parallel.cost_model_timeline import Compute, StepTime, step_time, with_packing
from parallel.cost_model_traffic import DataLayout, Message
from parallel.mesh_degrees import AXES, Degrees, known_groups
from parallel.pipeline_schedules_simulation import Simulation

# Of the peak, a linear layer's three products by width, as hardware_calibration times them: at the clocks of long work.
MATMUL_SHARE = ((512, 0.52), (1024, 0.605), (2048, 0.67), (4096, 0.67), (8192, 0.685))
# torch's attention (cuDNN), causal, likewise by sequence length; backward counts twice forward's operations.
ATTENTION_SHARE = {
    64: (
        ((1024, 0.324), (2048, 0.38), (4096, 0.409), (16384, 0.444)),
        ((1024, 0.204), (2048, 0.257), (4096, 0.296), (16384, 0.343)),
    ),
    128: (
        ((1024, 0.42), (2048, 0.484), (4096, 0.527), (16384, 0.583)),
        ((1024, 0.252), (2048, 0.313), (4096, 0.366), (16384, 0.42)),
    ),
}
MEMORY_SHARE = 0.88  # of the bandwidth, a copy: 4.24 of 4.8 TB/s measured
# The same for kernels that are not vectorised (hardware_calibration.KINDS), of the bandwidth, as they are calibrated.
KIND_SHARES = {"broadcast": 0.554, "widen": 0.44, "mixed": 0.22, "join": 0.238, "sum": 0.85}
PASS_S = 3e-6  # of a kernel that does nothing
OP_OVERHEAD_S = 5e-6  # of issuing one operation, assumed
NEEDED = ("bf16_flops", "memory_bytes", "memory_bytes_per_s", "link_bytes_per_s", "link_hop_s", "call_s")


@dataclass(frozen=True)
class RankTime:
    """Seconds of one optimizer step; under pipeline parallelism what its ranks are idle of it."""

    step: StepTime
    host_s: float
    idle_s: float | None = None  # of a rank of the pipeline, on average
    simulation: Simulation | None = None  # the schedule on paper
    exposed_by_axis: dict[str, float] = field(default_factory=dict)  # seconds in which this rank waits, by mesh axis

    @property
    def step_s(self) -> float:
        return max(self.step.step_s, self.host_s)


def check_known(hardware: HardwareConfig) -> None:
    """UserError for a device whose figures a plan needs and configs/hardware does not have."""
    missing = [name for name in NEEDED if getattr(hardware, name) is None]
    if missing:
        raise UserError(
            f"hardware={hardware.name} has no {', '.join(missing)}, so nothing can be planned for it; use a GPU of "
            f"configs/hardware (h100, h200, a100, ...) or add a file there"
        )


def cluster_of(hardware: HardwareConfig, nodes: int, gpus_per_node: int) -> Cluster:
    """The links of a cluster; UserError when it has several nodes and the network is not known."""
    network = None
    if nodes > 1:
        if hardware.network_bytes_per_s is None or hardware.network_hop_s is None:
            raise UserError(
                f"nodes={nodes} of hardware={hardware.name} need a network; give hardware.network_bytes_per_s (of one "
                f"GPU's share) and hardware.network_hop_s, such as 1.25e9 and 2e-5"
            )
        network = Link(hardware.network_bytes_per_s, hardware.network_hop_s)
    link = Link(hardware.link_bytes_per_s, hardware.link_hop_s)
    beside = hardware.beside_s_per_byte or 0.0, hardware.beside_peer_s_per_byte or 0.0
    return Cluster(gpus_per_node, link, network, hardware.call_s, *beside)


def datasheet_rates(hardware: HardwareConfig, dtype: str) -> Rates:
    """Rates of generic work as shares of the peaks for "bfloat16" or "float32" products."""
    peak = hardware.bf16_flops if dtype == "bfloat16" else hardware.fp32_flops

    def passes(share: float) -> Points:
        sizes = (2.0**20, 2.0**24, 2.0**28, 2.0**32)
        return tuple((size, PASS_S + size / (share * hardware.memory_bytes_per_s)) for size in sizes)

    def scaled(points: Points) -> Points:
        return tuple((size, share * peak) for size, share in points)

    attention = tuple((dim, scaled(forward), scaled(back)) for dim, (forward, back) in ATTENTION_SHARE.items())
    copy, others = passes(MEMORY_SHARE), {kind: passes(share) for kind, share in KIND_SHARES.items()}
    bf16_matmul = 0.45 * hardware.bf16_flops
    return Rates(scaled(MATMUL_SHARE), copy, copy, copy, attention, bf16_matmul, OP_OVERHEAD_S, others)


def compute_of(
    work: Workload, rates: Rates, layout: DataLayout, checkpointing: str, messages: list[Message]
) -> Compute:
    """One micro-batch of a rank by stage, and its part of the update."""
    whole, layers = predict_step_time(work, rates), work.layers
    per_micro_batch = (whole.matmul_s + whole.attention_s + whole.elementwise_s + whole.loss_s) / work.grad_accum_steps
    loss = whole.loss_s / work.grad_accum_steps
    output = output_product_s(work, rates)  # forward
    block = (per_micro_batch - 3 * output - loss) / max(1, layers)
    products = (whole.matmul_s + whole.attention_s) / work.grad_accum_steps - 3 * output  # of the blocks
    again = {"none": 0.0, "full": block, "selective": block - products / max(1, layers)}[checkpointing] / 3
    forward = [0.0, *[block / 3] * layers, output + loss]  # the loss makes its gradient in forward
    backward = [0.0, *[2 * block / 3 + again] * layers, 2 * output]
    for message in messages:  # FSDP copies a gathered unit out of its message
        if message.op == "all_gather" and message.phase in ("forward", "backward") and not message.micro_batch:
            side = forward if message.phase == "forward" else backward
            side[message.stage] += 2 * message.nbytes / copy_bytes_per_s(rates)
    parts = layout.shard if layout.zero else 1
    compute = Compute(tuple(forward), tuple(backward), optimizer_time(work, rates) / parts)
    packed = [message for message in messages if message.axis.startswith("dp")]
    return with_packing(compute, packed, copy_bytes_per_s(rates))


def copy_bytes_per_s(rates: Rates) -> float:
    size, seconds = rates.new_pass[-1]
    return size / seconds


def message_seconds(degrees: Degrees, cluster: Cluster) -> Callable[[Message], float]:
    """A function from a message to its seconds on an idle link."""
    rings = {}
    for axis in AXES:
        ranks = known_groups(degrees, axis)[0]
        rings[axis] = Ring(len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1)
    known: dict[tuple[str, str, int], float] = {}  # layers send alike

    def seconds(message: Message) -> float:
        key = (message.op, message.axis, message.nbytes)
        if key not in known:
            known[key] = collective_seconds(message.op, message.nbytes, rings[message.axis], cluster)
        return known[key]

    return seconds


def message_losses(cluster: Cluster, layout: DataLayout) -> Callable[[Message], float]:
    """A function from a message to the seconds that a computation beside it loses."""
    peer = layout.transport == "peer"
    return lambda message: lost_seconds(message.op, message.nbytes, message.ranks, cluster, peer)


def rank_time(
    work: Workload,
    rates: Rates,
    layout: DataLayout,
    messages: list[Message],
    seconds_of: Callable[[Message], float],
    lost_of: Callable[[Message], float] | None = None,
    checkpointing: str = "none",
) -> RankTime:
    """Seconds of one optimizer step on one rank; `messages` are its collectives."""
    compute = compute_of(work, rates, layout, checkpointing, messages)
    host = predict_step_time(replace(work, device="cuda"), rates).host_s
    return RankTime(step_time(messages, compute, layout, seconds_of, lost_of), host)
