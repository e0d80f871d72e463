"""Verifiable rewards: find the answer in a response and compare it with the truth. Never raises on text, never hangs.

    with Grader(mode="answer_tag", num_workers=2) as grader:
        grader.rewards(["5 + 3 = 8 </think> <answer> 8 </answer>"], ["8"])   # [{"format_reward": 1.0, ...}]

Named after the grader of Dr. GRPO (Liu et al. 2025), whose verdicts `rules="drgrpo"` gives (drgrpo_grader_compat.py);
the default rules are our own and are written down in docs/grading.md. The stages of a verdict: cut the text, find the
answer, compare exactly in this process with bounded work, and only for LaTeX that remains unread ask a worker process
that is killed after `timeout_s`. Without workers such answers count as wrong.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alignment.drgrpo_grader_compare import same_answer
from alignment.drgrpo_grader_compat import extract_drgrpo, same_answer_drgrpo
from alignment.drgrpo_grader_extract import MODES, Extraction, extract
from alignment.drgrpo_grader_worker import WorkerPool
from configs.errors import UserError, check_choice

Truth = str | int | float | Sequence[str]
RULES = ("exact", "drgrpo")


@dataclass(frozen=True)
class Verdict:
    """What the grader saw.

    correct: the answer is right, whatever the format. reason: equal, different, no answer, undecided (unread LaTeX and
    no worker), timeout, not text, or the name of an error.
    """

    format_ok: bool
    correct: bool
    answer: str | None
    reason: str

    def rewards(self) -> dict[str, float]:
        """`reward` pays a right answer in the right format; a format alone earns nothing in it."""
        return {
            "format_reward": float(self.format_ok),
            "answer_reward": float(self.correct),
            "reward": float(self.format_ok and self.correct),
        }


class Grader:
    """Grades responses of one mode; `counts` holds how often each reason was given. Close it, or use `with`."""

    def __init__(self, mode: str = "answer_tag", rules: str = "exact", num_workers: int = 0, timeout_s: float = 1.0):
        check_choice("mode", mode, MODES)
        check_choice("rules", rules, RULES)
        self.mode = mode
        self.rules = rules
        self.pool = WorkerPool(num_workers, timeout_s) if num_workers else None
        self.counts: Counter = Counter()

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()

    def rewards(self, responses: Sequence[Any], truths: Sequence[Truth]) -> list[dict[str, float]]:
        """format_reward, answer_reward and reward of each response, in order."""
        return [verdict.rewards() for verdict in self.verdicts(responses, truths)]

    def verdicts(self, responses: Sequence[Any], truths: Sequence[Truth]) -> list[Verdict]:
        """A verdict for each response; UserError when there are not as many truths as responses."""
        if len(responses) != len(truths):
            raise UserError(f"{len(responses)} responses and {len(truths)} truths; give one truth for each response")
        first = [self.first_look(response, truth) for response, truth in zip(responses, truths, strict=True)]
        self.decide_undecided(first, truths)
        verdicts = [verdict for verdict, _ in first]
        self.counts.update(verdict.reason for verdict in verdicts)
        return verdicts

    def verdict(self, response: Any, truth: Truth) -> Verdict:
        return self.verdicts([response], [truth])[0]

    def first_look(self, response: Any, truth: Truth) -> tuple[Verdict, list[str]]:
        """The verdict of this process, and the truths that it could not decide about."""
        if not isinstance(response, str):
            return Verdict(False, False, None, "not text"), []
        try:
            found = extract_drgrpo(response, self.mode) if self.rules == "drgrpo" else extract(response, self.mode)
            if found.answer is None:
                return Verdict(found.format_ok, False, None, "no answer"), []
            return self.look_at(found, truths_of(truth))
        except Exception as error:  # a fault of ours must not end a training run; it is counted by name
            return Verdict(False, False, None, type(error).__name__), []

    def look_at(self, found: Extraction, truths: list[str]) -> tuple[Verdict, list[str]]:
        same = same_answer_drgrpo if self.rules == "drgrpo" else same_answer
        undecided = []
        for truth in truths:
            answer_is_right = same(found.answer, truth)
            if answer_is_right:
                return Verdict(found.format_ok, True, found.answer, "equal"), []
            if answer_is_right is None:
                undecided.append(truth)
        reason = "undecided" if undecided else "different"
        return Verdict(found.format_ok, False, found.answer, reason), undecided

    def decide_undecided(self, first: list[tuple[Verdict, list[str]]], truths: Sequence[Truth]) -> None:
        """Ask the workers, in place, about everything that the first look left open."""
        if self.pool is None:
            return
        questions = [(row, truth) for row, (_, undecided) in enumerate(first) for truth in undecided]
        replies = self.pool.ask_all([(first[row][0].answer, truth) for row, truth in questions])
        for (row, _), reply in zip(questions, replies, strict=True):
            verdict = first[row][0]
            if verdict.correct:
                continue
            reason = {True: "equal", False: "different"}.get(reply, reply)
            first[row] = (Verdict(verdict.format_ok, reply is True, verdict.answer, reason), [])


def truths_of(truth: Truth) -> list[str]:
    """One or several true answers as text."""
    if isinstance(truth, str | int | float):
        return [str(truth)]
    return [str(one) for one in truth]
