"""The suite itself under test: each injected fault must turn it red, in the layout and case that are named for it."""

import pytest

from tests.parity.compare import Mismatch, compare
from tests.parity.layouts import parse_layout
from tests.parity.mutants import MUTANTS, applied, find_function, mutated_code
from tests.parity.mutants_context import CONTEXT_MUTANTS
from tests.parity.mutants_pipeline import PIPELINE_MUTANTS
from tests.parity.mutants_pipeline_zero import PIPELINE_ZERO_MUTANTS
from tests.parity.mutants_tensor import TENSOR_MUTANTS
from tests.parity.ranks import run_on_pool
from tests.parity.reference import saved_reference

pytestmark = pytest.mark.dist
EVERY_MUTANT = [*MUTANTS, *TENSOR_MUTANTS, *CONTEXT_MUTANTS, *PIPELINE_MUTANTS, *PIPELINE_ZERO_MUTANTS]
RUNS = {(m.layout, m.case, m.accumulation): m for m in EVERY_MUTANT if m.layout not in ("dp=1", "dp=2")}


def run(mutant, with_patch):
    ranks = run_on_pool(parse_layout(mutant.layout), mutant.case, mutant.accumulation, mutant if with_patch else None)
    compare(ranks, saved_reference(mutant.case), mutant.case)


@pytest.mark.parametrize("mutant", EVERY_MUTANT, ids=lambda mutant: mutant.name)
def test_an_injected_fault_is_caught(mutant):
    mutated_code(mutant)  # first, so that a patch that no longer fits is not taken for a fault that was seen
    with pytest.raises((Mismatch, RuntimeError)) as caught:
        run(mutant, with_patch=True)
    if caught.type is RuntimeError:  # a rank stopped by itself, by one of our assertions and by nothing else
        assert any(name in str(caught.value) for name in ("AssertionError", "ScheduleError")), str(caught.value)


@pytest.mark.parametrize("mutant", RUNS.values(), ids=lambda m: m.layout)
def test_the_same_layout_is_green_without_the_fault(mutant):
    run(mutant, with_patch=False)


def test_there_is_at_least_one_mutant_for_each_kind_of_code():
    files = {mutant.function.partition(":")[0] for mutant in EVERY_MUTANT}
    expected = {"training_step", "ddp", "ddp_buckets", "sharded_optimizer", "sharded_optimizer_shards", "fsdp"}
    expected |= {"tensor_parallel", "tensor_parallel_gradients", "loss_vocab"}
    expected |= {"context_parallel", "context_parallel_layout", "context_parallel_blocks", "context_parallel_exchange"}
    expected |= {"parallelize_context", "fsdp_units", "fsdp_pipeline", "parallelize_pipeline"}
    assert expected <= {file.rpartition(".")[2] for file in files} and len(EVERY_MUTANT) >= 30
    assert len({mutant.name for mutant in EVERY_MUTANT}) == len(EVERY_MUTANT)


def test_a_patch_is_gone_after_its_block():
    mutant = MUTANTS[0]
    function = find_function(mutant.function)
    code = function.__code__
    with applied(mutant):
        assert function.__code__ is not code
    assert function.__code__ is code
