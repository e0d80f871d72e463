"""The loop of a run: set up, step, log, validate, save, finish. llm/training and alignment/sft are scripts around it.

A task says where batches come from and, if it likes, what else is measured at each validation; all else (the step, its
order, layouts, record, checkpoints, resuming) is the same for every task.
"""

import signal
import sys
from typing import Any

from llm.args import TrainConfig
from llm.evaluation import Evaluation, evaluate_stages, evaluate_sums
from llm.training_communication import OTHER
from llm.training_measure import FirstSteps, log_step, predict
from llm.training_output import TrainingProgress, print_finish, print_start, write_sample
from llm.training_profile import StepProfiler
from llm.training_setup import Task, Trainer, set_up
from llm.training_signals import StopSignals
from parallel.collectives import all_reduce_sum
from parallel.mesh import close_mesh, init_mesh


def run_training(config: TrainConfig, task: Task) -> dict[str, Any]:
    """Run training to max_steps, or to a stop signal or max_time_s; returns what stands in report.json."""
    parallel = config.parallel
    mesh = init_mesh(config.device, parallel.timeout_s, parallel.degrees(), parallel.force)
    try:
        with StopSignals() as signals:
            trainer = set_up(config, mesh, task)
            facts, predicted = predict(trainer)
            described = {} if task.describe is None else task.describe(trainer)
            trainer.record.open(trainer.step, facts | described, predicted)
            trainer.communication.take(OTHER, trainer.step)  # the links may have been measured
            print_start(trainer)
            state = run_steps(trainer, signals)
            finish(trainer, state)
    finally:
        close_mesh(mesh)
    if signals.requested == signal.SIGINT:
        sys.exit(130)
    return trainer.record.report


def run_steps(trainer: Trainer, signals: StopSignals) -> str:
    """The loop: step, log, validate, save; returns "finished" or "stopped"."""
    config = trainer.config
    first_steps = FirstSteps(trainer)
    trainer.throughput.resume()
    with TrainingProgress(trainer) as progress, StepProfiler(trainer) as profiler:
        if trainer.step == 0 and trainer.task.evaluate is not None:
            progress.show(evaluate_task(trainer))  # what training starts from
        while trainer.step < config.max_steps:
            wants_stop = signals.requested is not None or trainer.out_of_time()
            with first_steps.measured(), profiler.step():
                result = trainer.training_step.run(trainer.step, trainer.micro_batches(), wants_stop)
            if result is None:
                trainer.save()
                return "stopped"
            trainer.count()
            first_steps.count()
            profiler.count()
            last = trainer.step == config.max_steps
            if trainer.step % config.log_every == 0 or last:
                progress.show(log_step(trainer, result))
            if trainer.step % config.validate_every == 0 or last:
                progress.show(f"validation loss {validate(trainer).loss:.4f}")
                if trainer.task.evaluate is not None:
                    progress.show(evaluate_task(trainer))
            if trainer.step % config.checkpoint.every_steps == 0 or last:
                trainer.save()
    return "finished"


def validate(trainer: Trainer) -> Evaluation:
    """The loss over the same windows each time, each data rank on its share."""
    mesh, config = trainer.mesh, trainer.config
    with trainer.off_the_clock():
        batches = trainer.validation.batches(config.micro_batch_size, mesh.rank_in("dp"), mesh.size("dp"))
        trainer.model.eval()
        shards, pipeline = trainer.training_step.shards, trainer.training_step.pipeline
        seq_len, device = config.data.seq_len, mesh.device
        if pipeline is not None:
            sums = evaluate_stages(pipeline, batches, seq_len, device, shards)
        else:
            sums = evaluate_sums(trainer.model, batches, seq_len, device, trainer.autocast_dtype, shards)
        trainer.model.train()
        for axis in ("dp_cp", "pp"):  # of a pipeline the last stage has them
            all_reduce_sum(sums.tensor, mesh, axis)
        result = sums.result(trainer.validation.bytes_per_token)
        trainer.record.validation(trainer.step, result)
    return result


def evaluate_task(trainer: Trainer) -> str:
    """The task's own measurement, by all ranks: a line of metrics.jsonl, and a short status."""
    with trainer.off_the_clock():
        trainer.model.eval()
        fields, status = trainer.task.evaluate(trainer)
        trainer.model.train()
        trainer.record.task(trainer.step, fields)
    return status


def finish(trainer: Trainer, state: str) -> None:
    """A sample, the last measurements, the report page, and the summary on the terminal."""
    trainer.loader.close()
    if state == "finished":
        with trainer.training_step.strategy.gathered():  # by every rank, although one alone samples
            if trainer.mesh.is_main:
                write_sample(trainer)
    trainer.communication.take(OTHER, trainer.step)
    trainer.record.communication(trainer.communication.written())
    trainer.record.close(state)
    print_finish(trainer, state)
