"""Held-out problems answered during training: accuracy, format rate and length, by the inference engine.

Every rank gets the full plain weights (gathered, adapters merged) and answers a share of the problems; counts are
added. The engine holds a copy of the weights in its own dtype, which each evaluation writes in place.
"""

import time
from typing import Any

from alignment.drgrpo_grader import Grader
from alignment.intervals import wilson_interval
from alignment.r1_prompt import encode_prompts
from alignment.rollout import RolloutEngine, build_rollout_engine
from alignment.sft_config import SftConfig
from alignment.sft_data import SftData
from configs.report_samples import append_samples
from llm.engine_request import Completion, RequestParams
from llm.lora import merge
from llm.sampling import SamplingConfig
from llm.training_setup import Trainer
from llm.transformer import Transformer
from parallel.collectives import all_gather_json

COUNTS = ("problems", "correct", "well_formed", "tokens", "cut")


class GenerationEvaluator:
    """`evaluator(trainer)` is Task.evaluate: fields of a line of metrics.jsonl, and a short status."""

    def __init__(self, config: SftConfig, data: SftData, grader: Grader):
        settings = config.generation
        chosen = data.problems[: settings.problems]
        room = config.model.max_seq_len - 1
        self.problems, self.prompts, self.dropped = encode_prompts(chosen, data.fmt, data.tokenizer, room)
        self.config, self.tokenizer, self.grader = config, data.tokenizer, grader
        sampling = SamplingConfig(temperature=settings.temperature, seed=config.seed)
        self.params = [
            RequestParams(sampling, settings.max_new_tokens, stop_ids=(data.fmt.eos_id,), index=index)
            for index in range(len(self.prompts))
        ]
        self.engine: RolloutEngine | None = None

    def __call__(self, trainer: Trainer) -> tuple[dict[str, Any], str]:
        start = time.perf_counter()
        self.write_weights(trainer)
        own = range(len(self.prompts))[trainer.mesh.rank :: trainer.mesh.world_size]
        completions = self.engine.generate([self.prompts[i] for i in own], [self.params[i] for i in own])
        counts = self.count(completions, [self.problems[i].answer for i in own])
        totals = [sum(column) for column in zip(*all_gather_json(counts, trainer.mesh, "world"), strict=True)]
        if trainer.mesh.is_main:
            self.show(trainer, completions)
        fields = evaluation_fields(dict(zip(COUNTS, totals, strict=True)))
        fields["val_rollout_s"] = round(time.perf_counter() - start, 3)
        return fields, f"held-out accuracy {fields['val_accuracy']:.3f}, format {fields['val_format_rate']:.3f}"

    def write_weights(self, trainer: Trainer) -> None:
        """The trainer's weights, whole and plain, into the engine; called by all ranks."""
        with trainer.training_step.strategy.gathered():
            tensors = merge(trainer.model.state_dict(), self.config.lora)
            if self.engine is None:
                # Built from a model of its own: the trainer's may be cut, sharded or have adapters.
                source = Transformer(trainer.config.model).to(trainer.mesh.device)
                source.load_state_dict(tensors)
                self.engine = build_rollout_engine(self.config.rollout, source, self.tokenizer, trainer.mesh.device)
            self.engine.load_weights(tensors, trainer.step)

    def count(self, completions: list[Completion], answers: list[str]) -> list[int]:
        """COUNTS over one rank's completions."""
        rewards = self.grader.rewards([one.text for one in completions], answers)
        return [
            len(completions),
            sum(reward["reward"] > 0 for reward in rewards),
            sum(reward["format_reward"] > 0 for reward in rewards),
            sum(len(one.token_ids) for one in completions),
            sum(one.finish_reason == "length" for one in completions),
        ]

    def show(self, trainer: Trainer, completions: list[Completion]) -> None:
        """Some answers in samples.txt, the same problems each time."""
        texts = [
            self.tokenizer.decode(one.prompt_ids) + one.text for one in completions[: self.config.generation.samples]
        ]
        if texts:
            append_samples(
                trainer.run_dir.path, texts, step=trainer.step, temperature=self.config.generation.temperature
            )


def evaluation_fields(counts: dict[str, int]) -> dict[str, Any]:
    """Shares of the problems, the accuracy (right and well formed) with its 95% interval, and mean lengths."""
    problems = max(counts["problems"], 1)
    low, high = wilson_interval(counts["correct"], counts["problems"])
    return {
        "val_accuracy": counts["correct"] / problems,
        "val_accuracy_low": low,
        "val_accuracy_high": high,
        "val_format_rate": counts["well_formed"] / problems,
        "val_response_tokens": counts["tokens"] / problems,
        "val_cut_fraction": counts["cut"] / problems,
        "val_problems": counts["problems"],
    }
