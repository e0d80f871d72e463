"""Every layout trains as one device does: full gradients before norm before parameters before losses."""

from dataclasses import replace

import pytest

from tests import tolerances
from tests.parity.cases import ADAMW64, BF16, CASES, DEEP64, MUON, SGD32, SGD64, make_model
from tests.parity.compare import compare, compare_communication
from tests.parity.ranks import run_on_pool
from tests.parity.reference import saved_reference

pytestmark = pytest.mark.dist


def check(layout, case, accumulation=1, device="cpu"):
    if layout.config().reduce_dtype is not None and case is not BF16:
        pytest.skip("gradients that travel in fewer digits are compared in the pass that has no more")
    ranks = run_on_pool(layout, case, accumulation, device=device)
    reference = saved_reference(case) if device == "cpu" else gpu_reference(case)
    if case is BF16 and max(layout.config().tp, layout.config().cp) > 1:
        case = replace(case, gradient_error=tolerances.BF16_GRADIENT_OF_PARTS)
    compare(ranks, reference, case)
    # The cost model counts every gradient; the naive mode and Muon's exchange leave out those that no rank has.
    counts_all = layout.config().ddp_mode == "bucketed" and case is not MUON
    if layout.world_size > 1 and counts_all and accumulation != "uneven":
        compare_communication(ranks, case.train_config(layout.config()), make_model(case), accumulation)


def gpu_reference(case):
    """What runs on GPUs are compared with: a processor's run, which shares no kernel with them, where rounding allows.

    Muon's bfloat16 iteration rounds otherwise on another device, so there the reference runs on the GPU too. In float32
    two devices' roundings of the norms' gradients, whose terms nearly cancel, would add up: float64 has none.
    """
    return saved_reference(case, "cuda") if case is MUON else saved_reference(SGD64 if case is SGD32 else case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layout_matches_one_device(layout, case):
    check(layout, case)


@pytest.mark.parametrize(
    ("case", "accumulation"), [(SGD64, 3), (ADAMW64, "uneven"), (SGD64, 2), (SGD64, 4)], ids=["3", "uneven", "2", "4"]
)
def test_layout_matches_one_device_under_accumulation(layout, case, accumulation):
    if accumulation == "uneven" and layout.config().degrees().resolve(layout.world_size).dp == 1:
        pytest.skip("one data rank has all rows")
    if accumulation in (2, 4) and layout.config().pp == 1:
        pytest.skip("other numbers of micro-batches make other schedules of a pipeline, and of nothing else")
    check(layout, case, accumulation)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_stages_of_several_blocks_match_one_device(layout, accumulation):
    if layout.config().pp == 1 or layout.config().zero < 2:
        pytest.skip("where stages gather blocks, some have to have more than one; elsewhere depth shows nothing new")
    check(layout, DEEP64, accumulation)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [SGD64, SGD32, ADAMW64, BF16, MUON], ids=lambda case: case.name)
def test_layout_matches_one_device_on_gpus(gpu_layout, case):
    check(gpu_layout, case, accumulation=3, device="cuda")
