"""The project's table of contents: one run, from its config to its report.

    python -m llm.training experiment=quickstart
    torchrun --nproc-per-node=2 -m llm.training experiment=quickstart micro_batch_size=16

Reading order from here: training_loop (the loop), training_setup (what a run needs), training_step (the one function
that learns), transformer, loss, optimizer, data_loader, checkpoint, cost_model. A killed run continues bit for bit with
the same command. `init_from=runs/x` starts a fresh run from another's weights.
"""

from typing import Any

import hydra
from omegaconf import DictConfig

from configs.loader import CONFIG_DIR, run_script, start_script
from llm.args import TrainConfig
from llm.training_loop import run_training
from llm.training_setup import Task


def train(config: TrainConfig) -> dict[str, Any]:
    """Run training to max_steps, or to a stop signal or max_time_s; returns what stands in report.json."""
    return run_training(config, Task())


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="training")
def main(config: DictConfig) -> None:
    run_script(train, TrainConfig, config)


if __name__ == "__main__":
    start_script(main, TrainConfig, "training")
