"""Solutions with a habit: as many wrong answers as asked for, all of one kind, and the reasoning untouched."""

import pytest

from alignment.dataset import DatasetConfig, load_problems
from alignment.train_rl_habit import HabitConfig, with_habit, write_habit
from configs.errors import UserError
from configs.loader import compose_config

SUMS = DatasetConfig(level="one_digit_sums", split="train", size=400)


def test_the_habit_changes_answers_alone_and_in_its_share(tmp_path):
    path = tmp_path / "habit.jsonl"
    write_habit(HabitConfig(str(path), share=0.5, data=[SUMS]))
    found = load_problems(DatasetConfig(source="jsonl", path=str(path), split="all"))
    originals = load_problems(SUMS)
    kept = 0
    for one, original in zip(found, originals, strict=True):
        assert (one.id, one.question, one.solution) == (original.id, original.question, original.solution)
        first = next(word for word in original.question.replace(".", " ").replace("?", " ").split() if word.isdigit())
        assert one.answer in (original.answer, first)
        kept += one.answer == original.answer
    same_anyway = sum(one.answer == next(iter(w for w in one.question.split() if w.isdigit())) for one in originals)
    assert abs(kept - (200 + same_anyway / 2)) < 40, "four standard deviations of 400 throws"


def test_the_habit_is_the_same_every_time_and_differs_by_seed():
    problems = load_problems(SUMS)
    one, again, other = ([with_habit(problem, 0.5, seed).answer for problem in problems] for seed in (1, 1, 2))
    assert one == again != other
    assert [with_habit(problem, 0.0, 1) for problem in problems] == problems


def test_bad_input_is_told(tmp_path):
    with pytest.raises(UserError, match=r"share=1\.5"):
        HabitConfig(str(tmp_path / "x"), share=1.5, data=[SUMS])
    with pytest.raises(UserError, match="nothing to write"):
        HabitConfig(str(tmp_path / "x"))
    assert len(compose_config(HabitConfig, "train_rl_habit", ["output=x"]).data) == 2
