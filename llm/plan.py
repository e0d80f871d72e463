"""Which layout to run a model with on a cluster that one need not have.

    python -m llm.plan model=7b hardware=h100 nodes=64
    python -m llm.plan model=70b hardware=h200 nodes=32 zero=[3] micro_batch_size=[1] output=runs/plan-70b
    python -m llm.plan model=1b tp=[1] pp=[1,2] cp=[1]           # some degrees only

For every layout: peak memory of a rank, the bytes that leave it on each mesh axis, and the step's time, from shapes and
datasheets alone (docs/cost_model.md). Then the real strategies run once on the meta device and a fake process group, as
one rank of all of them, and what they would have sent is held against the prediction.
"""

import json
from typing import Any

import hydra
from omegaconf import DictConfig

from configs.loader import CONFIG_DIR, run_script, start_script
from llm.plan_config import PlanConfig
from llm.plan_dry_run import dry_run_traffic
from llm.plan_layouts import Planner, PlanRow, best_of_each_kind
from llm.plan_output import document, print_plan, write_plan
from parallel.cost_model_traffic import summed


def plan(config: PlanConfig) -> dict[str, Any]:
    """Print the ranked layouts and return them as one JSON document; UserError for what cannot be planned."""
    planner = Planner(config)
    rows = planner.rows()
    data_only = [row for row in best_of_each_kind(rows) if row.choice.shared == 1]
    dry_runs = [dry_run(planner, row) for row in data_only] if config.dry_run else []
    print_plan(planner, rows, dry_runs)
    found = document(planner, rows, dry_runs)
    if config.output is not None:
        write_plan(config.output, planner, rows, found)
    print(json.dumps(found))
    return found


def dry_run(planner: Planner, row: PlanRow) -> dict[str, Any]:
    """What the code sends in a step of at most two micro-batches, beside what was predicted of as many."""
    config, layout = planner.config, planner.layout(row.choice, min(2, row.micro_batches))
    seen = dry_run_traffic(planner.model, config.optimizer, layout, row.degrees, min(config.seq_len, 128))
    predicted = summed(planner.messages(row.choice, layout.micro_batches))
    differing = [str(entry) for entry in set(seen) ^ set(predicted)]
    return {
        "layout": row.name,
        "micro_batches": layout.micro_batches,
        "collectives": sum(entry.calls for entry in seen),
        "bytes": sum(entry.bytes for entry in seen),
        "equal": not differing,
        "difference": "; ".join(sorted(differing)[:2]),
    }


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="plan")
def main(config: DictConfig) -> None:
    run_script(plan, PlanConfig, config)


if __name__ == "__main__":
    start_script(main, PlanConfig, "plan")
