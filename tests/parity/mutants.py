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
PEER = "parallel.collectives_peer:PeerBuffer"

MUTANTS = [
    # The step: what is counted, what is summed, what is clipped.
    Mutant("mean of means over ranks", f"{STEP}.agree", "int(num_targets.sum())", "own[0] * len(counts)"),
    Mutant(
        "mean of means over micro-batches", f"{STEP}.forward_backward", "max(num_targets, 1)",
        "max(3 * batch.num_targets * self.mesh.size('dp'), 1)", accumulation=3,
    ),
    Mutant("padded tokens counted", f"{STEP}.agree", "batch.num_targets for", "batch.targets.numel() for"),
    Mutant(
        "gradients wiped between micro-batches", f"{STEP}.accumulate_gradients", "batch = batch.to(device)",
        "batch = batch.to(device); self.optimizer.zero_grad(set_to_none=True)", "dp=1", accumulation=3,
    ),
    Mutant(
        "gradients of the last micro-batch alone", f"{STEP}.accumulate_gradients", "in enumerate(micro_batches)",
        "in list(enumerate(micro_batches))[-1:]", accumulation=3,
    ),
    Mutant("not divided by the targets", f"{STEP}.forward_backward", "/ max(num_targets, 1)", "/ 1"),
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
    Mutant(
        "gradients averaged too", f"{BUCKET}.finish", "if self.absent:", "self.buffer.div_(2)\n    if self.absent:"
    ),
    Mutant(
        "gradients summed twice", f"{BUCKET}.launch", "start_all_reduce(self.sent, mesh, axis)",
        "start_all_reduce(start_all_reduce(self.sent, mesh, axis).wait(), mesh, axis)",
    ),
    Mutant("the sum is lost", f"{BUCKET}.finish", "if self.absent:", "self.buffer.zero_()\n    if self.absent:"),
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
    # Buckets that other ranks read.
    Mutant(
        "peer: the last rank's part is left out", f"{PEER}.sum_own_share",
        "received[0] if len(received) == 1 else received.sum(0)", "received[:-1].sum(0)", "dp=3,transport=peer",
    ),
    Mutant(
        "peer: the neighbour's part of another share", f"{PEER}.sum_own_share",
        "self.tensors[place][self.own_share]", "self.tensors[place][: out.numel()]", "dp=2,transport=peer",
    ),
    Mutant(
        "peer: shares are not brought back", f"{PEER}.all_reduce", "self.gather_shares()", "pass",
        "dp=2,transport=peer",
    ),
    Mutant(
        "peer: a share of the wrong rank", f"{PEER}.gather_shares", "self.tensors[place][self.shares[place]]",
        "self.tensors[self.memory.rank][self.shares[place]]", "dp=2,zero=1,transport=peer",
    ),
    Mutant(
        "peer: one slot for two transfers", "parallel.sharded_optimizer_peer:PeerBuckets.gradients",
        "(self.turn + 1) % SLOTS", "self.turn", "dp=2,zero=1,transport=peer",
    ),
    # ZeRO-1, and what it shares with FSDP.
    Mutant(
        "zero 1: own gradient instead of the sum", "parallel.sharded_optimizer:Zero1.send",
        "start_reduce_scatter(flat, self.mesh, self.axis, stream=\"reduce\")",
        "Pending(flat.chunk(self.mesh.size(self.axis))[self.mesh.rank_in(self.axis)].clone())", "dp=2,zero=1",
    ),
    Mutant(
        "zero 1: stale parameters of other ranks", "parallel.sharded_optimizer:ShardedOptimizer.step",
        "if any(shard.has_gradient for shard in bucket.shards)", "if False", "dp=2,zero=1",
    ),
    Mutant(
        "zero 1: a block does not wait for its parameters", "parallel.sharded_optimizer_arrivals:Arrivals.wait",
        "needed is None or index in needed", "needed is None", "dp=2,zero=1,transport=peer",
    ),
    Mutant(
        "zero 1: what stands behind the blocks is not waited for",
        "parallel.sharded_optimizer_arrivals:Arrivals.__init__", "needs[-1] |= last", "pass",
        "dp=2,zero=1,transport=peer",
    ),
    Mutant(
        "zero 1: a rank steps its neighbour's part", "parallel.sharded_optimizer:Zero1.finish_gradients",
        "bucket.own_gradient[place]", "bucket.own_gradient[place].flip(0)", "dp=2,zero=1",
    ),
    Mutant(
        "zero 1: what one rank lacks is missing", "parallel.sharded_optimizer_shards:agree_on_gradients",
        "count > 0", "count > 1", "dp=2,zero=1",
    ),
    Mutant(
        "norm of this rank's shards", "parallel.sharded_optimizer_shards:sharded_norm",
        'all_reduce(total, mesh, axis, "sum").sqrt()', "total.sqrt()", "dp=3,zero=1", ADAMW64,
    ),
    Mutant(
        "a missing gradient updates all the same", "parallel.sharded_optimizer_shards:agree_on_gradients",
        "count > 0", "count >= 0", "dp=2,zero=3", ADAMW64,
    ),
    Mutant(
        "the rate never reaches the shards", f"{STEP}.run", "set_learning_rate(self.optimizer, factor)", "pass",
        "dp=2,zero=1", ADAMW64,
    ),
    # FSDP.
    Mutant(
        "fsdp: an earlier micro-batch is dropped", "parallel.fsdp_units:FsdpUnit.finish_reduce",
        "self.gradient = reduced if self.gradient is None else self.gradient.add_(reduced)",
        "self.gradient = reduced", "dp=2,zero=3", accumulation=3,
    ),
    Mutant(
        "fsdp: another parameter's gradient", "parallel.fsdp_units:FsdpUnit.hand_over_gradients",
        "self.gradient[place.gradient_offset :]", "self.gradient[0:]", "dp=2,zero=2",
    ),
    Mutant(
        "fsdp: an empty shard's parameter is stale", "parallel.fsdp_units:FsdpUnit.start_gather",
        "self.master[first:end]", "self.master[first:end] * (first == 0)", "dp=2,zero=3,activation_checkpointing=full",
        BF16,
    ),
    Mutant(
        "fsdp: replicas drift apart", "parallel.fsdp:Fsdp.finish_reduce",
        "self.mesh.size(self.settings.replicate_axis) > 1", "False", "dp=4,dp_shard=2,zero=3",
    ),
    Mutant(
        "fsdp: rows of the wrong rank", "parallel.fsdp_units:add_blocks", "zip(slots,",
        "zip(tuple(reversed(slots)),", "dp=3,zero=3",
    ),
    Mutant(
        "fsdp: padding is not zero", "parallel.fsdp_units:FsdpUnit.take_gradients", "torch.zeros",
        "(lambda *size, **kind: torch.ones(*size, **kind))", "dp=2,zero=3",
    ),
    Mutant(
        "fsdp: all ranks start from their own weights", "parallel.fsdp_init:write_shards",
        "full.reshape(-1)[shard.start : shard.start + flat.numel()]", "full.reshape(-1)[: flat.numel()]",
        "dp=2,zero=3",
    ),
    Mutant(
        "fsdp: gradients averaged too", "parallel.fsdp_units:FsdpUnit.finish_reduce",
        "self.reducing.wait()", "self.reducing.wait().div_(self.layout.ranks)", "dp=2,zero=2",
    ),
]  # fmt: skip
