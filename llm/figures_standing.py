"""The docs' figures that need no run: they follow from schedules, shapes and datasheets alone."""

import subprocess
import sys
from pathlib import Path

from configs.errors import UserError
from configs.loader import compose_config
from configs.version import ROOT
from llm.plan_config import PlanConfig
from llm.plan_figure import draw_memory
from llm.plan_layouts import Planner, best_of_each_kind

# docs/cost_model.md: the layouts over data ranks alone
PLAN = ("model=7b", "hardware=h100", "nodes=64", "micro_batch_size=[1,2]", "tp=[1]", "pp=[1]", "cp=[1]")


def pipeline_schedules(stem: Path) -> list[Path]:
    """Drawn by the script that owns it, which prints the schedules too."""
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in ("png", "pdf")]
    for path in paths:
        command = [sys.executable, "-m", "parallel.pipeline_schedules_figure", "4", "8", str(path.resolve())]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        if done.returncode:
            raise UserError(f"{' '.join(command[1:])} ended with {done.returncode}: {done.stderr[-300:]}; run it alone")
    return paths


def plan_7b_memory(stem: Path) -> list[Path]:
    """Memory of the best layout of each kind, as `python -m llm.plan` with PLAN's arguments draws it."""
    config = compose_config(PlanConfig, "plan", list(PLAN))
    planner = Planner(config)
    rows = planner.rows()
    title = f"7B parameters on {config.world_size} {config.hardware.name}, data parallel alone"
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in ("png", "pdf")]
    for path in paths:
        draw_memory(path, best_of_each_kind(rows), planner.limit_bytes, title)
    return paths


STANDING = {figure.__name__: figure for figure in (pipeline_schedules, plan_7b_memory)}
