"""Dr. GRPO's rules: verdicts that follow from its published source, and agreement with a packaged copy of them."""

import json

import pytest

from alignment.drgrpo_grader import Grader
from alignment.drgrpo_grader_compat import same_answer_drgrpo
from tests.alignment.grader_cases import DIFFERENT, EQUAL
from tests.tolerances import DRGRPO_AGREEMENT

PAID = [
    ("72", "72"),
    ("72.0", "72"),
    ("1,200", "1200"),
    ("\\frac{1}{2}", "\\frac12"),
    ("0.5", "\\frac{1}{2}"),
    ("1/2", "\\frac{1}{2}"),
    ("50\\%", "50"),
    ("\\$18", "18"),
    ("90^\\circ", "90"),
    ("x=5", "5"),
    ("\\sqrt2", "\\sqrt{2}"),
    ("\\text{Yes}", "yes"),
    ("7 3/4", "7+3/4"),
    ("2 and 3", "2,3"),
    ("(1, 2)", "(1,2)"),
    ("2x+3", "3+2x"),
    ("15 cm", "15 inches"),
    ("5 meters", "5"),
    ("[0,1)", "[0, 1)"),
    ("3", "\\boxed{3}"),
]
NOT_PAID = [
    ("2/4", "1/2"),
    ("3 million", "3000000"),
    ("\\frac{2}{4}", "\\frac{1}{2}"),
    ("144/2", "72"),
    ("2, 1", "1, 2"),
    ("(2,1)", "(1,2)"),
    ("[0,1)", "[0,1]"),
    ("50\\%", "0.5"),
    ("−7", "-7"),
    ("**72**", "72"),
    ("", "72"),
    ("73", "72"),
    ("x^{12}+1", "1+x^{12}"),
    ("a+b+c", "c+b+a"),
    ("2^{10}", "1024"),
    ("between 70 and 72", "72"),
    ("9**9**9**9", "1"),
]


@pytest.mark.parametrize(("given", "truth"), PAID)
def test_paid_by_drgrpo(given, truth):
    assert same_answer_drgrpo(given, truth)


@pytest.mark.parametrize(("given", "truth"), NOT_PAID)
def test_not_paid_by_drgrpo(given, truth):
    assert not same_answer_drgrpo(given, truth)


@pytest.mark.parametrize(
    ("mode", "response", "format_ok", "correct"),
    [
        ("answer_tag", "a</think> <answer>5</answer> b <answer>72</answer>", True, True),  # the last block counts
        ("answer_tag", "a</think> <answer>72</answer> b", True, False),  # and all that follows it
        ("answer_tag", "a</think><answer>72</answer>", False, False),  # exactly one space
        ("answer_tag", "a</think> <answer>\\boxed{72}</answer>", True, True),
        ("answer_tag", "a</think> <answer>\\boxed{72</answer>", True, False),
        ("boxed", "\\boxed{5} \\boxed{72}", True, True),
        ("boxed", "\\boxed 72", False, False),
        ("boxed", "72", False, False),
    ],
)
def test_forms_of_a_response(mode, response, format_ok, correct):
    verdict = Grader(mode, "drgrpo").verdict(response, "72")
    assert (verdict.format_ok, verdict.correct) == (format_ok, correct)


def test_gsm8k_truths_and_neighbours(shared_data):
    rows = [json.loads(line) for line in (shared_data / "gsm8k" / "test.jsonl").read_text("utf-8").splitlines()][:300]
    truths = [row["answer"].rpartition("####")[2].strip() for row in rows]
    assert all(same_answer_drgrpo(truth.replace(",", ""), truth) for truth in truths)
    assert not any(same_answer_drgrpo(f"{truth}1", truth) for truth in truths)


def test_agreement_with_the_packaged_rules():
    """mathruler 0.1 holds the two rules as published: pip install -e '.[bench]'."""
    grader = pytest.importorskip("mathruler.grader")
    unsafe = ("9**9", "9^{", "100000", "10^{10", "^{50}", "^{60}", "import", "exit", "getcwd", "lambda", "range")
    pairs = [pair for pair in EQUAL + DIFFERENT if not any(word in pair[0] for word in unsafe)]
    same = [same_answer_drgrpo(*pair) == bool(grader.grade_answer(*pair)) for pair in pairs]
    assert len(pairs) > 350 and sum(same) / len(same) >= DRGRPO_AGREEMENT
