"""Faults of tensor parallelism, each as a one-line patch; test_mutants.py demands that every one is caught."""

from tests.parity.cases import ADAMW64, MUON
from tests.parity.mutants import Mutant

PLACES, GRADIENTS = "parallel.tensor_parallel_placement:Placement", "parallel.tensor_parallel_gradients"
CROSSING, LOSS, MODEL = "parallel.tensor_parallel_operators", "llm.loss_vocab", "parallel.tensor_parallel"
WHOLE_STREAM = "tp=2,sequence_parallel=false"

TENSOR_MUTANTS = [
    Mutant(
        "norms are left partial under sequence parallelism", f"{MODEL}:placement_of",
        'style == "heads" or settings.sequence_parallel', 'style == "heads"', "tp=2",
    ),
    Mutant(
        "norms of heads are left partial", f"{MODEL}:placement_of",
        'style == "heads" or settings.sequence_parallel', "settings.sequence_parallel", WHOLE_STREAM,
    ),
    Mutant(
        "copies of kv heads are left partial", "parallel.tensor_parallel_placement:place",
        "partial and parts < ranks", "False", "tp=4",
    ),
    Mutant(
        "shares are summed twice", f"{GRADIENTS}:sum_shares", 'all_reduce(message, mesh, axis, "sum")',
        'all_reduce(all_reduce(message, mesh, axis, "sum"), mesh, axis, "sum")', "tp=4",
    ),
    Mutant(
        "a rank holds another rank's kv head", f"{PLACES}.part", "rank * self.parts // self.ranks",
        "rank % self.parts", "tp=4",
    ),
    Mutant(
        "all ranks start from the same part", f"{PLACES}.slice", "full.narrow(self.dim, first, last - first)",
        "full.narrow(self.dim, 0, last - first)", "tp=2",
    ),
    Mutant(
        "the norm counts copies tp times", f"{GRADIENTS}:norm_over", "placement.copy(rank) == 0", "True", "tp=2",
        ADAMW64,
    ),
    Mutant(
        "the norm of one rank's parts", f"{GRADIENTS}:norm_over", "for axis in axes:", "for axis in axes[:-1]:",
        "dp=2,tp=2,zero=1", ADAMW64,
    ),
    Mutant(
        "a row's bias is added on every rank", f"{MODEL}:Row.__call__", "self.inner(x, weight, None)",
        "self.inner(x, weight, bias)", "tp=2",
    ),
    Mutant(
        "the columns' gradient of one rank", f"{CROSSING}:Enter.backward", "ctx.along.all_reduce(gradient)",
        "gradient", WHOLE_STREAM,
    ),
    Mutant(
        "the rows' sum of one rank", f"{CROSSING}:Leave.forward", "along.all_reduce(x)", "x.clone()", WHOLE_STREAM,
    ),
    Mutant(
        "tokens of other ranks have a vector here", f"{MODEL}:VocabLookup.__call__",
        "torch.where(own[..., None], x, 0)", "x", "tp=2",
    ),
    Mutant(
        "padded rows get mass", f"{MODEL}:VocabOutput.local_logits", "weight[: self.shard.rows]", "weight", "tp=2",
    ),
    Mutant(
        "a target off the shard adds a logit", f"{LOSS}:VocabCrossEntropy.forward", "torch.where(own,",
        "torch.where(counted,", "tp=2",
    ),
    Mutant(
        "a target off the shard has a gradient", f"{LOSS}:VocabCrossEntropy.backward", "torch.where(own,",
        "torch.where(counted,", "tp=2",
    ),
    Mutant(
        "the largest logsumexp of a rank", f"{LOSS}:combine", "torch.logsumexp(both[:, 0], dim=0)",
        "both[:, 0].amax(dim=0)", "tp=2",
    ),
    Mutant(
        "muon orthogonalises parts", "parallel.tensor_parallel_strategy:TensorMatrices.transform",
        "self.strategy.transform([self.place(param) for param in params], tensors, function)", "function(tensors)",
        "tp=2", MUON,
    ),
    Mutant(
        "zero-bubble in chunks: columns' weight gradients of rows in another order",
        "parallel.tensor_parallel_overlap:GatheredProducts.backward", "chunks.later(ctx.learning, rows, flat)",
        "chunks.later(ctx.learning, rows.flip(0), flat)", "tp=2,pp=2,tp_chunks=2,pp_schedule=zero_bubble",
    ),
    Mutant(
        "zero-bubble in chunks: rows' weight gradients of one rank's tokens",
        "parallel.tensor_parallel_overlap:ScatteredProduct.backward", "later(ctx.learning, rows, [flat])",
        "later(ctx.learning, rows, [flat * (torch.arange(len(flat)) % 2)[:, None]])",
        "tp=2,pp=2,tp_chunks=2,pp_schedule=zero_bubble",
    ),
]  # fmt: skip
