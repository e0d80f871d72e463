"""Problems: every source and layout, the split that no seed crosses, and answers that are what the solutions say."""

import json
import re

import pytest

from alignment.arithmetic import LEVELS, make_problem
from alignment.dataset import DatasetConfig, check_disjoint, load_problems, problem_record, without_repeats
from alignment.problem import HELD_OUT_SHARE, Problem, split_of
from configs.errors import UserError

CALCULATION = re.compile(r"(\d+) ([-+*/]) (\d+)(?: \+ (\d+))? = (\d+)\.")


def numbers_of(text: str) -> tuple[str, ...]:
    return tuple(sorted(re.findall(r"\d+", text)))


@pytest.mark.parametrize("level", LEVELS)
def test_solutions_are_true_and_end_in_the_answer(level):
    for index in range(200):
        problem = make_problem(level, 3, index, "all")
        calculations = CALCULATION.findall(problem.solution)
        assert calculations and calculations[-1][-1] == problem.answer
        for left, sign, right, carry, value in calculations:
            exact = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}
            result = exact[sign] + int(carry or 0) if sign != "/" else int(left) / int(right)
            assert result == int(value) >= 0, problem


@pytest.mark.parametrize("level", ["one_digit_sums", "one_digit_chains", "two_digit_sums", "mixed"])
def test_bare_calculations_have_the_value_of_their_question(level):
    for index in range(100):
        problem = make_problem(level, 5, index, "train")
        expression = re.search(r"[\d(][-+*() \d]*", problem.question).group()
        assert eval(expression) == int(problem.answer)  # digits and signs only, by the pattern


def test_a_problem_depends_on_its_seed_split_and_index_alone():
    one = [make_problem("word_problems", 1, index, "train") for index in range(20)]
    assert one == [make_problem("word_problems", 1, index, "train") for index in range(20)]
    assert one[7] == load_problems(DatasetConfig(level="word_problems", size=8, seed=1))[7]
    assert one != [make_problem("word_problems", 2, index, "train") for index in range(20)]
    assert len({problem.id for problem in one}) == 20


@pytest.mark.parametrize("level", LEVELS)
def test_no_seed_shows_held_out_numbers_to_training(level):
    train = [make_problem(level, seed, index, "train") for seed in (1, 2) for index in range(300)]
    held_out = [make_problem(level, seed, index, "held_out") for seed in (1, 9) for index in range(150)]
    check_disjoint(train, held_out)
    if level in ("one_digit_sums", "one_digit_chains", "two_digit_sums"):  # 3 + 5 and 5 + 3 are on one side
        assert not {numbers_of(p.question) for p in train} & {numbers_of(p.question) for p in held_out}


def test_held_out_share_of_keys():
    share = sum(split_of(f"key {index}") == "held_out" for index in range(5_000)) / 5_000
    assert abs(share - HELD_OUT_SHARE) < 5 * (HELD_OUT_SHARE * (1 - HELD_OUT_SHARE) / 5_000) ** 0.5


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return DatasetConfig(source="jsonl", path=str(path), split="all")


def test_gsm8k_rows_lose_calculator_marks_and_marker(tmp_path):
    row = {"question": " Q? ", "answer": "He has 2*600=<<2*600=1200>>1200.\n#### 1,200"}
    (problem,) = load_problems(write_rows(tmp_path / "train.jsonl", [row]))
    assert problem == Problem(f"{tmp_path.name}/train/0", "Q?", "1200", f"{tmp_path.name}/train", "He has 2*600=1200.")


def test_math_rows_take_the_boxed_answer(tmp_path):
    rows = [
        {"problem": "P1", "solution": "So $x = \\boxed{\\frac{1}{2}}$.", "level": "Level 1"},
        {"problem": "P2", "solution": "So \\boxed{3}.", "answer": "three"},
        {"question": "P3", "answer": 7},
    ]
    problems = load_problems(write_rows(tmp_path / "math.jsonl", rows))
    assert [problem.answer for problem in problems] == ["\\frac{1}{2}", "three", "7"]
    assert problems[0].solution == rows[0]["solution"] and problems[2].solution is None


def test_our_own_rows_come_back_equal(tmp_path):
    problems = load_problems(DatasetConfig(level="mixed", size=20))
    assert load_problems(write_rows(tmp_path / "own.jsonl", map(problem_record, problems))) == problems


def test_splits_of_a_file_share_nothing_and_together_are_all(tmp_path):
    config = write_rows(tmp_path / "a.jsonl", [{"question": f"q{i}", "answer": str(i)} for i in range(100)])
    parts = [load_problems(DatasetConfig("jsonl", config.path, split=split)) for split in ("train", "held_out")]
    check_disjoint(*parts)
    assert len(parts[0]) + len(parts[1]) == 100 and 5 <= len(parts[1]) <= 40
    assert len(load_problems(DatasetConfig("jsonl", config.path, split="all", size=7))) == 7


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not JSON"),
        ("[" * 100_000, "line 1 is not JSON"),
        ("[1]", "is a list, not an object"),
        ('{"answer": "1"}', "no question"),
        ('{"question": "  ", "answer": "1"}', "no question"),
        ('{"question": "q"}', "has no answer"),
        ('{"question": "q", "answer": ""}', "has no answer"),
        ('{"question": "q", "answer": true}', "has no answer"),
        ('{"problem": "q", "solution": "so \\\\boxed{1"}', "has no answer"),
        ("", "no problem in split=all"),
    ],
)
def test_broken_rows_are_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=message):
        load_problems(DatasetConfig("jsonl", str(path), split="all"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": "nowhere"}, "source='nowhere'"),
        ({"level": "calculus", "size": 1}, "level='calculus'"),
        ({"size": None}, "size=null"),
        ({"size": 0}, "size=0"),
        ({"split": "test", "size": 1}, "split='test'"),
        ({"source": "jsonl"}, "path=None"),
    ],
)
def test_wrong_configs_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        DatasetConfig(**arguments)


def test_repeated_questions_are_left_out_in_order():
    problems = [Problem(str(i), question, "1", "s") for i, question in enumerate(("a b", "c", "A  b", "d", "c"))]
    assert [problem.id for problem in without_repeats(problems)] == ["0", "1", "3"]


def test_missing_file_and_overlap_are_refused(tmp_path):
    with pytest.raises(UserError, match="is not a file"):
        load_problems(DatasetConfig("jsonl", str(tmp_path / "none.jsonl")))
    problem = Problem("a", "How  many?", "1", "s")
    with pytest.raises(UserError, match="held-out problem b is training problem a"):
        check_disjoint([problem], [Problem("b", "how many?", "1", "s")])


def test_reasoning_gym_tasks_by_name():
    pytest.importorskip("reasoning_gym")
    problems = load_problems(DatasetConfig("reasoning_gym", "chain_sum", size=20))
    assert len(problems) == 20
    for problem in problems:
        expression = problem.question.rpartition(":")[2].rstrip(" =")
        assert eval(re.fullmatch(r"[-+\d ]+", expression).group()) == int(problem.answer)
    check_disjoint(
        problems, load_problems(DatasetConfig("reasoning_gym", "chain_sum", split="held_out", size=20, seed=9))
    )
    with pytest.raises(UserError, match="path=nope"):
        load_problems(DatasetConfig("reasoning_gym", "nope", size=1))


def test_hub_data_sets_by_name_read_local_files(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "train.jsonl").write_text('{"question": "q", "answer": "so\\n#### 5"}\n', encoding="utf-8")
    (problem,) = load_problems(DatasetConfig("hub", str(tmp_path), split="all"))
    assert (problem.answer, problem.solution) == ("5", "so")
    with pytest.raises(UserError, match="hub_split=test"):
        load_problems(DatasetConfig("hub", str(tmp_path), hub_split="test", split="all"))


def test_gsm8k_is_read_whole(shared_data):
    for name, count in (("train", 7_473), ("test", 1_319)):
        problems = load_problems(DatasetConfig("jsonl", str(shared_data / "gsm8k" / f"{name}.jsonl"), split="all"))
        assert len(problems) == count
        assert all(re.fullmatch(r"-?\d+", problem.answer) for problem in problems)
        assert not any("<<" in problem.solution or "####" in problem.solution for problem in problems)
