"""Faults of ZeRO-2 and 3 under a pipeline, each as a one-line patch; test_mutants.py demands that each is caught."""

from tests.parity.cases import ADAMW64, DEEP64, SGD64
from tests.parity.mutants import Mutant

FSDP, PASSES = "parallel.fsdp:Fsdp", "parallel.fsdp_pipeline:PipelinedFsdp"
UNIT, STRATEGY = "parallel.fsdp_units:FsdpUnit", "parallel.pipeline_parallel_strategy:PipelineParallel"
ZERO2, ZERO3 = "dp=2,pp=2,zero=2", "dp=2,pp=2,zero=3"

PIPELINE_ZERO_MUTANTS = [
    Mutant(
        "the reduce-scatter after the first micro-batch only", f"{PASSES}.begin_pass",
        "following, self.is_last = self.places.get(op, Place(None, False))",
        "following, self.is_last = self.places.get(op, Place(None, False))[0], op.micro_batch == 0",
        ZERO2, DEEP64, 3,
    ),
    Mutant(
        "gradients kept from earlier micro-batches are dropped", f"{FSDP}.take_gradients",
        "into, unit.partial = unit.partial, None", "into, unit.partial = None, None", ZERO2, DEEP64, 3,
    ),
    Mutant(
        "a stage's blocks are not gathered for its second micro-batch", f"{UNIT}.finish_gather",
        "self.gathering.wait().view(self.layout.ranks, -1)",
        "self.gathering.wait().view(self.layout.ranks, -1) * (self.gradient is self.partial is self.reducing is None)",
        ZERO3, DEEP64, 3,
    ),
    Mutant(
        "what stays for a step stays for the next one", f"{FSDP}.finish_gradients",
        "unit.reshard()  # whatever", "unit is self.root or unit.reshard()  # whatever", ZERO3,
    ),
    Mutant(
        "the norm counts a stage once for each of its data ranks", f"{STRATEGY}.gradient_norm",
        "own.square(), self.mesh, self.axis)", 'own.square(), self.mesh, "world")', ZERO2, ADAMW64,
    ),
    Mutant(
        "the last gradients of what is in no block are never sent", f"{PASSES}.close_micro_batch",
        "self.take_gradients(self.root)", "pass", ZERO3, SGD64, 3,
    ),
    Mutant(
        "the table that was there before it was sharded is tied", "llm.parallelize_pipeline:pipeline_strategy",
        "layout.tied.table = layout.model.embedding.weight", "pass", ZERO2,
    ),
    Mutant(
        "weight gradients of the second micro-batch, which waited, are lost", f"{PASSES}.end_pass",
        "self.take_gradients(unit)",
        "op.micro_batch == 1 and unit.take_gradients(None, unit.master.dtype); self.take_gradients(unit)",
        "dp=2,pp=2,zero=3,pp_schedule=zero_bubble", DEEP64, 3,
    ),
]  # fmt: skip
