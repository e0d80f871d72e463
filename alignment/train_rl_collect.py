"""From problems to a batch of groups: completions by the engine, their rewards, dynamic sampling, what is left over.

Which problem and which dice the d-th group of a run gets is a function of (seed, d): a resumed run, or one with more
ranks, writes the same. Dynamic sampling (DAPO, Yu et al. 2025) drops groups with equal rewards and asks again, a
bounded number of times; good groups beyond the batch wait for the next one, at most one version of the weights old.
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from alignment.problem import Problem
from alignment.rollout import RolloutEngine, check_completions
from alignment.train_rl_samples import Group, Sample, groups_from_json, groups_to_json
from llm.engine_request import Completion, RequestParams
from parallel.collectives import all_gather_json
from parallel.mesh import Mesh

Grade = Callable[[list[str], list[Problem]], list[dict[str, float]]]  # rewards of texts that answer the problems


class NoSignalWarning(UserWarning):
    """Every group that could be had for a batch, or too many of them, had equal rewards: nothing to learn from."""


@dataclass
class Task:
    """Problems with their prompts' ids, how completions are sampled, and what they are worth."""

    problems: list[Problem]
    prompts: list[list[int]]
    params: RequestParams
    grade: Grade
    num_ids: int  # the tokenizer's vocabulary


@dataclass
class CollectSettings:
    groups: int  # of a batch
    group_size: int
    seed: int
    dynamic: bool = False
    max_tries: int = 4
    max_staleness: int = 1  # versions that a waiting group may be behind


@dataclass
class Collected:
    """One batch, with what it took: seconds of this rank, tokens of all."""

    groups: list[Group]
    rollout_s: float = 0.0
    reward_s: float = 0.0
    rollout_tokens: int = 0  # written, those of dropped groups included
    prompt_tokens: int = 0
    written: int = 0  # groups
    informative: int = 0  # of them
    tries: int = 0

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "groups": groups_to_json(self.groups)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Collected":
        return cls(**{**value, "groups": groups_from_json(value["groups"])})


@dataclass
class Collector:
    """`collect()` writes the next batch; every rank of `mesh` calls it and gets the whole batch.

    next_draw: groups begun so far, pending: good ones that wait; together the cursor that a checkpoint keeps.
    """

    task: Task
    settings: CollectSettings
    engine: RolloutEngine
    mesh: Mesh
    axis: str = "world"  # of the ranks that write completions together
    next_draw: int = 0
    pending: list[Group] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        return {"next_draw": self.next_draw, "pending": groups_to_json(self.pending)}

    def restore(self, state: dict[str, Any]) -> None:
        self.next_draw, self.pending = state["next_draw"], groups_from_json(state["pending"])

    def collect(self) -> Collected:
        """The next batch of `settings.groups` groups."""
        # An evaluation leaves prefixes that a resumed run has not: numbers would differ in their last bit.
        self.engine.forget_prefixes()
        wanted, oldest = self.settings.groups, self.engine.weight_version - self.settings.max_staleness
        found = Collected([group for group in self.pending if group.version >= oldest])
        spare: list[Group] = []
        while len(found.groups) < wanted and found.tries < (self.settings.max_tries if self.settings.dynamic else 1):
            fresh = self.round(found)
            good = [group for group in fresh if group.is_informative]
            found.informative += len(good)
            found.groups += good if self.settings.dynamic else fresh
            spare += [group for group in fresh if not group.is_informative]
        if self.settings.dynamic and len(found.groups) < wanted:
            self.fill_up(found, spare)
        self.pending, found.groups = found.groups[wanted:], found.groups[:wanted]
        return found

    def fill_up(self, found: Collected, spare: list[Group]) -> None:
        """The batch keeps its size with groups that teach nothing, and says so."""
        missing = self.settings.groups - len(found.groups)
        warnings.warn(
            f"{missing} of {self.settings.groups} groups have equal rewards after {found.tries} tries of "
            f"{self.settings.groups} (max_tries): the problems are too easy or too hard for the policy, or group_size="
            f"{self.settings.group_size} is too small",
            NoSignalWarning,
            stacklevel=3,
        )
        found.groups += spare[:missing]

    def round(self, found: Collected) -> list[Group]:
        """As many new groups as a batch has, each rank of the axis writing its share; in the order of their draws."""
        draws = range(self.next_draw, self.next_draw + self.settings.groups)
        self.next_draw += len(draws)
        found.tries += 1
        own = self.write(list(draws)[self.mesh.rank_in(self.axis) :: self.mesh.size(self.axis)], found)
        if self.mesh.size(self.axis) > 1:
            parts = all_gather_json(groups_to_json(own), self.mesh, self.axis)
            own = sorted((group for part in parts for group in groups_from_json(part)), key=lambda group: group.draw)
        found.written += len(own)
        found.rollout_tokens += sum(len(sample.token_ids) for group in own for sample in group.samples)
        found.prompt_tokens += sum(len(sample.prompt_ids) for group in own for sample in group.samples)
        return own

    def write(self, draws: list[int], found: Collected) -> list[Group]:
        """These groups, by this rank's engine."""
        size, started_s = self.settings.group_size, time.perf_counter()
        chosen = [self.problem_of(draw) for draw in draws]
        prompts = [self.task.prompts[index] for index in chosen for _ in range(size)]
        params = [replace(self.task.params, index=draw * size + member) for draw in draws for member in range(size)]
        version = self.engine.weight_version
        completions = self.engine.generate(prompts, params)
        check_completions(completions, version, self.task.num_ids)
        found.rollout_s += (written_s := time.perf_counter()) - started_s
        problems = [self.task.problems[index] for index in chosen]
        groups = grade_groups(draws, problems, completions, version, self.task.grade)
        found.reward_s += time.perf_counter() - written_s
        return groups

    def problem_of(self, draw: int) -> int:
        """The problem of a draw: each once in an epoch, in an order of its own."""
        epoch, place = divmod(draw, len(self.task.problems))
        return epoch_order(self.settings.seed, epoch, len(self.task.problems))[place]


def epoch_order(seed: int, epoch: int, count: int) -> list[int]:
    """A permutation of `count` problems from (seed, epoch)."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(count, generator=generator).tolist()


def grade_groups(
    draws: list[int], problems: list[Problem], completions: list[Completion], version: int, grade: Grade
) -> list[Group]:
    """The groups of these draws: `completions` holds those of the first problem, then those of the second, ..."""
    size = len(completions) // max(len(draws), 1)
    rewards = grade([one.text for one in completions], [problem for problem in problems for _ in range(size)])
    samples = [Sample.of(one, reward) for one, reward in zip(completions, rewards, strict=True)]
    return [
        Group(draw, problem.id, problem.question, problem.answer, version, samples[i * size : (i + 1) * size])
        for i, (draw, problem) in enumerate(zip(draws, problems, strict=True))
    ]
