"""What bench_mark_ddp predicts: bytes a step, peak memory, and the step's time with communication beside backward.

Memory is a run's (llm/plan_memory), buckets included. Computation is the cost model's for one device; a message's time
is alpha-beta. On a GPU the link is configs/hardware's; a CPU has none there, so two all-reduces of plain buffers, a
small and a large one, give its latency and bandwidth.
"""

import statistics
import time
from typing import Any

import torch

from bench_mark.bench_mark_fsdp_contestants import Contestant, Setup
from llm.cost_model import predict_workload
from llm.cost_model_counts import forward_flops_per_token
from llm.hardware import Hardware, known_hardware, match_gpu
from llm.plan_memory import rank_memory
from llm.plan_shapes import data_layout, meta_params, predicted_traffic
from llm.plan_time import cluster_of, copy_bytes_per_s, message_losses
from parallel.collectives import all_reduce_sum, barrier
from parallel.cost_model import Cluster, Link, Ring, collective_seconds
from parallel.cost_model_timeline import Compute, step_time, with_packing
from parallel.cost_model_traffic import Message, step_messages
from parallel.mesh import Mesh

SMALL_BYTES, LARGE_BYTES = 1 << 10, 1 << 23


def measured_cluster(mesh: Mesh) -> Cluster:
    """Latency and bandwidth of all-reduces of buffers that have nothing to do with the model."""
    seconds = {}
    for nbytes in (SMALL_BYTES, LARGE_BYTES):
        buffer, times = torch.zeros(nbytes // 4, device=mesh.device), []
        for _ in range(9):
            barrier(mesh, "world")
            began = time.perf_counter()
            all_reduce_sum(buffer, mesh, "world")
            times.append(time.perf_counter() - began)
        seconds[nbytes] = statistics.median(times)
    moved = 2 * (mesh.world_size - 1) / mesh.world_size * LARGE_BYTES
    beta = moved / max(seconds[LARGE_BYTES] - seconds[SMALL_BYTES], 1e-9)
    return Cluster(mesh.world_size, Link(beta, 0.0), None, seconds[SMALL_BYTES])


def peak_bytes(contestant: Contestant, setup: Setup) -> int | None:
    """Of one step on this rank; a group of one has its buckets too, but nothing is said of them."""
    if contestant.name.startswith("torch"):
        return None
    config, ranks = contestant.config, 1 if contestant.name == "bare" else setup.mesh.world_size
    layout = data_layout(config.parallel, config.parallel.degrees().resolve(ranks), 1, config.dtype)
    return rank_memory(setup.work, meta_params(setup.work.model, config.optimizer.name), layout).peak_bytes


class Predictor:
    """Predictions for the contestants of one setup; made before any of them runs."""

    def __init__(self, setup: Setup, hardware: Hardware):
        self.setup, self.mesh, self.hardware = setup, setup.mesh, hardware
        self.bare_s = predict_workload(setup.work, hardware)["step_s"]
        self.cluster = self.find_cluster(hardware)

    def find_cluster(self, hardware: Hardware) -> Cluster | None:
        if self.mesh.world_size == 1:
            return None
        if self.mesh.device.type == "cpu":
            return measured_cluster(self.mesh)
        config = match_gpu(hardware.description, known_hardware())
        if config is None or not config.link_bytes_per_s:
            return None
        return cluster_of(config, -(-self.mesh.world_size // config.gpus_per_node), config.gpus_per_node)

    def describe_link(self) -> str:
        if self.cluster is None:
            return "none"
        link = self.cluster.link
        return f"{link.bytes_per_s / 1e9:.3g} GB/s, {self.cluster.call_s * 1e6:.3g} us a call"

    def predict(self, contestant: Contestant) -> dict[str, Any]:
        """Step and exposed seconds, bytes sent, peak bytes; None where nothing is known (torch's, unknown hardware)."""
        found: dict[str, Any] = dict.fromkeys(("step_s", "exposed_s", "sent_bytes"))
        found["peak_bytes"] = peak_bytes(contestant, self.setup)
        if contestant.name == "bare":
            return found | {"step_s": self.bare_s}
        if contestant.name.startswith("torch") or self.mesh.world_size == 1:
            return found
        config, ranks = contestant.config, self.mesh.world_size
        params = meta_params(self.setup.work.model, config.optimizer.name)
        sent = sum(traffic.bytes for traffic in predicted_traffic(params, config, ranks, 1, self.mesh.rank))
        found["sent_bytes"] = sent
        if self.bare_s is None or self.cluster is None:
            return found
        layout = data_layout(config.parallel, config.parallel.degrees().resolve(ranks), 1, config.dtype)
        messages, rates = step_messages(params, layout), self.hardware.rates
        compute = with_packing(self.compute(), messages, copy_bytes_per_s(rates))
        time_of = step_time(messages, compute, layout, self.seconds_of, message_losses(self.cluster, layout))
        return found | {"step_s": time_of.step_s, "exposed_s": time_of.exposed_s}

    def seconds_of(self, message: Message) -> float:
        return collective_seconds(message.op, message.nbytes, Ring(message.ranks), self.cluster)

    def compute(self) -> Compute:
        """The bare step by stage: a third of it forward; blocks and output share it by their FLOPs."""
        model = self.setup.work.model
        total = forward_flops_per_token(model, self.setup.work.seq_len)
        output = 2 * model.d_model * model.vocab_size / total
        shares = (0.0, *([(1 - output) / model.num_layers] * model.num_layers), output)
        forward = tuple(self.bare_s / 3 * share for share in shares)
        return Compute(forward, tuple(2 * seconds for seconds in forward), 0.0)
