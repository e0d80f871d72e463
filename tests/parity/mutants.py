"""Faults that real stacks have had, each as a one-line patch of our code, applied in the memory of the ranks.

The suite is trusted only while each of them turns it red (test_mutants.py). A patch names a function and a piece of its
source, which must stand there exactly once, so that a mutant cannot go stale without a word.
"""

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from tests.parity.cases import ADAMW64, BF16, SGD64, Case


@dataclass(frozen=True)
class Mutant:
    """`old` becomes `new` in the source of `function`; the layout and case must then differ from the reference."""

    name: str
    function: str  # "package.module:Class.method"
    old: str
    new: str
    layout: str = "dp=2"
    case: Case = SGD64
    accumulation: int | str = 1


def find_function(path: str) -> FunctionType:
    """The function itself, without the decorators around it."""
    module, _, names = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return inspect.unwrap(found)


def mutated_code(mutant: Mutant) -> CodeType:
    """The patched function's code; AssertionError when `old` does not stand in it exactly once."""
    function = find_function(mutant.function)
    source = textwrap.dedent(inspect.getsource(function))
    count = source.count(mutant.old)
    assert count == 1, f"mutant {mutant.name!r}: {mutant.old!r} stands {count} times in {mutant.function}"
    tree = ast.parse(source.replace(mutant.old, mutant.new))
    tree.body[0].decorator_list = []
    namespace: dict[str, Any] = {}
    exec(compile(tree, f"<mutant {mutant.name}>", "exec"), function.__globals__, namespace)
    code = namespace[function.__name__].__code__
    assert code.co_freevars == function.__code__.co_freevars, f"mutant {mutant.name!r}: a closure cannot be patched"
    return code


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Inside the block the patched code runs wherever the function is called, by whatever name it was imported."""
    function = find_function(mutant.function)
    original, function.__code__ = function.__code__, mutated_code(mutant)
    try:
        yield
    finally:
        function.__code__ = original


STEP, BUCKET, DDP = "llm.training_step:TrainingStep", "parallel.ddp_buckets:Bucket", "parallel.ddp:DataParallel"

MUTANTS = [
    # The step: what is counted, what is summed, what is clipped.
    Mutant("mean of means over ranks", f"{STEP}.agree", "int(num_targets.sum())", "own[0] * len(counts)"),
    Mutant(
        "mean of means over micro-batches", f"{STEP}.accumulate_gradients", "max(num_targets, 1)",
        "max(batch.num_targets * len(micro_batches) * self.mesh.size('dp'), 1)", accumulation=3,
    ),
    Mutant("padded tokens counted", f"{STEP}.agree", "batch.num_targets for", "batch.targets.numel() for"),
    Mutant(
        "gradients wiped between micro-batches", f"{STEP}.accumulate_gradients", "batch = batch.to(device)",
        "batch = batch.to(device); self.optimizer.zero_grad(set_to_none=True)", "dp=1", accumulation=3,
    ),
    Mutant(
        "gradients of the last micro-batch alone", f"{STEP}.accumulate_gradients", "/ max(num_targets, 1)",
        "* (index == len(micro_batches) - 1) / max(num_targets, 1)", accumulation=3,
    ),
    Mutant("not divided by the targets", f"{STEP}.accumulate_gradients", "/ max(num_targets, 1)", "/ 1"),
    Mutant(
        "clipped before the ranks are summed", f"{STEP}.run", "self.strategy.finish_gradients()",
        "from llm.optimizer import scale_gradients as scale; "
        "scale(self.strategy.parameters, self.strategy.gradient_norm(), 0.1); self.strategy.finish_gradients()",
    ),
    Mutant("never clipped", f"{STEP}.run", "self.config.optimizer.clip_norm)", "None)", case=ADAMW64),
    Mutant("the learning rate never moves", f"{STEP}.run", "set_learning_rate(self.optimizer, factor)", "pass"),
    Mutant(
        "every rank takes the same rows", "llm.training_step:rows_of_rank", 'mesh.rank_in("dp") * share', "0 * share"
    ),
    Mutant("logged loss of one rank", "llm.training_step:StepResult.mean_losses", '"dp_cp")', '"tp")'),
    # DDP.
    Mutant("gradients never sent", f"{BUCKET}.launch", "start_all_reduce(self.sent, mesh, axis)", "Pending(self.sent)"),
    Mutant("gradients averaged too", f"{BUCKET}.finish", "self.pending.wait()", "self.pending.wait().div_(2)"),
    Mutant(
        "gradients summed twice", f"{BUCKET}.launch", "start_all_reduce(self.sent, mesh, axis)",
        "start_all_reduce(start_all_reduce(self.sent, mesh, axis).wait(), mesh, axis)",
    ),
    Mutant("the sum is lost", f"{BUCKET}.finish", "self.pending.wait()", "self.pending.wait(); self.buffer.zero_()"),
    Mutant("a gradient missing here is missing everywhere", f"{BUCKET}.finish", "counts[index] == 0", "True"),
    Mutant("a gradient missing everywhere is zero", f"{BUCKET}.finish", "counts[index] == 0", "False"),
    Mutant("an absent gradient is not zero", f"{BUCKET}.launch", "views[index].zero_()", "views[index].fill_(1.0)"),
    Mutant(
        "the sum in another dtype is dropped", f"{BUCKET}.finish", "self.buffer.copy_(self.sent)", "pass",
        "dp=2,reduce_dtype=bfloat16", BF16,
    ),
    Mutant(
        "sent before the last micro-batch", f"{DDP}.begin_micro_batch", "self.sending = last", "self.sending = True",
        accumulation=3,
    ),
    Mutant(
        "sent before all its gradients are there", f"{DDP}.make_hook", "bucket.waiting -= 1",
        "bucket.waiting -= len(bucket.params)", "dp=2,bucket_mb=25,first_bucket_mb=25",
    ),
    Mutant(
        "naive: what one rank lacks is not sent", "parallel.ddp:synchronise_gradients", "if count:",
        "if count == mesh.size(axis):", "dp=2,ddp_mode=naive",
    ),
]  # fmt: skip
