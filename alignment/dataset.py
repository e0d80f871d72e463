"""Problems from a file, from the hub, from reasoning-gym or from the built-in generator, as one kind of record.

    load_problems(DatasetConfig(source="jsonl", path="../shared/data/gsm8k/train.jsonl"))
    load_problems(DatasetConfig(source="arithmetic", level="word_problems", size=10_000))

A jsonl file may be GSM8K's (`question`, `answer` ending in "#### 72"), MATH's (`problem`, `solution` with a \\boxed
answer, perhaps `answer`), or our own (`question`, `answer`, perhaps `solution`, `id`, `source`); dataset_rows.py reads
a row. `split` takes the training or the held-out part of any source by a hash of the question (arithmetic: of the
numbers), so that two loads of one source with other seeds never meet.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignment.arithmetic import LEVELS, make_problem
from alignment.dataset_rows import problem_of_row
from alignment.problem import Problem, split_of
from configs.errors import UserError, check_choice, check_positive, missing_extra

SOURCES = ("arithmetic", "jsonl", "hub", "reasoning_gym")


@dataclass
class DatasetConfig:
    """Where problems come from.

    source: arithmetic, jsonl, hub (Hugging Face datasets by name) or reasoning_gym.
    path: the jsonl file; hub: the data set, "openai/gsm8k"; reasoning_gym: the task, "chain_sum".
    level: of arithmetic. subset, hub_split: "main" and "train" for the hub.
    split: train, held_out, or all (a file that is a split already). size: how many; null: all of a file.
    """

    source: str = "arithmetic"
    path: str | None = None
    level: str = "one_digit_sums"
    subset: str | None = None
    hub_split: str = "train"
    split: str = "train"
    size: int | None = None
    seed: int = 1

    def __post_init__(self) -> None:
        check_choice("source", self.source, SOURCES)
        check_choice("split", self.split, ("train", "held_out", "all"))
        if self.size is not None:
            check_positive(size=self.size)
        if self.source == "arithmetic":
            check_choice("level", self.level, tuple(LEVELS))
            if self.size is None:
                raise UserError("size=null: generated problems have no end; give a number such as size=1000")
        elif not self.path:
            raise UserError(f"path={self.path} with source={self.source}: name the file or data set, path=...")


def load_problems(config: DatasetConfig) -> list[Problem]:
    """The problems that a config names, in a fixed order; UserError for a source without one or with a broken row."""
    if config.source == "arithmetic":
        return [make_problem(config.level, config.seed, i, config.split) for i in range(config.size)]
    readers = {"jsonl": read_jsonl_problems, "hub": read_hub_problems, "reasoning_gym": read_gym_problems}
    problems = []
    for problem in readers[config.source](config):
        if config.split == "all" or split_of(" ".join(problem.question.split())) == config.split:
            problems.append(problem)
        if len(problems) == config.size:
            break
    if not problems:
        raise UserError(f"{config.source} {config.path} has no problem in split={config.split}; check it or use all")
    return problems


def read_jsonl_problems(config: DatasetConfig) -> Iterator[Problem]:
    path = Path(config.path)
    if not path.is_file():
        raise UserError(f"path={path} is not a file; give a jsonl file such as gsm8k/train.jsonl")
    source = f"{path.parent.name}/{path.stem}"
    with open(path, encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where} is not JSON ({error}); mend or remove it") from error
            yield problem_of_row(row, where, f"{source}/{number - 1}", source)


def read_hub_problems(config: DatasetConfig) -> Iterator[Problem]:
    """Rows of a data set on the Hugging Face hub, or in its local cache; needs the align extra."""
    try:
        import datasets
    except ImportError as error:
        raise missing_extra("datasets", "align") from error
    try:
        rows = datasets.load_dataset(config.path, config.subset, split=config.hub_split)
    except (OSError, ValueError) as error:  # unknown names, no network, not cached
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"path={config.path} subset={config.subset} hub_split={config.hub_split}: {reason}") from error
    for number, row in enumerate(rows):
        name = f"{config.path}/{config.hub_split}"
        yield problem_of_row(row, f"{name} row {number}", f"{name}/{number}", config.path)


def read_gym_problems(config: DatasetConfig) -> Iterator[Problem]:
    """Problems of one reasoning-gym task; needs the align extra. They have no end, so `size` must be given."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise missing_extra("reasoning-gym", "align") from error
    if config.size is None:
        raise UserError("size=null: generated problems have no end; give a number such as size=1000")
    try:
        # A split keeps a part of what is drawn, so more are drawn than are asked for.
        task = reasoning_gym.create_dataset(config.path, seed=config.seed, size=10 * config.size + 100)
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise UserError(f"path={config.path}: reasoning-gym says {error}; name one of its tasks") from error
    for number in range(len(task)):
        row = task[number]
        name = f"reasoning_gym/{config.path}"
        yield problem_of_row(row, f"{name} number {number}", f"{name}/{config.seed}/{number}", name)


def check_disjoint(train: Iterable[Problem], held_out: Iterable[Problem]) -> None:
    """Raise UserError when a held-out question, spaces and case aside, is among the training questions."""
    seen = {normal_question(problem.question): problem.id for problem in train}
    for problem in held_out:
        other = seen.get(normal_question(problem.question))
        if other is not None:
            raise UserError(f"held-out problem {problem.id} is training problem {other}; give the two other splits")


def without_repeats(problems: Iterable[Problem]) -> list[Problem]:
    """The problems without those whose question came before: what is asked twice says nothing twice."""
    first = {}
    for problem in problems:
        first.setdefault(normal_question(problem.question), problem)
    return list(first.values())


def normal_question(text: str) -> str:
    return " ".join(text.lower().split())


def problem_record(problem: Problem) -> dict[str, Any]:
    """A problem as a jsonl row that `source=jsonl` reads back."""
    record = {"id": problem.id, "question": problem.question, "answer": problem.answer, "source": problem.source}
    return record if problem.solution is None else record | {"solution": problem.solution}
