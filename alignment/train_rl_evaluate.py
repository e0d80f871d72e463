"""Held-out accuracy during a run: every rank that writes takes a share of the problems, with temperature 0."""

from dataclasses import dataclass, field, replace
from typing import Any

from alignment.intervals import wilson_interval
from alignment.train_rl_collect import grade_groups
from alignment.train_rl_samples import Sample
from alignment.train_rl_setup import RlRun, RolloutSide
from llm.engine_request import RequestParams
from parallel.collectives import all_gather_json


@dataclass
class HeldOut:
    """Counts over the held-out problems: greedy answers, and samples at the temperature of training."""

    problems: int
    correct: int
    well_formed: int
    tokens: int
    cut: int
    samples: int
    sampled_correct: int
    lengths: list[int] = field(default_factory=list)  # of the samples, of the greedy answers where there are none

    def fields(self) -> dict[str, Any]:
        """Shares, with the 95% interval of the accuracy (Wilson 1927).

        val_accuracy is greedy. val_pass_at_1 is what the policy itself gets, sampled as in training; its interval
        takes answers to one problem as independent.
        """
        low, high = wilson_interval(self.correct, self.problems)
        count = max(self.problems, 1)
        fields = {
            "val_accuracy": self.correct / count,
            "val_accuracy_low": low,
            "val_accuracy_high": high,
            "val_format_rate": self.well_formed / count,
            "val_response_tokens": self.tokens / count,
            "val_cut_fraction": self.cut / count,
            "val_problems": self.problems,
        }
        if self.samples:
            low, high = wilson_interval(self.sampled_correct, self.samples)
            fields |= {"val_pass_at_1": self.sampled_correct / self.samples}
            fields |= {"val_pass_at_1_low": low, "val_pass_at_1_high": high}
        return fields


def evaluate_held_out(run: RlRun) -> HeldOut:
    """All held-out problems, greedily and sampled; called by every rank of the run, and given to each."""
    own = None if run.rollout is None else evaluate_share(run)
    shares = [one for one in all_gather_json(own, run.roles.world, "world") if one is not None]
    *counts, lengths = zip(*shares, strict=True)
    return HeldOut(*map(sum, counts), lengths=[length for share in lengths for length in share])


def evaluate_share(run: RlRun) -> list[Any]:
    """The counts of HeldOut over this rank's share of the problems."""
    side, config = run.rollout, run.config
    mesh, params = side.collector.mesh, side.held_out.params
    own = list(range(len(side.held_out.problems)))[mesh.rank_in("world") :: mesh.size("world")]
    answers = answer(side, own, [replace(params, index=i) for i in own])
    sampling = replace(config.sampling(), seed=config.seed + 1)  # dice that no training completion has
    count = config.evaluate_samples
    repeated = [i for i in own for _ in range(count)]
    dice = [i * count + member for i in own for member in range(count)]
    sampled = answer(side, repeated, [replace(params, sampling=sampling, index=number) for number in dice])
    return [
        len(answers),
        sum(one.answer_reward > 0 for one in answers),
        sum(one.format_reward > 0 for one in answers),
        sum(len(one.token_ids) for one in answers),
        sum(one.is_cut for one in answers),
        len(sampled),
        sum(one.answer_reward > 0 for one in sampled),
        [len(one.token_ids) for one in sampled or answers],
    ]


def answer(side: RolloutSide, indices: list[int], params: list[RequestParams]) -> list[Sample]:
    """A graded completion of each held-out problem."""
    if not indices:
        return []
    task, version = side.held_out, side.engine.weight_version
    completions = side.engine.generate([task.prompts[i] for i in indices], params)
    problems = [task.problems[i] for i in indices]
    groups = grade_groups(list(range(len(indices))), problems, completions, version, task.grade)
    return [group.samples[0] for group in groups]
