"""Fit a scaling law to small runs, test it on the largest of them, and say what it means for a larger budget.

    python -m llm.scaling_laws 'runs=["runs/scaling-*"]' output=runs/scaling
    python -m llm.scaling_laws 'runs=["runs/scaling-*"]' 'budgets=[1e15,1e18]'

Every validation of every run is a point (llm/scaling_laws_fit.py), so train with a constant learning rate after the
warm-up: under a cosine that ends later, a loss half way is not what a run of that length would have.
"""

import itertools
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import hydra
import numpy as np
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from configs.errors import UserError, check_positive
from configs.loader import CONFIG_DIR, run_script, start_script
from configs.report_numbers import format_quantity
from configs.run_dir import write_json_atomic
from configs.version import git_commit
from llm.figures_scaling import draw_scaling
from llm.figures_style import save
from llm.scaling_laws_fit import Fit, fit, held_out
from llm.scaling_laws_points import expand_runs, read_points


@dataclass
class ScalingConfig:
    """Everything that `python -m llm.scaling_laws` takes."""

    runs: list[str] = field(default_factory=list)  # run directories or globs
    min_tokens: int = 500_000  # validations before so many training tokens are still about the warm-up
    budgets: list[float] = field(default_factory=list)  # FLOPs to say the best size for; empty: around the runs' own
    output: str | None = None  # a directory for scaling_laws.json and the figure

    def __post_init__(self) -> None:
        check_positive(min_tokens=self.min_tokens)
        for budget in self.budgets:
            check_positive(budgets=budget)
        if not self.runs:
            raise UserError("runs=[] leaves nothing to fit; name runs, such as 'runs=[\"runs/scaling-*\"]'")


def fit_runs(config: ScalingConfig) -> dict[str, Any]:
    """Fit, print, and record; returns what scaling_laws.json holds."""
    found = fit(read_points(expand_runs(config.runs), config.min_tokens))
    document = describe(found, config)
    print_fit(found, document)
    if config.output is not None:
        write_json_atomic(Path(config.output) / "scaling_laws.json", document)
        save(draw_scaling(found), Path(config.output) / "scaling_laws")
        print(f"written: {config.output}")
    return document


def describe(found: Fit, config: ScalingConfig) -> dict[str, Any]:
    told = held_out(found)
    compute = [6.0 * point.parameters * point.tokens for point in found.points]
    budgets = config.budgets or [max(compute), 10 * max(compute), 100 * max(compute)]
    law = found.law
    plans = [(budget, float(law.best_parameters(budget))) for budget in budgets]
    return {
        "commit": git_commit(),
        "law": asdict(law),
        "spread": {name: found.spread(name) for name in asdict(law)} if found.without else {},
        "rms_error": float(np.sqrt(np.mean(found.errors**2))),
        "largest_error": float(np.abs(found.errors).max()),
        "held_out": None if told is None else {"run": told.point.run, "predicted": told.predicted,
                                               "measured": told.point.loss, "ratio": told.ratio},
        "plans": [{"flops": budget, "parameters": best, "tokens": budget / 6 / best,
                   "loss": float(law.loss(best, budget / 6 / best))} for budget, best in plans],
        "points": [asdict(point) for point in found.points],
    }  # fmt: skip


def print_fit(found: Fit, document: dict[str, Any]) -> None:
    law, console = found.law, Console()
    table = Table(title="L(N, D) = E + A / N^alpha + B / D^beta", title_justify="left")
    for name in ("number", "fitted", "lowest and highest without one run"):
        table.add_column(name, justify="left" if name == "number" else "right")
    for name, value in asdict(law).items():
        edges = document["spread"].get(name)
        table.add_row(name, f"{value:.4g}", "" if edges is None else f"{edges[0]:.4g}  {edges[1]:.4g}")
    console.print(table)
    runs = [key for key, _ in itertools.groupby(found.points, key=lambda point: point.run)]
    say = lambda line: console.print(line, highlight=False, soft_wrap=True)  # noqa: E731
    say(
        f"{len(found.points)} validations of {len(runs)} runs; error {document['rms_error']:.2%} (root mean square), "
        f"{document['largest_error']:.2%} at most"
    )
    if document["held_out"]:
        told = document["held_out"]
        say(
            f"{told['run']} by the law of the others: predicted {told['predicted']:.4f}, measured "
            f"{told['measured']:.4f}, ratio {told['ratio']:.4f}"
        )
    for plan in document["plans"]:
        say(
            f"{plan['flops']:.2e} FLOPs: {format_quantity(plan['parameters'], '')} parameters on "
            f"{format_quantity(plan['tokens'], '')} tokens, loss {plan['loss']:.3f}"
        )


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="scaling_laws")
def main(config: DictConfig) -> None:
    run_script(fit_runs, ScalingConfig, config)


if __name__ == "__main__":
    start_script(main, ScalingConfig, "scaling_laws")
