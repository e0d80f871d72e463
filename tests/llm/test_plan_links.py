"""Links between ranks: a known GPU's from its file, between CPUs measured, equal on all ranks and in no run's log."""

from dataclasses import replace

import pytest

from configs.loader import compose_config
from llm.hardware import Hardware
from llm.plan_config import PlanConfig
from llm.plan_links import known_links, links_of
from llm.plan_time import datasheet_rates
from parallel.mesh_degrees import Degrees
from tests.parallel.pool import pool_of

H200 = compose_config(PlanConfig, "plan", ["hardware=h200"]).hardware
GPU = Hardware("h200", "cuda", "NVIDIA H200", 989e12, 494e12, 141e9, 4.8e12, "", datasheet_rates(H200, "bfloat16"))


def test_a_known_gpu_has_the_links_of_its_file():
    inside, across = known_links(GPU, 8), known_links(GPU, 16)
    assert inside.network is None and inside.link.bytes_per_s == H200.link_bytes_per_s
    assert across.network.bytes_per_s == H200.network_bytes_per_s and across.gpus_per_node == 8
    assert known_links(replace(GPU, name="unknown"), 2) is None
    assert known_links(replace(GPU, device="cpu"), 2) is None


def measured(mesh):
    cluster = links_of(replace(GPU, device="cpu"), mesh)
    return cluster, mesh.log.drain(0)


@pytest.mark.dist
def test_links_between_cpu_ranks_are_measured_and_equal_on_all():
    answers = pool_of(2).run(measured, degrees=Degrees(dp=2))
    (cluster, logged), (other, _) = answers
    assert cluster == other and cluster.gpus_per_node == 2 and cluster.network is None
    assert cluster.call_s > 0 and cluster.link.bytes_per_s > 0 and logged == []
