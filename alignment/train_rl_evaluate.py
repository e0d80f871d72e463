"""Held-out accuracy during a run: every rank that writes takes a share of the problems, with temperature 0."""

from dataclasses import dataclass
from typing import Any

from alignment.intervals import wilson_interval
from alignment.train_rl_collect import grade_groups
from alignment.train_rl_setup import RlRun, RolloutSide
from parallel.collectives import all_gather_json


@dataclass
class HeldOut:
    """Counts over the held-out problems."""

    problems: int
    correct: int
    well_formed: int
    tokens: int
    cut: int

    def fields(self) -> dict[str, Any]:
        """Shares, with the 95% interval of the accuracy (Wilson 1927)."""
        low, high = wilson_interval(self.correct, self.problems)
        count = max(self.problems, 1)
        return {
            "val_accuracy": self.correct / count,
            "val_accuracy_low": low,
            "val_accuracy_high": high,
            "val_format_rate": self.well_formed / count,
            "val_response_tokens": self.tokens / count,
            "val_cut_fraction": self.cut / count,
            "val_problems": self.problems,
        }


def evaluate_held_out(run: RlRun) -> HeldOut:
    """All held-out problems once; called by every rank of the run, and given to each."""
    own = None if run.rollout is None else evaluate_share(run.rollout)
    shares = [one for one in all_gather_json(own, run.roles.world, "world") if one is not None]
    return HeldOut(*(sum(column) for column in zip(*shares, strict=True)))


def evaluate_share(side: RolloutSide) -> list[int]:
    """The counts of HeldOut over this rank's share of the problems."""
    task, mesh = side.held_out, side.collector.mesh
    own = list(range(len(task.problems)))[mesh.rank_in("world") :: mesh.size("world")]
    completions = side.engine.generate([task.prompts[i] for i in own], [task.params] * len(own))
    groups = grade_groups(own, [task.problems[i] for i in own], completions, side.engine.weight_version, task.grade)
    samples = [group.samples[0] for group in groups]
    return [
        len(samples),
        sum(one.answer_reward > 0 for one in samples),
        sum(one.format_reward > 0 for one in samples),
        sum(len(one.token_ids) for one in samples),
        sum(one.is_cut for one in samples),
    ]
