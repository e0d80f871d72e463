"""The two of bench_mark_grpo: one step of alignment.train_rl, and one of TRL's GRPOTrainer, on the same work.

Both start from the same weights, have the same prompts and rewards, write exactly `new` tokens a completion, and take
as many rows through the model at once. TRL generates as it does by default, with transformers; its activations are not
recomputed (its default is to do so), since ours are not.
"""

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from alignment.dataset import load_problems
from alignment.problem import Problem
from alignment.r1_prompt import encode_prompts, load_prompt_format
from alignment.train_rl import one_batch
from alignment.train_rl_clock import Clock
from alignment.train_rl_config import TrainRlConfig
from alignment.train_rl_record import RlRecord
from alignment.train_rl_setup import set_up
from configs.errors import UserError, missing_extra
from configs.loader import compose_config
from configs.run_dir import read_jsonl
from llm.bpe_tokenizer import Tokenizer
from parallel.mesh import Mesh
from parallel.mesh_roles import share_roles


@dataclass(frozen=True)
class Case:
    """One batch of work: `prompts` x `group` completions of `new` tokens, `micro_rows` of them at once in updates."""

    model: str
    prompts: int
    group: int
    new: int
    micro_rows: int
    kernels: str = "plain"  # of our trainer
    learning_rate: float = 1e-6

    def __post_init__(self) -> None:
        if self.rows % self.micro_rows:
            raise UserError(f"micro_rows={self.micro_rows} must divide the {self.rows} completions; use {self.group}")

    @property
    def rows(self) -> int:
        return self.prompts * self.group


@dataclass
class StepTime:
    """Seconds of one step and of its rollout; tokens sampled."""

    step_s: float
    rollout_s: float
    tokens: int
    parts: dict[str, float]


class ProcessorClock(Clock):
    """On a CPU that others use too: what this process was given, not what passed."""

    def now_s(self) -> float:
        return time.process_time()


def step_clock(device: torch.device) -> Clock:
    return Clock(device) if device.type == "cuda" else ProcessorClock(device)


def reward_of(text: str) -> float:
    """A number in 0..1 that differs within a group, so that every update has a gradient."""
    return zlib.crc32(text.encode()) % 16 / 15


def grade(texts: list[str], _problems: list[Problem]) -> list[dict[str, float]]:
    """Rewards as the collector wants them."""
    return [dict.fromkeys(("reward", "answer_reward", "format_reward"), reward_of(text)) for text in texts]


class Ours:
    """train_rl, batch by batch, with its engine; `step` is what its loop calls."""

    def __init__(self, case: Case, checkpoint: Path, work: Path, world: Mesh):
        self.run = set_up(self.config(case, checkpoint, work), share_roles(world))
        self.run.clock = step_clock(world.device)
        collector = self.run.rollout.collector
        params = replace(collector.task.params, stop_ids=())  # nothing ends a completion before its length
        collector.task = replace(collector.task, params=params, grade=grade)
        self.record = RlRecord(self.run)
        self.record.begin({})

    def config(self, case: Case, checkpoint: Path, work: Path) -> TrainRlConfig:
        """Every batch is one epoch of as many problems, so that both contestants always have the same prompts."""
        data = "{source: arithmetic, level: word_problems, split: %s, size: %d, seed: 1}"
        overrides = [
            "name=ours", f"runs_dir={work}", f"init_from={checkpoint}", "num_batches=1000000", "resume=none",
            f"prompts_per_batch={case.prompts}", f"group_size={case.group}", f"max_new_tokens={case.new}",
            f"optimizer.lr={case.learning_rate}", f"rollout.max_running={case.rows}", "rollout.memory_fraction=0.2",
            f"kernels={case.kernels}", "prompt.template=r1_short",
            f"train_data=[{data % ('train', case.prompts)}]", f"held_out_data={data % ('held_out', 8)}",
        ]  # fmt: skip
        config = compose_config(TrainRlConfig, "train_rl", overrides)
        return replace(config, micro_batch_tokens=case.micro_rows * self.longest_row(config, checkpoint))

    def longest_row(self, config: TrainRlConfig, checkpoint: Path) -> int:
        """Tokens of the longest prompt with its completion."""
        tokenizer = Tokenizer.load(checkpoint)
        fmt = load_prompt_format(config.prompt, tokenizer, checkpoint)
        _, prompts, _ = encode_prompts(load_problems(config.train_data[0]), fmt, tokenizer, 1 << 30)
        return max(map(len, prompts)) + config.max_new_tokens

    @property
    def prompts(self) -> list[list[int]]:
        return self.run.rollout.collector.task.prompts

    def step(self) -> StepTime:
        run = self.run
        run.clock.take()
        one_batch(run, self.record)
        line = read_jsonl(run.run_dir.path / "metrics.jsonl")[-1]
        parts = {name: line[name] for name in ("reward_s", "log_prob_s", "update_s", "sync_s")}
        rollout_s = line["rollout_s"] if run.clock.device.type == "cuda" else line["step_time_s"] - sum(parts.values())
        return StepTime(line["step_time_s"], rollout_s, line["rollout_tokens"], parts)


class Trl:
    """GRPOTrainer over an exported directory; `run` calls `between` after every step, outside what is timed."""

    def __init__(self, case: Case, exported: Path, work: Path, prompts: list[list[int]], weights: str):
        try:
            import trl
        except ImportError as error:
            raise missing_extra("trl", "bench") from error
        if torch.cuda.device_count() > 1:
            raise UserError(
                f"{torch.cuda.device_count()} GPUs are visible and TRL would take all of them; set "
                f"CUDA_VISIBLE_DEVICES=0 to compare on one"
            )
        self.version, self.case, self.weights = trl.__version__, case, weights
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.clock = step_clock(self.device)
        self.exported, self.work, self.prompts = exported, work, prompts

    def run(self, steps: int, between: Callable[[], None]) -> list[StepTime]:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(self.exported), padding_side="left")
        texts = [tokenizer.decode(ids) for ids in self.prompts]
        assert tokenizer(texts)["input_ids"] == self.prompts, "both sides must read the same prompts"
        trainer = timed_trainer(self, tokenizer, texts, steps, between)
        trainer.train()
        return trainer.times

    def arguments(self, steps: int) -> dict[str, Any]:
        """GRPOConfig's: the batch, the algorithm and the precision of ours; nothing saved, nothing sent."""
        case, on_gpu = self.case, self.device.type == "cuda"
        return dict(
            output_dir=str(self.work / "trl"), report_to="none", save_strategy="no", logging_strategy="no",
            disable_tqdm=True, use_cpu=not on_gpu, bf16=on_gpu, max_steps=steps, seed=1,
            per_device_train_batch_size=case.micro_rows, gradient_accumulation_steps=case.rows // case.micro_rows,
            num_generations=case.group, max_completion_length=case.new, temperature=1.0, top_p=1.0, top_k=0,
            generation_kwargs={"min_new_tokens": case.new}, learning_rate=case.learning_rate, warmup_steps=0,
            lr_scheduler_type="constant", adam_beta2=0.95, weight_decay=0.0, max_grad_norm=1.0, beta=0.0,
            loss_type="grpo", epsilon=0.2, gradient_checkpointing=False, remove_unused_columns=False,
            model_init_kwargs={"dtype": self.weights}, dataloader_pin_memory=False,
        )  # fmt: skip


def timed_trainer(peer: Trl, tokenizer: Any, texts: list[str], steps: int, between: Callable[[], None]) -> Any:
    """A GRPOTrainer that notes the time of each step and of the generation in it."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    clock = peer.clock

    class Timed(GRPOTrainer):
        times: list[StepTime] = []
        rollout_s, rollout_tokens = 0.0, 0

        def _generate(self, prompts: list) -> Any:
            started_s = clock.now_s()
            found = super()._generate(prompts)
            self.rollout_s = clock.now_s() - started_s
            self.rollout_tokens = sum(map(len, found[1]))
            return found

    class Steps(TrainerCallback):
        started_s = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.started_s = clock.now_s()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            step_s = clock.now_s() - self.started_s
            trainer.times.append(StepTime(step_s, trainer.rollout_s, trainer.rollout_tokens, {}))
            between()
            self.started_s = clock.now_s()

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [reward_of(text) for text in completions]

    trainer = Timed(
        model=str(peer.exported),
        reward_funcs=reward,
        args=GRPOConfig(**peer.arguments(steps)),
        train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
        processing_class=tokenizer,
        callbacks=[Steps()],
    )
    return trainer
