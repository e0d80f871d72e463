"""Links between ranks where no datasheet knows them, such as those of a CPU's processes: two sizes of one all-reduce.

Generic messages of no model, as llm/hardware_calibration times generic work: a small one gives what a call costs, a
large one the bytes a second. Known GPUs have their figures in configs/hardware.
"""

import time

import torch

from llm.hardware import Hardware, known_hardware
from llm.plan_time import cluster_of
from parallel.collectives import all_reduce_max, all_reduce_sum, barrier
from parallel.cost_model import Cluster, Link
from parallel.mesh import Mesh

SMALL, LARGE = 64, 1 << 21  # float32 elements
REPEATS = 7


def links_of(hardware: Hardware, mesh: Mesh) -> Cluster | None:
    """The links of a run's ranks: configs/hardware's for a GPU (None where it has none), measured between CPUs.

    Called by all ranks; equal on all.
    """
    if mesh.world_size == 1:
        return None
    return measure_links(mesh) if mesh.device.type == "cpu" else known_links(hardware, mesh.world_size)


def known_links(hardware: Hardware, world_size: int) -> Cluster | None:
    """The datasheet's links of so many GPUs; None where they, or those between the nodes, are not known."""
    known = {entry.name: entry for entry in known_hardware()} if hardware.device == "cuda" else {}
    links = known.get(hardware.name)
    if links is None or links.link_bytes_per_s is None:
        return None
    nodes = -(-world_size // links.gpus_per_node)
    if nodes > 1 and links.network_bytes_per_s is None:
        return None
    return cluster_of(links, nodes, links.gpus_per_node)


def measure_links(mesh: Mesh) -> Cluster:
    """All ranks as one node: the best of a few all-reduces of each size, the slowest rank's."""
    seconds = {}
    for elements in (SMALL, LARGE):
        payload = torch.ones(elements, device=mesh.device)
        taken = []
        for _ in range(REPEATS):
            barrier(mesh, "world")
            began = time.perf_counter()
            all_reduce_sum(payload.clone(), mesh, "world")
            taken.append(time.perf_counter() - began)
        best = all_reduce_max(torch.tensor(min(taken), dtype=torch.float64), mesh, "world")
        seconds[elements] = float(best)
    mesh.log.drain(0)  # these are no run's
    ranks, call_s = mesh.world_size, seconds[SMALL]
    moved = 2 * (ranks - 1) / ranks * 4 * LARGE
    rate = moved / max(seconds[LARGE] - call_s, 1e-6)
    return Cluster(ranks, Link(rate, 0.0), None, call_s)
