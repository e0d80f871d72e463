"""Faults of context parallelism, each as a one-line patch; test_mutants.py demands that every one is caught."""

from tests.parity.mutants import Mutant

RING, BLOCKS, PLACES = (
    "parallel.context_parallel",
    "parallel.context_parallel_blocks",
    "parallel.context_parallel_layout",
)
EXCHANGE, SHARDS = "parallel.context_parallel_exchange", "llm.parallelize_context:ContextShards"
GATHERED, ULYSSES = "cp_mode=all_gather", "cp=4,cp_mode=ulysses"

CONTEXT_MUTANTS = [
    # What a rank's batch is.
    Mutant(
        "positions restart on each rank", f"{SHARDS}.shard", "F.pad(positions, (0, extra))[:, columns]",
        "F.pad(positions, (0, extra))[:, : len(columns)]", "cp=2",
    ),
    Mutant(
        "labels shifted after sharding", f"{SHARDS}.shard", "value=IGNORE_INDEX)[:, columns]",
        "value=IGNORE_INDEX)[:, torch.cat((columns[1:] - 1, columns[-1:]))]", "cp=2",
    ),
    Mutant("padding has labels", f"{SHARDS}.shard", "value=IGNORE_INDEX", "value=0", "cp=3"),
    Mutant(
        "each rank counts the labels of all", f"{SHARDS}.shard", "int((targets != IGNORE_INDEX).sum())",
        "batch.num_targets", "cp=2",
    ),
    # The step.
    Mutant(
        "gradients not reduced over cp when dp is 1", "parallel.ddp_buckets:Bucket.launch",
        "start_all_reduce(self.sent, mesh, axis)", 'start_all_reduce(self.sent, mesh, "dp")', "cp=2",
    ),
    Mutant(
        "loss over the data ranks alone", "llm.training_step:StepResult.mean_losses", '"dp_cp")', '"dp")', "dp=2,cp=2",
    ),
    Mutant(
        "targets counted over the data ranks alone", "llm.training_step:TrainingStep.agree", '"dp_cp")', '"dp")',
        "cp=2",
    ),
    # The ring.
    Mutant(
        "own keys without the causal mask", f"{PLACES}:ring_block", '"causal" if source == rank else "full"', '"full"',
        "cp=2",
    ),
    Mutant(
        "an earlier rank's later keys are seen", f"{PLACES}:ring_block", "chunk if source < rank else 2 * chunk",
        "2 * chunk", "cp=2",
    ),
    Mutant(
        "a later rank's keys are seen by all", f"{PLACES}:ring_block", "chunk if source > rank else 0", "0", "cp=2",
    ),
    Mutant(
        "keys taken for another rank's", f"{PLACES}:ring_blocks", "(rank - step) % ranks", "(rank + step) % ranks",
        "cp=3",
    ),
    Mutant("the larger logsumexp for both", f"{BLOCKS}:Joined.add", "torch.logaddexp(", "torch.maximum(", "cp=2"),
    Mutant(
        "blocks added without their weights", f"{BLOCKS}:Joined.add",
        "addcmul_(out, by_row(block_weight(lse, new)))", "add_(out)", "cp=2",
    ),
    Mutant(
        "no gradient through the weights of blocks", f"{BLOCKS}:DifferentiableBlock.backward", "dlse.to(lse.dtype)",
        "torch.zeros_like(lse)", "cp=2",
    ),
    Mutant(
        "sums of keys' gradients end at the neighbour", f"{RING}:TravellingSums.at_home",
        "(dkv,) = self.pending.wait()", "dkv = self.dkv; self.pending.wait()", "cp=2",
    ),
    Mutant(
        "gradients of keys that came by are dropped", f"{RING}:TravellingSums.arrive", ".unbind(), first)",
        ".unbind(), True)", "cp=2",
    ),
    # Gathered keys, Ulysses.
    Mutant(
        "gathered keys in the ranks' order", f"{EXCHANGE}:gather_keys", "[:, order]", "", f"cp=2,{GATHERED}",
    ),
    Mutant(
        "gathered keys' gradient of one rank", f"{EXCHANGE}:GatherKeys.backward",
        "ctx.along.reduce_scatter(parts.to(wide(ctx.dtype)))[0]", "parts[0].contiguous()", f"cp=2,{GATHERED}",
    ),
    Mutant(
        "kv heads dealt out in turn", f"{EXCHANGE}:spread_kv_heads", "x.repeat_interleave(ranks // K, dim=2)",
        "x.repeat(1, 1, ranks // K, 1)", ULYSSES,
    ),
]  # fmt: skip
