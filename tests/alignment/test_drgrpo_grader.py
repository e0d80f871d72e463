"""The grader against the written policies, the shared cases, hostile input, and arbitrary text (hypothesis)."""

import json
import os
import threading
import time
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from alignment.drgrpo_grader import Grader
from alignment.drgrpo_grader_compare import same_answer
from alignment.drgrpo_grader_extract import MODES, boxes, cut, extract, last_boxed
from alignment.drgrpo_grader_latex import MAX_DEPTH, NotParsed, parse_expression
from alignment.drgrpo_grader_rational import parse_rational
from configs.errors import UserError
from tests.alignment.grader_cases import DIFFERENT, EQUAL, RESPONSES

# What a verdict may cost this process; measured in processor seconds, so that a busy machine changes nothing.
MAX_CPU_S = 1.0
PIECES = [
    "\\frac",
    "\\sqrt",
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    "^",
    "_",
    "!",
    "|",
    "\\boxed{",
    "####",
    "<answer>",
    "</answer>",
]
PIECES += [
    "</think> ",
    "72",
    "1",
    "9",
    "x",
    "e",
    "i",
    "\\pi",
    ",",
    ".",
    "-",
    "+",
    "*",
    "/",
    "%",
    "$",
    " ",
    "=",
    "<",
    "\\\\",
    "\\",
]
PIECES += [
    "\\text{",
    "\\begin{pmatrix}",
    "\\end{pmatrix}",
    "&",
    "\\pm",
    "\\cup",
    "\\{",
    "\\}",
    " and ",
    "cm",
    "½",
    "٣",
    "\n",
]


@pytest.mark.parametrize(("answer", "truth"), EQUAL)
def test_equal_answers_are_paid(answer, truth):
    assert same_answer(answer, truth) is True


@pytest.mark.parametrize(("answer", "truth"), DIFFERENT)
def test_different_answers_are_not_paid(answer, truth):
    assert same_answer(answer, truth) is not True


@pytest.mark.parametrize(("mode", "response", "truth", "format_ok", "correct"), RESPONSES)
def test_responses_are_read_as_the_mode_says(mode, response, truth, format_ok, correct):
    verdict = Grader(mode).verdict(response, truth)
    assert (verdict.format_ok, verdict.correct) == (format_ok, correct), verdict


def test_shared_cases_all_get_the_expected_verdict(shared_data):
    lines = (shared_data / "grader_cases.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 56
    for case in map(json.loads, lines):
        verdict = Grader("pair" if case["mode"] == "robust" else case["mode"]).verdict(case["response"], case["truth"])
        assert verdict.correct is case["expected"], case["id"]
        assert case["format_ok"] in (None, verdict.format_ok), case["id"]
        assert case["extract"] in (None, verdict.answer), case["id"]


def test_gsm8k_solutions_are_right_and_their_neighbours_wrong(shared_data):
    rows = [json.loads(line) for line in (shared_data / "gsm8k" / "test.jsonl").read_text("utf-8").splitlines()]
    truths = [row["answer"].rpartition("####")[2].strip() for row in rows]
    grader = Grader("gsm8k")
    assert all(verdict.correct for verdict in grader.verdicts([row["answer"] for row in rows], truths))
    others = [str(int(truth.replace(",", "")) + 1) for truth in truths]
    assert not any(verdict.correct for verdict in grader.verdicts([row["answer"] for row in rows], others))


def hostile_texts():
    """Texts that have made graders hang, overflow or run quadratically."""
    yield "tower", "9**9**9**9"
    yield "latex tower", "9^{9^{9^{9^{9}}}}"
    yield "factorial", "(10^{100000})!"
    yield "factorials", "9!!!!!!!!"
    yield "power of a sum", "(x+y+z+w)^{64}"
    yield "product of powers", "*".join(f"(x_{i}+y_{i}+1)^{{30}}" for i in range(12))
    yield "trigonometry", "\\sin(x)^{50}+\\cos(x)^{50}-\\tan(x)^{49}"
    yield "big root", "\\sqrt{" + "7" * 90 + "}"
    yield "open braces", "{" * 50_000
    yield "open boxes", "\\boxed{" * 20_000
    yield "nested boxes", "\\boxed{" * 5_000 + "5" + "}" * 5_000
    yield "open fractions", "\\frac{" * 10_000
    yield "nested fractions", "\\frac{1}{" * 500 + "2" + "}" * 500
    yield "think tags", "<think>" * 50_000
    yield "answer tags", "</think> <answer>" * 10_000
    yield "parentheses", "(" * 900 + "5" + ")" * 900
    yield "minus signs", "-" * 1_900 + "5"
    yield "commas", "1," * 900
    yield "thousands", "1" + ",000" * 490
    yield "long number", "9" * 100_000
    yield "100 kB of LaTeX", "\\frac{x^{2}+1}{\\sqrt{y}}+" * 4_200
    yield "100 kB in a box", "\\boxed{" + "\\frac{x}{y}+" * 9_000 + "1}"
    yield "spaces", " " * 100_000
    yield "a word", "a" * 100_000
    yield "relations", "x=" * 900 + "1"
    yield "bars", "|" * 1_900
    yield "ligatures", "\ufdfa" * 1_900
    yield "plus minus", "\\pm 1" * 300
    yield "and", "1 and " * 300 + "1"
    yield "matrix", "\\begin{pmatrix}" + "1&" * 450 + "1\\end{pmatrix}"
    yield "nul", "72\x00" * 1_000
    yield "surrogate", "\ud800\udfff" * 500
    yield "dollars", "$" * 1_999
    yield "stars", "*" * 1_999
    yield "text wrappers", "\\text{" * 330
    yield "units", "5 " + "cm " * 600
    yield "superscripts", "2" + "⁹" * 1_900
    yield (
        "sets of sets",
        "\\{" + ",".join("\\{" + ",".join(map(str, range(i, i + 16))) + "\\}" for i in range(16)) + "\\}",
    )
    yield "lists of roots", ",".join(f"\\sqrt{{{i}+\\sqrt{{{i}x+\\sin(x+{i})}}}}" for i in range(16))
    yield "powers in a list", ",".join(f"(x_{i}+y+z+{i})^{{9}}(x+y+{i})^{{9}}" for i in range(16))
    yield "exponent", "1e" + "9" * 1_900


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "text"), list(hostile_texts()), ids=[name for name, _ in hostile_texts()])
def test_hostile_text_gets_a_verdict_within_bounded_work(name, text, mode):
    wrapped = {
        "answer_tag": f"</think> <answer>{text}</answer>",
        "gsm8k": f"#### {text}",
        "boxed": f"\\boxed{{{text}}}",
    }
    for response in {text, wrapped.get(mode, text)}:
        for truth in ("\\frac{11}{2}", "x^2+1", "(1, 2)", text):
            start = time.process_time()
            verdict = Grader(mode).verdict(response, truth)
            assert time.process_time() - start < MAX_CPU_S
            assert verdict.reason in ("equal", "different", "no answer", "undecided"), verdict
            assert truth == text or not verdict.correct


def test_lists_of_hard_parts_share_one_budget():
    """16 parts against the same parts in another order and spelling: 256 comparisons, 6 s without the budget."""
    parts = [f"(x_{i}+y+z+{i})^{{9}}(x+y+{i})^{{9}}" for i in range(16)]
    start = time.process_time()
    assert same_answer(",".join(parts), ",".join(part.replace("+y", "+1y") for part in reversed(parts))) is False
    assert time.process_time() - start < MAX_CPU_S
    assert same_answer(",".join(parts[:2]), f"{parts[1]}, {parts[0]}") is True


@pytest.mark.parametrize("response", [None, 72, 7.5, b"72", ["72"], {"a": 1}])
def test_what_is_no_text_earns_nothing(response):
    verdict = Grader("pair").verdict(response, "72")
    assert not verdict.correct and verdict.reason == "not text"


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), max_size=30).map("".join),
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
)
@example("\\frac{\\frac", "\\frac")
@example("1/0", "1/0")
def test_no_text_of_answer_pieces_raises(response, truth):
    for mode in MODES:
        for rules in ("exact", "drgrpo"):
            reason = Grader(mode, rules).verdict(response, truth).reason
            assert reason in ("equal", "different", "no answer", "undecided"), reason


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=80), st.text(max_size=20))
def test_no_text_at_all_raises(response, truth):
    assert Grader("pair").verdict(response, truth).reason in ("equal", "different", "no answer", "undecided")
    assert Grader("boxed", "drgrpo").verdict(response, truth).reason in ("equal", "different", "no answer")


@settings(max_examples=200, deadline=None)
@given(st.integers(-(10**12), 10**12), st.integers(1, 10**6), st.integers(-(10**12), 10**12))
def test_rationals_are_equal_exactly_when_their_values_are(top, bottom, other):
    value = Fraction(top, bottom)
    assert parse_rational(f"{top}/{bottom}").value == value
    assert same_answer(f"\\frac{{{3 * top}}}{{{3 * bottom}}}", f"{top}/{bottom}") is True
    assert same_answer(f"{top}/{bottom}", f"{other}/{bottom}") is (top == other)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-9, 9), min_size=1, max_size=4), st.integers(-9, 9))
def test_products_of_roots_equal_their_expansion(roots, shift):
    product = "".join(f"(x-({root}))" for root in roots)
    coefficients = [1]
    for root in roots:
        shifted, scaled = [*coefficients, 0], [0, *(-root * c for c in coefficients)]
        coefficients = [a + b for a, b in zip(shifted, scaled, strict=True)]
    expanded = "+".join(f"({c})x^{{{len(coefficients) - 1 - k}}}" for k, c in enumerate(coefficients))
    assert same_answer(product, expanded) is True
    assert same_answer(product, f"{expanded}+({shift})") is (shift == 0)


def test_a_format_alone_earns_nothing_and_an_answer_needs_its_format():
    responses = [
        "a </think> <answer>73</answer>",
        "a </think> <answer>72</answer> bye",
        "a </think> <answer>72</answer>",
    ]
    rewards = Grader().rewards(responses, ["72"] * 3)
    assert rewards[0] == {"format_reward": 1.0, "answer_reward": 0.0, "reward": 0.0}
    assert rewards[1] == {"format_reward": 0.0, "answer_reward": 1.0, "reward": 0.0}
    assert rewards[2] == {"format_reward": 1.0, "answer_reward": 1.0, "reward": 1.0}


def test_several_truths_and_numbers_as_truths():
    grader = Grader("pair")
    assert grader.verdict("0.5", ["half", "1/2"]).correct
    assert grader.verdict("72", 72).correct and grader.verdict("7.5", 7.5).correct
    assert not grader.verdict("72", []).correct


def test_counts_name_the_reasons():
    grader = Grader("pair")
    grader.verdicts(["72", "73", None], ["72"] * 3)
    assert grader.counts == {"equal": 1, "different": 1, "not text": 1}


def test_wrong_arguments_are_refused():
    with pytest.raises(UserError, match="mode='x'"):
        Grader("x")
    with pytest.raises(UserError, match="2 responses and 1 truths"):
        Grader().verdicts(["a", "b"], ["1"])


def test_cut_keeps_the_text_round_the_last_marker():
    text = "x" * 200_000 + "#### 72" + "y" * 200_000
    assert len(cut(text)) == 65_536 and "#### 72" in cut(text)
    assert extract("\\boxed{5}" + "z" * 200_000, "boxed").answer == "5"


def test_boxes_are_found_with_their_braces():
    assert boxes("\\boxed{a{b}c} and \\fbox{d}") == ["a{b}c", "d"]
    assert boxes("\\boxed{a") is None
    assert boxes("\\boxed{\\}}") == ["\\}"]
    assert last_boxed("\\boxed{1} \\boxed{\\boxed{2}}") == "2"


def test_number_limits_are_enforced():
    assert parse_rational("1e400").value == 10**400
    assert parse_rational("1e401") is None and parse_rational("1e-401") is None
    assert parse_rational("9" * 400) is not None and parse_rational("9" * 401) is None


def test_parser_limits_are_enforced():
    with pytest.raises(NotParsed, match="deeper"):
        parse_expression("(" * (MAX_DEPTH + 1) + "x" + ")" * (MAX_DEPTH + 1))
    with pytest.raises(NotParsed, match="tokens"):
        parse_expression("+".join("x" * 200))


def test_workers_decide_what_this_process_does_not_read():
    pytest.importorskip("math_verify")
    pairs = [
        ("\\int_0^1 x\\,dx", "1/2"),
        ("\\sum_{n=1}^{10} n", "55"),
        ("\\lim_{x\\to 0}\\frac{\\sin x}{x}", "2"),
        ("72", "72"),
    ]
    responses, truths = [a for a, _ in pairs], [b for _, b in pairs]
    assert [v.correct for v in Grader("pair").verdicts(responses, truths)] == [False, False, False, True]
    with Grader("pair", num_workers=2, timeout_s=60.0) as grader:
        assert [v.correct for v in grader.verdicts(responses, truths)] == [True, True, False, True]
        assert grader.pool.threads is not None
        assert not grader.verdict("\\int_0^1 x^2 dx", "0.333333").correct
        assert grader.verdict("\\int_0^1 x^2 dx", "1/3").correct


def test_a_worker_that_hangs_is_killed_and_replaced_off_the_main_thread(tmp_path):
    pytest.importorskip("math_verify")
    results = []

    def grade():
        with Grader("pair", num_workers=1, timeout_s=0.5) as grader:
            hangs = "\\sum_{n=1}^{10^{9}} \\sin(n^2)^{\\cos(n)}"
            first = grader.verdict(hangs, "\\int_0^1 \\sin(x^{x})^{x} dx")
            killed = grader.pool.workers[0].process is None
            grader.pool.workers[0].timeout_s = 60.0
            results.extend([first, killed, grader.verdict("\\int_0^1 x dx", "1/2")])

    thread = threading.Thread(target=grade)
    thread.start()
    thread.join(300.0)
    first, killed, second = results
    assert not first.correct and first.reason == "timeout" and killed
    assert second.correct


def test_a_worker_that_died_is_replaced_and_one_that_cannot_start_is_given_up(monkeypatch):
    pytest.importorskip("math_verify")
    with Grader("pair", num_workers=1, timeout_s=60.0) as grader:
        question = ("\\int_0^1 x dx", "1/2")
        assert grader.verdict(*question).correct
        worker = grader.pool.workers[0]
        assert os.getpgid(worker.process.pid) != os.getpgid(0), "Ctrl-C would end it with the batch in hand ungraded"
        worker.process.kill()
        worker.process.wait()
        assert grader.verdict(*question).reason == "worker died"
        assert grader.verdict(*question).correct
        worker.kill()
        monkeypatch.setattr("alignment.drgrpo_grader_worker.BOOT", "raise SystemExit(1)")
        assert grader.verdict(*question).reason == "no worker" and worker.is_broken
        monkeypatch.undo()
        assert grader.verdict(*question).reason == "no worker"


def test_workers_without_their_package_are_refused_at_once(monkeypatch):
    monkeypatch.setattr("alignment.drgrpo_grader_worker.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install -e '.\[align\]'"):
        Grader("pair", num_workers=1)


def test_model_text_is_never_executed(tmp_path):
    pytest.importorskip("math_verify")
    mark = tmp_path / "executed"
    attack = f"__import__('os').system('touch {mark}')"
    with Grader("pair", num_workers=1, timeout_s=60.0) as grader:
        for text in (attack, f"\\sum {attack}", f"\\text{{{attack}}}", f"\\int {attack} dx"):
            assert not grader.verdict(text, "\\int x dx").correct
    assert not mark.exists()
