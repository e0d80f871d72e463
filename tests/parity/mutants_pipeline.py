"""Faults of pipeline parallelism, each as a one-line patch; test_mutants.py demands that every one is caught."""

from tests.parity.cases import ADAMW64, SGD64
from tests.parity.mutants import Mutant

RUNNER, TABLE = "parallel.pipeline_parallel:PipelineRunner", "parallel.pipeline_parallel_strategy:TiedTable"
STRATEGY, DEFERRED = "parallel.pipeline_parallel_strategy:PipelineParallel", "parallel.pipeline_parallel_backward"
ROWS, STAGES = "parallel.pipeline_schedules", "llm.parallelize_pipeline"
PIPELINE = f"{STAGES}:Pipeline"
ZERO_BUBBLE = "pp=2,pp_schedule=zero_bubble"

PIPELINE_MUTANTS = [
    Mutant(
        "the gradient that comes back is that of another loss", f"{RUNNER}.backward",
        "torch.autograd.backward(output, gradient)",
        "torch.autograd.backward(output, gradient if gradient is None else 2 * gradient)", "pp=2",
    ),
    Mutant(
        "the mean of micro-batch means", "llm.training_step:TrainingStep.accumulate_gradients",
        "micro_batches, num_targets, self", "micro_batches, micro_batches[0].num_targets, self",
        "pp=2", SGD64, 3,
    ),
    Mutant(
        "the loss that is back-propagated is not divided", f"{PIPELINE}.accumulate_gradients",
        "/ self.divisor", "/ 1", "pp=2",
    ),
    Mutant(
        "a stage wipes gradients between micro-batches", f"{PIPELINE}.run_stage", "ctx.token_ids = batch.token_ids",
        "ctx.token_ids = batch.token_ids; self.layout.model.zero_grad()", "pp=2", SGD64, 3,
    ),
    Mutant(
        "the last micro-batch is missed", f"{PIPELINE}.accumulate_gradients", "for batch in micro_batches]",
        "for batch in micro_batches[:2]]", "pp=2", SGD64, 3,
    ),
    Mutant(
        "the tied table's copy is never made anew", f"{STRATEGY}.begin_step", "self.tied.refresh()", "pass", "pp=2",
    ),
    Mutant(
        "the tied table's second gradient is lost", f"{STRATEGY}.finish_gradients", "self.tied.add_gradients()",
        "setattr(self.tied.copy, 'grad', None) if self.tied.copy is not None else None", "pp=2",
    ),
    Mutant(
        "the tied table's second gradient counts twice", f"{TABLE}.add_gradients", "self.table.grad.add_(received)",
        "self.table.grad.add_(received, alpha=2)", "pp=2",
    ),
    Mutant(
        "a table's gradient stays from the step before", f"{TABLE}.add_gradients",
        "self.copy.grad = None", "pass", "pp=4",
    ),
    Mutant(
        "the last micro-batch's weight gradients are missed", f"{RUNNER}.weight",
        "self.deferred.run((op.stage, op.micro_batch))",
        "op.micro_batch < 2 and self.deferred.run((op.stage, op.micro_batch))",
        ZERO_BUBBLE, SGD64, 3,
    ),
    Mutant(
        "parts' weight gradients of the first micro-batch are missed", f"{RUNNER}.weight",
        "self.deferred.run((op.stage, op.micro_batch))",
        "op.micro_batch and self.deferred.run((op.stage, op.micro_batch))",
        "tp=2,pp=2,pp_schedule=zero_bubble", SGD64, 3,
    ),
    Mutant(
        "the norm of one rank's stages", f"{STRATEGY}.gradient_norm",
        "all_reduce_sum(own.square(), self.mesh, self.axis)", "own.square()", "pp=2", ADAMW64,
    ),
    Mutant(
        "the norm as a sum of norms", f"{STRATEGY}.gradient_norm", "own.square(), self.mesh, self.axis).sqrt()",
        "own, self.mesh, self.axis)", "pp=2", ADAMW64,
    ),
    Mutant(
        "a weight gradient before its input gradient", f"{ROWS}:split_row", "split.append(weights.pop(0))",
        "split.insert(-1, weights.pop(0))", ZERO_BUBBLE,
    ),
    Mutant(
        "weight gradients of rows in another order", f"{DEFERRED}:DeferredGradients.run", "(gradients.t(), rows)",
        "(gradients.t(), rows.flip(0))", ZERO_BUBBLE,
    ),
    Mutant(
        "a stage without its last block", f"{STAGES}:PipelineLayout.stage_model", "1 <= piece <= layers",
        "1 <= piece < layers", "pp=2",
    ),
    Mutant(
        "data ranks' gradients sent before the table's are one", f"{STRATEGY}.begin_step",
        "self.inner.begin_micro_batch(last=False)", "self.inner.begin_micro_batch(last=True)", "pp=2,dp=2",
    ),
    Mutant(
        "the logged loss of the first stage", "llm.training_step:StepResult.mean_losses",
        'all_reduce_sum(sums, mesh, "pp")', "sums", "pp=2",
    ),
]  # fmt: skip
