"""From graded answers to the figures of an evaluation, each with its 95% interval."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from alignment.evaluate_answers import Answer, group_answers
from alignment.evaluate_statistics import bootstrap_interval, majority_at_k, paired_difference, pass_at_k
from alignment.intervals import wilson_interval


@dataclass(frozen=True)
class Figure:
    """One quantity: its mean over problems, the interval, and what the interval is made by."""

    name: str
    value: float
    low: float
    high: float
    method: str  # "wilson" or "bootstrap"

    def fields(self) -> dict[str, Any]:
        return asdict(self)


def summarise(problems: list[list[Answer]], ks: list[int], seed: int) -> list[Figure]:
    """All figures of an evaluation; `problems` holds the samples of each problem, equally many."""
    num_samples = len(problems[0])
    figures = [share("accuracy", problems, lambda one: one.is_paid, seed)]
    figures.append(share("right answer, any form", problems, lambda one: one.correct, seed))
    figures.append(share("right form", problems, lambda one: one.format_ok, seed))
    ks = ks if num_samples > 1 else []  # of one sample pass@1 is the accuracy
    for k in ks:
        values = [pass_at_k(num_samples, sum(one.is_paid for one in answers), k) for answers in problems]
        figures.append(mean_figure(f"pass@{k}", values, seed))
    for k in ks:
        if k > 1:
            figures.append(mean_figure(f"maj@{k}", majority_values(problems, k, seed), seed))
    figures.append(
        mean_figure("response tokens", [mean_of(answers, lambda one: one.tokens) for answers in problems], seed)
    )
    figures.append(share("cut at the limit", problems, lambda one: one.is_cut, seed))
    return figures


def majority_values(problems: list[list[Answer]], k: int, seed: int) -> list[float]:
    """maj@k of each problem; only well-formed answers vote, as only they are paid."""
    values = []
    for answers in problems:
        groups = [group if one.format_ok else None for group, one in zip(group_answers(answers), answers, strict=True)]
        values.append(majority_at_k(groups, [one.is_paid for one in answers], k, seed))
    return values


def mean_of(answers: list[Answer], value: Callable[[Answer], float]) -> float:
    return sum(value(one) for one in answers) / len(answers)


def share(name: str, problems: list[list[Answer]], holds: Callable[[Answer], bool], seed: int) -> Figure:
    """The share of samples with a property: Wilson's interval for one sample a problem, else over problems."""
    if len(problems[0]) > 1:
        return mean_figure(name, [mean_of(answers, holds) for answers in problems], seed)
    count = sum(holds(answers[0]) for answers in problems)
    return Figure(name, count / len(problems), *wilson_interval(count, len(problems)), "wilson")


def mean_figure(name: str, values: list[float], seed: int) -> Figure:
    """The mean over problems; where every problem has 0, or every one 1, resampling would see no doubt: Wilson's."""
    if set(values) in ({0.0}, {1.0}) and not name.endswith("tokens"):
        return Figure(name, values[0], *wilson_interval(int(sum(values)), len(values)), "wilson")
    return Figure(name, sum(values) / len(values), *bootstrap_interval(values, seed=seed), "bootstrap")


def by_source(problems: list[list[Answer]], seed: int) -> dict[str, Figure]:
    """The accuracy on each source of problems."""
    sources = sorted({answers[0].source for answers in problems})
    return {
        source: share(
            "accuracy", [answers for answers in problems if answers[0].source == source], lambda one: one.is_paid, seed
        )
        for source in sources
    }


def against(problems: list[list[Answer]], baseline: list[list[Answer]], seed: int) -> Figure:
    """The gain in accuracy over another evaluation, on the problems that both have; UserError is the caller's."""
    theirs = {answers[0].id: mean_of(answers, lambda one: one.is_paid) for answers in baseline}
    both = [answers for answers in problems if answers[0].id in theirs]
    ours = [mean_of(answers, lambda one: one.is_paid) for answers in both]
    gain, low, high = paired_difference(ours, [theirs[answers[0].id] for answers in both], seed=seed)
    return Figure(f"gain over the baseline, {len(both)} problems", gain, low, high, "bootstrap")
