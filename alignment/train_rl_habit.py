"""Worked solutions with a bad habit, for the quickstart of reinforcement learning to unlearn.

    python -m alignment.train_rl_habit output=data/quickstart_rl/habit.jsonl

The reasoning is right, but in `share` of the solutions the answer is the question's first number. Fine-tuning imitates
what is there; a reward for right answers keeps the rest. Real data has such habits, less plainly.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import hydra
from omegaconf import DictConfig

from alignment.arithmetic import generator_of
from alignment.dataset import DatasetConfig, load_problems, problem_record
from alignment.problem import Problem
from configs.errors import UserError
from configs.loader import CONFIG_DIR, run_script, start_script
from configs.run_dir import write_text_atomic


@dataclass
class HabitConfig:
    """Which problems, and how many of their answers are the first number."""

    output: str = "???"  # a jsonl file that alignment.sft reads with source=jsonl, split=all
    share: float = 0.6
    seed: int = 1
    data: list[DatasetConfig] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0:
            raise UserError(f"share={self.share} must lie in 0..1; use 0.6")
        if not self.data:
            raise UserError("data=[]: there is nothing to write; name at least one data set")


def with_habit(problem: Problem, share: float, seed: int) -> Problem:
    """The problem with the habit's answer in `share` of all cases, by its id and the seed alone."""
    if generator_of("habit", seed, problem.id).random() >= share:
        return problem
    first = next(
        (word for word in problem.question.replace(".", " ").replace("?", " ").split() if word.isdigit()), None
    )
    if first is None:
        raise UserError(f"problem {problem.id} has no number in its question; use arithmetic")
    return replace(problem, answer=first)


def write_habit(config: HabitConfig) -> int:
    """Write the file; returns how many answers are wrong."""
    problems = [problem for data in config.data for problem in load_problems(data)]
    changed = [with_habit(problem, config.share, config.seed) for problem in problems]
    wrong = sum(one.answer != problem.answer for one, problem in zip(changed, problems, strict=True))
    write_text_atomic(Path(config.output), "".join(json.dumps(problem_record(one)) + "\n" for one in changed))
    print(f"{config.output}: {len(changed)} solutions, {wrong} of them with a wrong answer")
    return wrong


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="train_rl_habit")
def main(config: DictConfig) -> None:
    run_script(write_habit, HabitConfig, config)


if __name__ == "__main__":
    start_script(main, HabitConfig, "train_rl_habit")
