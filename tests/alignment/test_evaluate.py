"""Evaluation: estimators against enumeration, intervals that cover, and the script end to end on a tiny model."""

import itertools
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest

from alignment.drgrpo_grader import Grader
from alignment.evaluate import AlignmentEvaluateConfig, run_evaluation
from alignment.evaluate_answers import Answer, Asking, Examinee, answer_all, group_answers, read_answers
from alignment.evaluate_report import build_page
from alignment.evaluate_statistics import bootstrap_interval, majority_at_k, paired_difference, pass_at_k
from alignment.evaluate_summary import against, by_source, summarise
from alignment.problem import Problem
from alignment.r1_prompt import TEMPLATES, PromptFormat
from configs.errors import UserError
from configs.loader import compose_config
from configs.run_dir import RunDir
from llm.engine_request import Completion
from parallel.mesh import init_mesh
from tests.alignment.rl_start import rl_start
from tests.parallel.pool import run_ranks
from tests.tolerances import BOOTSTRAP_COVERAGE, FP64


def test_pass_at_k_equals_enumeration_of_all_subsets():
    for n, c in [(8, 3), (5, 0), (5, 5), (6, 1), (7, 4)]:
        right = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(right, k))
            expected = sum(any(subset) for subset in subsets) / len(subsets)
            assert abs(pass_at_k(n, c, k) - expected) < FP64
    assert round(pass_at_k(8, 3, 4), 6) == 0.928571 and pass_at_k(8, 3, 1) == 0.375
    assert abs(pass_at_k(100_000, 1, 10) - 1e-4) < FP64


def test_pass_at_k_is_not_any_of_the_first_k():
    right = [True, False, False, False]
    assert pass_at_k(4, sum(right), 1) == 0.25 != float(any(right[:1]))


def test_majority_at_k_equals_its_definition():
    groups, right = [0, 0, 1, None, 1, 2], [True, True, False, False, False, False]
    assert majority_at_k(groups, right, 1) == pytest.approx(2 / 6, abs=FP64)  # one vote: pass@1
    assert majority_at_k(groups, right, 6) == pytest.approx(1 / 2, abs=FP64)  # 0 and 1 tie
    assert majority_at_k([None, None], [False, False], 2) == 0.0
    assert majority_at_k([0, 0, 1], [True, True, False], 3) == 1.0
    assert majority_at_k([0, 1, 1], [True, False, False], 3) == 0.0


def test_majority_at_k_by_drawn_subsets_is_near_all_of_them():
    rng = random.Random(0)
    groups = [rng.randrange(4) for _ in range(24)]
    right = [group == 0 for group in groups]
    assert math.comb(24, 8) > 500
    first, again = (majority_at_k(groups, right, 8, seed=3) for _ in range(2))
    assert first == again
    exact = np.mean([majority_at_k([groups[i] for i in s], [right[i] for i in s], 8) for s in subsets_of(24, 8, 4_000)])
    assert abs(first - exact) < 5 * math.sqrt(0.25 / 500)


def subsets_of(n: int, k: int, count: int):
    rng = np.random.default_rng(9)
    return [rng.choice(n, k, replace=False) for _ in range(count)]


def test_bootstrap_interval_covers_the_mean_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        low, high = bootstrap_interval(rng.random(80) ** 2, draws=400, seed=trial)
        covered += low <= 1 / 3 <= high
    assert abs(covered / 200 - 0.95) < BOOTSTRAP_COVERAGE
    assert bootstrap_interval([], seed=1) == (0.0, 1.0)
    assert bootstrap_interval([0.5] * 10) == (0.5, 0.5)


def test_paired_difference_is_narrower_than_two_intervals():
    rng = np.random.default_rng(1)
    hardness = rng.random(200)
    ours, theirs = hardness + 0.05 + 0.01 * rng.random(200), hardness
    gain, low, high = paired_difference(ours, theirs)
    assert low < gain < high and abs(gain - 0.055) < 0.005
    unpaired = bootstrap_interval(ours)
    assert high - low < 0.1 * (unpaired[1] - unpaired[0])


def answer_of(row: int, sample: int, answer: str | None, truth: str = "72", **changes) -> Answer:
    correct = answer is not None and Grader("pair").verdict(answer, truth).correct
    fields = dict(
        row=row, sample=sample, id=f"p{row}", source=f"s{row % 2}", truth=truth, response=f"r {answer}", answer=answer,
        correct=correct, format_ok=answer is not None, reason="equal" if correct else "different", prompt_tokens=5,
        tokens=4 + sample, is_cut=answer is None,
    )  # fmt: skip
    return Answer(**fields | changes)


PROBLEMS = [
    [answer_of(0, 0, "72"), answer_of(0, 1, "72.0"), answer_of(0, 2, "5"), answer_of(0, 3, None)],
    [answer_of(1, 0, "1"), answer_of(1, 1, "1"), answer_of(1, 2, "72"), answer_of(1, 3, "72", format_ok=False)],
]


def test_summary_counts_what_is_paid():
    figures = {figure.name: figure for figure in summarise(PROBLEMS, [1, 2, 4], seed=0)}
    assert figures["accuracy"].value == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert figures["right answer, any form"].value == pytest.approx((2 / 4 + 2 / 4) / 2)
    assert figures["right form"].value == pytest.approx(6 / 8)
    assert figures["pass@1"].value == figures["accuracy"].value and figures["pass@4"].value == 1.0
    assert figures["maj@4"].value == pytest.approx((1 + 0) / 2)  # 72 and 72.0 are one answer; 1 wins in the second
    assert figures["response tokens"].value == 5.5
    assert figures["cut at the limit"].value == pytest.approx(1 / 8)
    assert figures["pass@4"].method == "wilson" and figures["pass@4"].low < 1  # no false certainty at 100%
    assert group_answers(PROBLEMS[0]) == [0, 0, 1, None]


def test_one_sample_a_problem_has_wilson_intervals():
    problems = [[answer_of(row, 0, "72" if row < 3 else "5")] for row in range(10)]
    accuracy = summarise(problems, [1], seed=0)[0]
    assert accuracy.method == "wilson" and accuracy.value == 0.3
    assert (accuracy.low, accuracy.high) == pytest.approx((0.1077913, 0.6032219), abs=1e-6)
    assert by_source(problems, 0)["s0"].value == pytest.approx(2 / 5)


def test_gain_over_a_baseline_pairs_by_id():
    ours = [[answer_of(row, 0, "72")] for row in range(6)]
    theirs = [[answer_of(row, 0, "72" if row < 2 else "5")] for row in range(5)]
    gain = against(ours, theirs, seed=0)
    assert gain.value == pytest.approx(3 / 5) and "5 problems" in gain.name


class ScriptedEngine:
    """Answers a prompt by what its request's index says, so that any batching gives the same."""

    weight_version = 0

    def __init__(self, stop_after: int | None = None):
        self.asked, self.stop_after = [], stop_after

    def generate(self, prompts, params):
        if self.stop_after is not None and len(self.asked) >= self.stop_after:
            raise KeyboardInterrupt
        self.asked += [one.index for one in params]
        texts = [f"so </think> <answer>{one.index % 3 + 71}" for one in params]
        return [
            Completion(prompt, [7, 8], [-1.0] * 2, [1.0] * 2, [0] * 2, text, "stop")
            for prompt, text in zip(prompts, texts, strict=True)
        ]

    def load_weights(self, tensors, version):
        raise AssertionError("an evaluation loads no weights")


def ask_all(engine: ScriptedEngine, path, requests_at_once: int, mesh=None) -> list:
    problems = [Problem(f"p{i}", "q", "72", "s") for i in range(7)]
    fmt = PromptFormat("r1_short", TEMPLATES["r1_short"], 0, 0)
    asking = Asking(3, 8, 1.0, 1.0, 5, True, requests_at_once)
    run_dir = RunDir(path)
    run_dir.create()
    mesh = mesh or init_mesh("cpu")
    return list(answer_all(Examinee(engine, [[1]] * 7, fmt), problems, asking, Grader(fmt.mode), run_dir, mesh))


def test_a_killed_evaluation_goes_on_and_ends_with_the_same_lines(tmp_path):
    whole = ask_all(ScriptedEngine(), tmp_path / "whole", 21)
    assert [count for count, _ in whole] == [21]
    with pytest.raises(KeyboardInterrupt):
        ask_all(ScriptedEngine(stop_after=8), tmp_path / "cut", 4)
    path = tmp_path / "cut" / "answers.jsonl"
    path.write_text(path.read_text() + '{"row": 2, "sam')  # a line that the kill cut in half
    engine = ScriptedEngine()
    ask_all(engine, tmp_path / "cut", 5)
    assert engine.asked == list(range(8, 21))
    assert path.read_text() == (tmp_path / "whole" / "answers.jsonl").read_text()
    answers = read_answers(RunDir(tmp_path / "cut"))
    assert len(answers) == 7 and all(len(samples) == 3 for samples in answers)
    assert answers[0][1].response.endswith("</answer>") and answers[0][1].is_paid  # the stop string is put back
    assert not answers[0][0].correct


def ask_on_rank(mesh, path: str) -> list[int]:
    engine = ScriptedEngine()
    ask_all(engine, Path(path), 3, mesh)
    return engine.asked


@pytest.mark.dist
def test_ranks_share_the_problems_and_write_the_lines_of_one_process(tmp_path):
    ask_all(ScriptedEngine(), tmp_path / "one", 21)
    asked = run_ranks(ask_on_rank, 2, str(tmp_path / "two"))
    assert sorted(asked[0] + asked[1]) == list(range(21)) and len(asked[0]) == 11
    lines = [(tmp_path / name / "answers.jsonl").read_text() for name in ("one", "two")]
    assert lines[0] == lines[1]


def test_page_escapes_what_a_model_wrote():
    evil = [[answer_of(0, 0, "<script>alert(1)</script>\x1b[2J", response="<img src=x onerror=alert(1)>")]]
    facts = dict(
        name="<b>",
        checkpoint="c",
        device="cpu",
        torch="2",
        commit="x",
        problems=1,
        problems_too_long=0,
        problems_repeated=0,
    )
    figures = [figure.fields() for figure in summarise(evil, [1], 0)]
    page = build_page({"run": facts, "figures": figures, "by_source": {}, "rows": []}, evil)
    assert (
        "<script" not in page
        and "<img" not in page
        and "\x1b" not in page
        and "<b>" not in page.split("<main>")[1][:60]
    )


def config_of(tmp_path, *overrides: str) -> AlignmentEvaluateConfig:
    return compose_config(
        AlignmentEvaluateConfig,
        "alignment_evaluate",
        [
            "name=sums", f"runs_dir={tmp_path}", f"run={rl_start()}", "device=cpu", "data.level=one_digit_sums",
            "data.size=12", "data.split=train", "max_new_tokens=24", "prompt.template=r1_short", "grader_workers=0",
            *overrides,
        ],
    )  # fmt: skip


def test_script_writes_a_run_and_greedy_equals_the_engine_in_any_batch(tmp_path):
    figures = {figure.name: figure for figure in run_evaluation(config_of(tmp_path, "requests_at_once=5"))}
    assert 0 < figures["accuracy"].value <= 1 and figures["right form"].value > 0.5
    report = json.loads((tmp_path / "sums" / "report.json").read_text())
    facts = report["run"]
    assert report["rows"][0]["predicted"] > 0 and facts["problems"] + facts["problems_repeated"] == 12
    assert "accuracy" in (tmp_path / "sums" / "report.html").read_text()
    again = run_evaluation(config_of(tmp_path, "name=other", "requests_at_once=100", f"baseline={tmp_path}/sums"))
    lines = [(tmp_path / name / "answers.jsonl").read_text() for name in ("sums", "other")]
    assert lines[0] == lines[1]
    assert again[-1].name.startswith("gain") and again[-1].value == 0.0


def test_sampled_evaluation_has_different_samples_and_repeats(tmp_path):
    changes = ["num_samples=4", "temperature=1.0", "ks=[1,4]", "data.size=4"]
    run_evaluation(config_of(tmp_path, *changes))
    run_evaluation(config_of(tmp_path, "name=other", *changes))
    lines = [(tmp_path / name / "answers.jsonl").read_text() for name in ("sums", "other")]
    assert lines[0] == lines[1]
    answers = read_answers(RunDir(tmp_path / "sums"))
    assert any(len({one.response for one in samples}) > 1 for samples in answers)


def test_wrong_configs_are_refused(tmp_path):
    with pytest.raises(UserError, match="ks holds 8"):
        config_of(tmp_path, "ks=[8]")
    with pytest.raises(UserError, match="num_samples=4 at temperature=0"):
        config_of(tmp_path, "num_samples=4")
    with pytest.raises(UserError, match="rules='kind'"):
        config_of(tmp_path, "rules=kind")
    run_evaluation(config_of(tmp_path, "data.size=2"))
    with pytest.raises(UserError, match="another config"):
        run_evaluation(config_of(tmp_path, "data.size=3"))
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "config.yaml").write_text("max_steps: 5\n")
    with pytest.raises(UserError, match="another config"):  # a training run's directory is not written over
        run_evaluation(config_of(tmp_path, "name=trained", "data.size=2"))
    assert (tmp_path / "trained" / "config.yaml").read_text() == "max_steps: 5\n"
    with pytest.raises(UserError, match="answers to none of these problems"):
        run_evaluation(config_of(tmp_path, "name=b", "data.size=2", "data.seed=7", f"baseline={tmp_path}/sums"))
    with pytest.raises(UserError, match="max_tokens=63 is less than the shortest prompt"):
        run_evaluation(config_of(tmp_path, "name=c", "data.size=2", "prompt.template=r1_zero"))
