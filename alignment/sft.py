"""Supervised fine-tuning on worked solutions: packed rows, every layout of llm/parallelize, LoRA by config.

    python -m alignment.sft experiment=quickstart_sft
    python -m alignment.sft init_from=runs/base name=tuned lora.rank=16 'train_data=[{source: jsonl, path: a.jsonl}]'

The loop, step, record, checkpoints and resuming are llm.training's (llm/training_loop); here are the data and the
held-out problems that are answered during training. The chapter: docs/sft.md.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import hydra
from omegaconf import DictConfig

from alignment.drgrpo_grader import Grader
from alignment.sft_config import SftConfig
from alignment.sft_data import load_sft_data, open_sft_data, packing_facts, with_checkpoint, with_steps
from alignment.sft_evaluate import GenerationEvaluator
from configs.loader import CONFIG_DIR, run_script, start_script
from llm.training_loop import run_training
from llm.training_setup import Task


def train(config: SftConfig) -> dict[str, Any]:
    """Run fine-tuning to its last step, or to a stop signal or max_time_s; returns what stands in report.json."""
    config = with_checkpoint(config)
    data = load_sft_data(config)
    config = with_steps(config, data)
    task = Task(partial(open_sft_data, data), describe=lambda trainer: packing_facts(data, trainer.loader))
    if config.generation.problems == 0:
        return run_training(config, task)
    with Grader(data.fmt.mode) as grader:
        return run_training(config, replace(task, evaluate=GenerationEvaluator(config, data, grader)))


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="sft")
def main(config: DictConfig) -> None:
    run_script(train, SftConfig, config)


if __name__ == "__main__":
    start_script(main, SftConfig, "sft")
