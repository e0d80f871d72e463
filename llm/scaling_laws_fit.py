"""L(N, D) = E + A / N^alpha + B / D^beta, fitted to losses of small runs (Hoffmann et al. 2022, approach 3).

N parameters that a token is multiplied by, D training tokens, losses in nats a token. As there, the Huber loss of the
logarithms' difference is minimised by L-BFGS from many starts; E, A and B are exponentials, so they stay positive.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from configs.errors import UserError

HUBER_DELTA = 1e-3  # Hoffmann's: beyond it a point pulls with a constant force, so early, odd points weigh little
NUM_STARTS = 4  # of the grid's points, the best ones
MIN_RUNS, MIN_POINTS = 3, 8


@dataclass(frozen=True)
class Point:
    """One validation of one run."""

    run: str
    parameters: float
    tokens: float
    loss: float


@dataclass(frozen=True)
class ScalingLaw:
    """The five numbers of the law; E is the loss that no model and no amount of this data goes below."""

    E: float
    A: float
    alpha: float
    B: float
    beta: float

    def loss(self, parameters: np.ndarray | float, tokens: np.ndarray | float) -> np.ndarray | float:
        return self.E + self.A * parameters**-self.alpha + self.B * tokens**-self.beta

    def best_parameters(self, flops: np.ndarray | float) -> np.ndarray | float:
        """N of least loss for a budget of C = 6 N D FLOPs: G (C / 6)^(beta / (alpha + beta))."""
        total = self.alpha + self.beta
        factor = (self.alpha * self.A / (self.beta * self.B)) ** (1.0 / total)
        return factor * (flops / 6.0) ** (self.beta / total)


@dataclass(frozen=True)
class Fit:
    """A law, how far the points lie from it, and what it is without each of the runs."""

    law: ScalingLaw
    points: list[Point]
    errors: np.ndarray  # (points,) log of measured loss / predicted loss
    without: dict[str, ScalingLaw]

    def spread(self, name: str) -> tuple[float, float]:
        """The lowest and highest value of one of the five numbers over the fits that leave a run out."""
        values = [getattr(law, name) for law in self.without.values()]
        return min(values), max(values)


def fit_law(points: Sequence[Point], near: ScalingLaw | None = None) -> ScalingLaw:
    """The law of least Huber loss; UserError for fewer runs or points than the five numbers need.

    `near` is a law that is known to be close, in place of starts from a grid.
    """
    runs = {point.run for point in points}
    sizes = {point.parameters for point in points}
    if len(sizes) < MIN_RUNS or len(points) < MIN_POINTS:
        raise UserError(
            f"{len(points)} validations of {len(runs)} runs with {len(sizes)} sizes cannot settle five numbers; "
            f"give at least {MIN_RUNS} sizes and {MIN_POINTS} validations"
        )
    columns = np.array([(point.parameters, point.tokens, point.loss) for point in points])
    logs = torch.from_numpy(np.log(columns))  # (points, 3)
    starts = torch.tensor(start_grid(logs) if near is None else [as_numbers(near)], dtype=torch.float64)  # (starts, 5)
    order = objective(starts, logs).argsort()[:NUM_STARTS]
    best = min((descend(starts[i].clone(), logs) for i in order), key=lambda found: found[1])[0]
    log_e, log_a, alpha, log_b, beta = best.tolist()
    return ScalingLaw(float(np.exp(log_e)), float(np.exp(log_a)), alpha, float(np.exp(log_b)), beta)


def as_numbers(law: ScalingLaw) -> tuple[float, ...]:
    """(log E, log A, alpha, log B, beta), what is fitted."""
    return float(np.log(law.E)), float(np.log(law.A)), law.alpha, float(np.log(law.B)), law.beta


def start_grid(logs: Tensor) -> list[tuple[float, ...]]:
    """Starts (log E, log A, alpha, log B, beta): each term is given a share of the lowest loss at the middle point."""
    log_n, log_d = logs[:, 0].mean().item(), logs[:, 1].mean().item()
    lowest = logs[:, 2].min().item()
    shares, powers = (-0.2, -0.7, -1.5), (0.1, 0.3, 0.5, 0.8)
    return [
        (lowest + e, lowest + a + alpha * log_n, alpha, lowest + b + beta * log_d, beta)
        for e, a, b, alpha, beta in itertools.product(shares, shares, shares, powers, powers)
    ]


def objective(numbers: Tensor, logs: Tensor) -> Tensor:
    """Mean Huber loss of numbers (..., 5) over points (points, 3): (...)."""
    log_e, log_a, alpha, log_b, beta = (number[..., None] for number in numbers.unbind(-1))
    log_n, log_d, log_loss = logs.T
    terms = torch.stack(torch.broadcast_tensors(log_e, log_a - alpha * log_n, log_b - beta * log_d))
    error = torch.logsumexp(terms, dim=0) - log_loss  # (..., points)
    return torch.nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none", delta=HUBER_DELTA).mean(-1)


def descend(start: Tensor, logs: Tensor) -> tuple[Tensor, float]:
    """L-BFGS from one start: the numbers (5,) and the objective there, infinite if it left the finite numbers."""
    numbers = start.requires_grad_()
    # The objective is about delta^2, far below the tolerances that suit a loss near 1.
    options = dict(max_iter=500, max_eval=1000, tolerance_grad=1e-12, tolerance_change=1e-16)
    optimizer = torch.optim.LBFGS([numbers], line_search_fn="strong_wolfe", history_size=20, **options)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = objective(numbers, logs) / HUBER_DELTA
        value.backward()
        return value

    optimizer.step(closure)
    value = objective(numbers.detach(), logs).item()
    return numbers.detach(), value if np.isfinite(value) else float("inf")


def fit(points: Sequence[Point]) -> Fit:
    """The law, its errors, and the laws without each run in turn, as far as what is left can settle one."""
    law = fit_law(points)
    errors = np.array([np.log(point.loss / law.loss(point.parameters, point.tokens)) for point in points])
    runs = sorted({point.run for point in points})
    without = {}
    for run in runs:
        rest = [point for point in points if point.run != run]
        if len({point.parameters for point in rest}) >= MIN_RUNS and len(rest) >= MIN_POINTS:
            without[run] = fit_law(rest, near=law)
    return Fit(law, list(points), errors, without)


@dataclass(frozen=True)
class HeldOut:
    """The largest model's last loss, predicted by the law of the smaller ones."""

    point: Point
    predicted: float

    @property
    def ratio(self) -> float:
        return self.point.loss / self.predicted


def held_out(found: Fit) -> HeldOut | None:
    """None where the law of the smaller models could not be fitted."""
    largest = max(point.parameters for point in found.points)
    last = max((point for point in found.points if point.parameters == largest), key=lambda point: point.tokens)
    law = found.without.get(last.run)
    return None if law is None else HeldOut(replace(last), float(law.loss(last.parameters, last.tokens)))
