"""Completions with rewards, by group of one prompt: what rollouts hand to learning, and what waits in a checkpoint.

Plain values only, so that a batch travels between ranks and lies in state.json as JSON, whose numbers are read back
exactly. What is learned from are the engine's ids: a text that is tokenised again need not give them.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from alignment.grpo import AlgorithmConfig, advantages_of, shaped_rewards
from alignment.rollout import sampler_log_probs
from llm.engine_request import Completion


@dataclass
class Sample:
    """One completion: `log_probs` are log q, of the distribution that each token was drawn from."""

    prompt_ids: list[int]
    token_ids: list[int]
    log_probs: list[float]
    text: str
    finish_reason: str
    reward: float
    format_reward: float
    answer_reward: float

    @classmethod
    def of(cls, completion: Completion, rewards: dict[str, float]) -> "Sample":
        """`rewards`: reward, format_reward and answer_reward, as the grader gives them."""
        return cls(
            prompt_ids=list(completion.prompt_ids),
            token_ids=list(completion.token_ids),
            log_probs=sampler_log_probs(completion),
            text=completion.text,
            finish_reason=completion.finish_reason,
            reward=float(rewards["reward"]),
            format_reward=float(rewards["format_reward"]),
            answer_reward=float(rewards["answer_reward"]),
        )

    @property
    def is_cut(self) -> bool:
        """Whether the limit of tokens ended it."""
        return self.finish_reason == "length"


@dataclass
class Group:
    """The completions of one problem, written with the weights `version`; `draw` is the problem's turn in the run."""

    draw: int
    problem_id: str
    question: str
    answer: str
    version: int
    samples: list[Sample]

    @property
    def is_informative(self) -> bool:
        """Whether rewards differ: equal ones have advantages of 0."""
        rewards = {sample.reward for sample in self.samples}
        return len(rewards) > 1


def groups_to_json(groups: list[Group]) -> list[dict[str, Any]]:
    return [asdict(group) for group in groups]


def groups_from_json(values: list[dict[str, Any]]) -> list[Group]:
    return [Group(**{**value, "samples": [Sample(**one) for one in value["samples"]]}) for value in values]


def group_rewards(groups: list[Group]) -> tuple[Tensor, Tensor]:
    """Rewards (R,) float64 of all samples in order, and the number (R,) of the group that each belongs to."""
    rewards = [sample.reward for group in groups for sample in group.samples]
    ids = [number for number, group in enumerate(groups) for _ in group.samples]
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(ids)


def sample_advantages(groups: list[Group], algorithm: AlgorithmConfig, max_new_tokens: int) -> list[float]:
    """The advantage of each sample in order, from the whole batch: a rank's share of it would give other numbers."""
    rewards, ids = group_rewards(groups)
    lengths = torch.tensor([len(sample.token_ids) for group in groups for sample in group.samples])
    shaped = shaped_rewards(algorithm, rewards, lengths, max_new_tokens)
    return advantages_of(algorithm, shaped, ids).tolist()
