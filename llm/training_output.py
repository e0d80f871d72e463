"""What a run shows on the terminal, on rank 0: what it is, how far it is, how it ended, and a sample of its text."""

from types import TracebackType

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from configs.report_numbers import format_quantity
from configs.report_samples import append_samples
from configs.report_terminal import print_summary
from llm.generating_loop import GenerationLimits, generate
from llm.sampling import SamplingConfig
from llm.training_setup import Trainer


def print_start(trainer: Trainer) -> None:
    """Three lines: the model, the batch, and what is predicted of them."""
    if not trainer.mesh.is_main:
        return
    config, predicted = trainer.config, trainer.record.report["predicted"]
    data_ranks = trainer.mesh.size("dp")
    accumulation = config.grad_accum_steps(data_ranks)
    print(
        f"{config.name}: {predicted['parameters']:,} parameters, vocab {config.model.vocab_size}, {config.dtype} on "
        f"{trainer.mesh.world_size} x {trainer.hardware.description}; run directory {trainer.run_dir.path}"
    )
    print(
        f"{config.max_steps} steps of {config.global_batch_tokens} tokens = {data_ranks} data ranks x "
        f"{accumulation} micro-batches x {config.micro_batch_size} sequences x {config.data.seq_len} tokens"
    )
    told = [("memory_peak_bytes", "peak memory", "bytes"), ("step_s", "step", "s"), ("tokens_per_s", "tokens/s", "")]
    parts = [f"{name} {format_quantity(predicted.get(key), unit)}" for key, name, unit in told]
    print("predicted: " + ", ".join(parts))
    if trainer.hardware.note:
        print(f"note: {trainer.hardware.note}")


def print_finish(trainer: Trainer, state: str) -> None:
    """The summary of the report; for a stopped run, how to go on."""
    if not trainer.mesh.is_main:
        return
    if state == "stopped":
        print(f"stopped and saved at step {trainer.step} of {trainer.config.max_steps}; the same command continues")
    if trainer.skipped_steps:
        print(f"note: {trainer.skipped_steps} steps were skipped because their gradient was not finite")
    print_summary(trainer.run_dir.path, trainer.run_dir.path / "report.html")


def write_sample(trainer: Trainer) -> None:
    """One sample from the trained model to samples.txt, at temperature 0.8 and a fixed seed."""
    config, tokenizer = trainer.config, trainer.tokenizer
    if not config.sample_tokens:
        return
    trainer.model.eval()
    prompt = [tokenizer.eot_id, *tokenizer.encode(config.sample_prompt)]
    limits = GenerationLimits(config.sample_tokens, [tokenizer.eot_id], tokenizer.vocab_size)
    sampling = SamplingConfig(temperature=0.8, top_k=50, seed=config.seed)
    # Decoding would compile anew for each length; a sample is not worth that.
    # Sharded weights are gathered in the dtypes that autocast would have them in, so it has to be on.
    autocast = torch.autocast(trainer.mesh.device.type, trainer.autocast_dtype, enabled=trainer.sharded_in_bfloat16)
    with torch.compiler.set_stance("force_eager"), autocast:
        (completion,) = generate(trainer.model, [prompt], sampling, limits)
    trainer.model.train()
    text = config.sample_prompt + tokenizer.decode([i for i in completion if i != tokenizer.eot_id])
    append_samples(trainer.run_dir.path, [text], step=trainer.step, temperature=0.8, top_k=50, seed=config.seed)


class TrainingProgress:
    """A progress bar on rank 0; where the output is no terminal, a plain line now and then instead."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.bar: Progress | None = None
        if trainer.mesh.is_main:
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self.bar = Progress(*columns, TimeRemainingColumn(), TextColumn("{task.fields[status]}"))
            total, done = trainer.config.max_steps, trainer.step
            self.task = self.bar.add_task("training", total=total, completed=done, status="")

    def __enter__(self) -> "TrainingProgress":
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.stop()

    def show(self, status: str) -> None:
        """Move the bar to the trainer's step, with `status` beside it."""
        if self.bar is None:
            return
        step, total = self.trainer.step, self.trainer.config.max_steps
        self.bar.update(self.task, completed=step, status=status)
        if not self.bar.console.is_terminal and (step % max(1, total // 20) == 0 or "validation" in status):
            print(f"step {step}/{total}  {status}", flush=True)
