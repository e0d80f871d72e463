"""Multiple-choice and other tasks of lm-evaluation-harness on a checkpoint of ours.

    pip install -e '.[bench]'
    python -m llm.evaluating_tasks run=runs/x 'tasks=[hellaswag,arc_easy]' limit=200
    python -m llm.evaluating_tasks run=runs/x 'tasks=[my_task]' task_path=my_tasks/

`task_path` is a directory of task files (YAML) in the harness's format; a task that reads a local JSONL file needs no
network (docs/evaluation.md has one). The results are printed and written to the run's evaluation_tasks.json.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from configs.errors import UserError, check_choice, check_positive, missing_extra
from configs.loader import CONFIG_DIR, run_script, start_script
from configs.run_dir import write_json_atomic
from configs.version import git_commit


@dataclass
class TasksConfig:
    """Everything that `python -m llm.evaluating_tasks` takes."""

    run: str | None = None  # a run directory: its newest whole checkpoint
    checkpoint: str | None = None  # or one checkpoint's directory
    tasks: list[str] = field(default_factory=list)
    task_path: str | None = None  # a directory of task files of one's own
    num_fewshot: int | None = None  # null: the task's own
    limit: int | None = None  # questions of a task; null: all
    document_start: bool = False  # put end-of-text before each context; lm_eval's own models do not
    batch_size: int = 16
    seed: int = 1337  # of few-shot examples
    bootstrap_samples: int = 10_000  # for standard errors that have no formula
    device: str = "auto"
    dtype: str = "auto"  # of weights and products: bfloat16 on a GPU
    output: str | None = None  # null: evaluation_tasks.json of the run

    def __post_init__(self) -> None:
        check_positive(batch_size=self.batch_size, limit=1 if self.limit is None else self.limit)
        check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16"))
        if not self.tasks:
            raise UserError("tasks=[] leaves nothing to do; name tasks, such as tasks=[hellaswag]")
        if self.task_path is not None and not Path(self.task_path).is_dir():
            raise UserError(f"task_path={self.task_path} is not a directory; give one with the tasks' YAML files")


def run_tasks(config: TasksConfig) -> dict[str, dict[str, Any]]:
    """Run the tasks through the harness; returns task -> metric -> value, and prints and records it."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise missing_extra("lm-eval", "bench") from error
    from llm.evaluation_lm_eval import MewLM

    manager = TaskManager(include_path=config.task_path)
    unknown = sorted(set(config.tasks) - set(manager.all_tasks))
    if unknown:
        raise UserError(f"tasks {unknown} are unknown to lm_eval; list them with `lm_eval ls tasks`, or set task_path")
    model = MewLM(
        config.run, config.checkpoint, config.batch_size, config.device, config.dtype, config.document_start
    )  # fmt: skip
    found = simple_evaluate(
        model, tasks=list(config.tasks), task_manager=manager, num_fewshot=config.num_fewshot, limit=config.limit,
        fewshot_random_seed=config.seed, random_seed=config.seed, numpy_random_seed=config.seed,
        torch_random_seed=config.seed, log_samples=False, bootstrap_iters=config.bootstrap_samples,
    )  # fmt: skip
    results = {task: numbers_of(values) for task, values in found["results"].items()}
    print_results(results, model.loaded.path.name)
    record(config, model, {"results": results, "num_samples": found["n-samples"], "versions": found["versions"]})
    return results


def numbers_of(values: dict[str, Any]) -> dict[str, float]:
    """A task's metrics by name: "acc,none" is acc, other filters keep theirs; what is no number is left out."""
    named = {name.removesuffix(",none"): value for name, value in values.items()}
    return {name: float(value) for name, value in named.items() if isinstance(value, int | float) and name != "alias"}


def record(config: TasksConfig, model: Any, found: dict[str, Any]) -> None:
    from importlib.metadata import version

    run_dir = model.loaded.run_dir
    path = Path(config.output) if config.output is not None else run_dir and run_dir / "evaluation_tasks.json"
    if path:
        head = {"checkpoint": model.loaded.path.name, "commit": git_commit(), "lm_eval": version("lm-eval")}
        settings = {"document_start": config.document_start, "num_fewshot": config.num_fewshot, "limit": config.limit}
        write_json_atomic(path, head | settings | found)


def print_results(results: dict[str, dict[str, float]], name: str) -> None:
    table = Table(title=name, title_justify="left")
    for column in ("task", "metric", "value", "standard error"):
        table.add_column(column, justify="left" if column in ("task", "metric") else "right")
    for task, values in results.items():
        for metric, value in values.items():
            if "_stderr" in metric or metric == "sample_len":
                continue
            parts = metric.split(",", 1)
            spread = values.get(",".join([f"{parts[0]}_stderr", *parts[1:]]))
            table.add_row(task, metric, f"{value:.4f}", "" if spread is None else f"{spread:.4f}")
    Console().print(table)


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="evaluating_tasks")
def main(config: DictConfig) -> None:
    run_script(run_tasks, TasksConfig, config)


if __name__ == "__main__":
    start_script(main, TasksConfig, "evaluating_tasks")
