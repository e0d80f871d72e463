"""From a batch of groups to optimizer steps: advantages, log-probs before the first update, and llm's training step.

Log-probs before an update are computed only where something needs them: with several updates a batch the ratio's
denominator, with a KL term or its logging the reference's. With one update they are those of the update itself.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from alignment.grpo import mean_metrics
from alignment.train_rl_batch import MicroBatching, PolicyBatch, empty_policy_batch
from alignment.train_rl_clock import Clock
from alignment.train_rl_config import TrainRlConfig
from alignment.train_rl_policy import Policy
from alignment.train_rl_samples import Group, sample_advantages
from llm.training_step import StepResult, TrainingStep, without_targets
from parallel.collectives import all_reduce, all_reduce_max
from parallel.mesh import Mesh

PADDED_TOKENS = 8


@dataclass
class Learned:
    """What the updates of a batch did; means over sampled tokens of the global batch, of all its updates."""

    metrics: dict[str, float]
    results: list[StepResult] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)  # of each sample, in order


@dataclass
class Learner:
    """The training side of one rank."""

    config: TrainRlConfig
    mesh: Mesh
    policy: Policy
    training_step: TrainingStep
    reference: nn.Module | None = None  # frozen; only with algorithm.kl_coef > 0

    def autocast(self) -> AbstractContextManager:
        dtype = self.training_step.autocast_dtype
        return nullcontext() if dtype is None else torch.autocast(self.mesh.device.type, dtype)

    def learn(self, groups: list[Group], step: int, clock: Clock) -> Learned:
        """All updates of a batch, beginning with optimizer step `step`; called by every training rank."""
        config = self.config
        with clock.section("log_prob"):
            advantages = sample_advantages(groups, config.algorithm, config.max_new_tokens)
            shares = self.shares(groups, advantages)
            for micro_batches in shares:
                self.add_log_probs(micro_batches)
        results = []
        with clock.section("update"):
            for _ in range(config.epochs_per_batch):
                for micro_batches in shares:
                    results.append(self.training_step.run(step + len(results), micro_batches))
            self.training_step.settle()
        return Learned(self.reduced_metrics(), results, advantages)

    def shares(self, groups: list[Group], advantages: list[float]) -> list[list[PolicyBatch]]:
        """This rank's micro-batches of each update; every rank has as many, since strategies send in each."""
        config, mesh = self.config, self.mesh
        batching = MicroBatching(
            config.algorithm.aggregation, config.micro_batch_tokens, mesh.rank_in("dp"), mesh.size("dp")
        )
        per_share = len(groups) // config.updates_per_batch
        shares, done = [], 0
        for first in range(0, per_share * config.updates_per_batch, per_share):
            samples = [sample for group in groups[first : first + per_share] for sample in group.samples]
            shares.append(batching.make(samples, advantages[done : done + len(samples)]))
            done += len(samples)
        counts = all_reduce_max(torch.tensor([len(share) for share in shares]), mesh, "dp_cp").tolist()
        padding = empty_policy_batch(without_targets(PADDED_TOKENS))
        return [
            [batch.to(mesh.device) for batch in share + [padding] * (count - len(share))]
            for share, count in zip(shares, counts, strict=True)
        ]

    def add_log_probs(self, micro_batches: list[PolicyBatch]) -> None:
        """Fill in the old and the reference's log-probs where the loss reads them."""
        for batch in micro_batches:
            if self.config.steps_per_batch > 1:
                batch.old_log_probs = self.policy.log_probs(self.policy.model, batch, self.autocast)
            if self.reference is not None:
                batch.reference_log_probs = self.policy.log_probs(self.reference, batch, self.autocast)

    def reduced_metrics(self) -> dict[str, float]:
        """The policy's sums of these updates over all data ranks, a sampled token each; maxima as they are."""
        sums, maxima = self.policy.take_metrics()
        if not sums:
            return {}
        total = reduce_named(sums, lambda values: all_reduce(values, self.mesh, "dp_cp", "sum"))
        largest = reduce_named(maxima, lambda values: all_reduce(values, self.mesh, "dp_cp", "max"))
        return mean_metrics(total) | {f"max_{name}": float(value) for name, value in largest.items()}


def reduce_named(values: dict[str, Tensor], reduce: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Scalars by name, reduced in one message; the names are the same on all ranks."""
    names = sorted(values)
    reduced = reduce(torch.stack([values[name].double() for name in names]))
    return dict(zip(names, reduced, strict=True))
