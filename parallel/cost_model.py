"""Seconds and bytes of a collective from plain numbers: the alpha-beta model, ring or tree, on one node or several.

A collective of B bytes over P ranks costs a fixed call, so many hops of one latency, and the bytes that pass through a
rank over its bandwidth (Thakur et al. 2005):

    all-reduce       ring  2 (P - 1) hops, 2 (P - 1) / P B      tree  2 log2 P hops, 2 B
    reduce-scatter, all-gather, all-to-all    P - 1 hops, (P - 1) / P B
    broadcast        P - 1 hops, B (a pipeline)

B is what the log counts (collectives_log): the whole tensor that is reduced, scattered, gathered or exchanged. The
figures of a link come from configs/hardware; cost_model_traffic says which collectives a step has, cost_model_memory
what a rank holds, cost_model_timeline what hides behind computation.
"""

import math
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Link:
    """One kind of wire between neighbouring ranks."""

    bytes_per_s: float  # through one rank, in each direction, as a ring uses it
    hop_s: float  # from one rank to the next


@dataclass(frozen=True)
class Cluster:
    """Nodes of `gpus_per_node` ranks, joined inside by one link and outside by another, a network port a GPU."""

    gpus_per_node: int
    link: Link
    network: Link | None  # None: a single node
    call_s: float  # of starting any collective
    beside_s_per_byte: float = 0.0  # that a computation loses to a byte which its rank sends beside it
    beside_peer_s_per_byte: float = 0.0  # and to one that copy engines move


@dataclass(frozen=True)
class Ring:
    """The ranks of one group: how many, on how many nodes, and `stride`, the distance between neighbours by rank."""

    ranks: int
    stride: int = 1

    def nodes(self, gpus_per_node: int) -> int:
        """Nodes that the group spans, the ranks of a node being neighbours."""
        return max(1, math.ceil(self.ranks / self.per_node(gpus_per_node)))

    def per_node(self, gpus_per_node: int) -> int:
        return max(1, min(self.ranks, gpus_per_node // self.stride))


# (hops, bytes through a rank as a multiple of B) by the number of ranks
RINGS = {
    "all_reduce": lambda p: (2 * (p - 1), 2 * (p - 1) / p),
    "reduce_scatter": lambda p: (p - 1, (p - 1) / p),
    "all_gather": lambda p: (p - 1, (p - 1) / p),
    "all_to_all": lambda p: (p - 1, (p - 1) / p),
    "broadcast": lambda p: (p - 1, 1.0),
    "exchange": lambda p: (1, 1.0),
    "barrier": lambda p: (2 * (p - 1), 2 * (p - 1) / p),
}


@lru_cache(maxsize=64)
def kind_of(op: str) -> str:
    """The collective behind an operation's name in the log: all_reduce_sum is an all_reduce."""
    found = [kind for kind in RINGS if op.startswith(kind)]
    assert found, f"no cost is known for the operation {op!r}; known: {sorted(RINGS)}"
    return found[0]


def moved_bytes(op: str, logged_bytes: float, ranks: int) -> float:
    """Bytes that one rank sends (and as many that it receives) for a collective that the log counts as so many."""
    return 0.0 if ranks == 1 else RINGS[kind_of(op)](ranks)[1] * logged_bytes


def lost_seconds(op: str, logged_bytes: float, ranks: int, cluster: Cluster, peer: bool = False) -> float:
    """Seconds that the computation beside a collective loses to it; `peer`: copy engines move it."""
    lost = cluster.beside_peer_s_per_byte if peer else cluster.beside_s_per_byte
    return lost * moved_bytes(op, logged_bytes, ranks)


def bandwidth(ring: Ring, cluster: Cluster) -> float:
    """Bytes a second through one rank of the group.

    A ring that leaves a node does so through the port of each of its ranks there, for as many rings lie side by side:
    with all eight GPUs of a node in the group, the network counts eight times.
    """
    if ring.nodes(cluster.gpus_per_node) == 1:
        return cluster.link.bytes_per_s
    assert cluster.network is not None, f"a group of {ring.ranks} ranks spans nodes, and no network is given"
    ports = ring.per_node(cluster.gpus_per_node)
    inside = cluster.link.bytes_per_s if ports > 1 else math.inf
    return min(inside, ports * cluster.network.bytes_per_s)


def hop_seconds(hops: float, ring: Ring, cluster: Cluster) -> float:
    """Latency of so many hops round a ring, some of which leave the node."""
    nodes = ring.nodes(cluster.gpus_per_node)
    outside = nodes / ring.ranks if nodes > 1 else 0.0  # share of the ring's edges between nodes
    network_s = cluster.network.hop_s if cluster.network else 0.0
    return hops * (outside * network_s + (1 - outside) * cluster.link.hop_s)


def collective_seconds(op: str, logged_bytes: float, ring: Ring, cluster: Cluster) -> float:
    """Seconds of one collective on idle links; 0 for a group of one rank. An all-reduce takes the better algorithm."""
    if ring.ranks == 1:
        return 0.0
    kind, rate = kind_of(op), bandwidth(ring, cluster)
    hops, share = RINGS[kind](ring.ranks)
    seconds = hop_seconds(hops, ring, cluster) + share * logged_bytes / rate
    if kind == "all_reduce":
        nodes = ring.nodes(cluster.gpus_per_node)
        slowest = cluster.network.hop_s if nodes > 1 else cluster.link.hop_s
        tree = 2 * math.ceil(math.log2(ring.ranks)) * slowest + 2 * logged_bytes / rate
        seconds = min(seconds, tree)
    return cluster.call_s + seconds
