"""Reinforcement learning with verifiable rewards, from its config to its report.

    python -m alignment.train_rl experiment=quickstart_rl
    torchrun --nproc-per-node=4 -m alignment.train_rl ... rollout_ranks=2 one_step_off=true

A batch: rollout (train_rl_collect, by an engine behind alignment/rollout) -> reward (the grader) -> log-probs and
updates (train_rl_learn, by llm's training step) -> weights to the engine (train_rl_sync). Ranks do both sides, or with
rollout_ranks one of them, all in one loop. A killed run goes on bit for bit with the same command: weights, optimizer,
which problem comes next, and completions that were written and not yet learned from.
"""

import signal
import sys
from typing import Any

import hydra
from omegaconf import DictConfig

from alignment.cost_model import device_of, predict_batch
from alignment.cost_model_rollout import Lengths
from alignment.rollout import close_engine
from alignment.train_rl_collect import Collected
from alignment.train_rl_config import TrainRlConfig
from alignment.train_rl_evaluate import HeldOut, evaluate_held_out
from alignment.train_rl_output import print_batch, print_finish, print_held_out, print_start
from alignment.train_rl_record import RlRecord
from alignment.train_rl_setup import RlRun, set_up
from configs.loader import CONFIG_DIR, run_script, start_script
from configs.run_dir import read_json
from llm.training_signals import StopSignals
from parallel.collectives import all_gather_json
from parallel.mesh import close_mesh, init_mesh
from parallel.mesh_degrees import Degrees
from parallel.mesh_roles import share_roles, split_roles


def train_rl(config: TrainRlConfig) -> dict[str, Any]:
    """Run to num_batches, or to a stop signal or max_time_s; returns what stands in report.json."""
    parallel, split = config.parallel, config.rollout_ranks > 0
    world = init_mesh(config.device, parallel.timeout_s, Degrees() if split else parallel.degrees(), parallel.force)
    try:
        roles = split_roles(world, config.rollout_ranks, parallel.degrees()) if split else share_roles(world)
        with StopSignals() as signals:
            run = set_up(config, roles)
            print_start(run)
            record = RlRecord(run)
            first = evaluate_held_out(run) if run.batch == 0 else None
            record.begin(predicted(run, first))
            if first is not None:
                tell(run, record, first)
            state = run_batches(run, record, signals)
            record.close(state)
            print_finish(run, state)
            if run.rollout is not None:
                run.rollout.grader.close()
                close_engine(run.rollout.engine)
    finally:
        close_mesh(world)
    if signals.requested == signal.SIGINT:
        sys.exit(130)
    return record.report


def run_batches(run: RlRun, record: RlRecord, signals: StopSignals) -> str:
    """The loop over batches; returns "finished" or "stopped"."""
    config = run.config
    while run.batch < config.num_batches:
        if (reason := stop_reason(run, signals)) is not None:
            if reason == "time":  # a signal wants an end at once
                tell(run, record, evaluate_held_out(run))
            run.save()
            return "stopped"
        run.clock.take()
        one_batch(run, record)
        last = run.batch == config.num_batches
        if run.batch % config.evaluate_every == 0 or last:
            tell(run, record, evaluate_held_out(run))
        if run.batch % config.checkpoint.every_steps == 0 or last:
            run.save()
    return "finished"


def stop_reason(run: RlRun, signals: StopSignals) -> str | None:
    """ "signal" or "time" when any rank was told to stop or has run out of time, else None; the same on all ranks."""
    own = "signal" if signals.requested is not None else "time" if run.out_of_time() else None
    reasons = all_gather_json(own, run.roles.world, "world")
    return next((reason for reason in ("signal", "time") if reason in reasons), None)


def one_batch(run: RlRun, record: RlRecord) -> None:
    """Rollout, reward, log-probs, updates, sync: every rank its part. With one_step_off the next batch is written first
    (on ranks of its own: meanwhile), with the weights that this one is about to change."""
    current = run.ahead if run.ahead is not None else hand_over(run, write(run))
    run.ahead = None
    writes_ahead = run.config.one_step_off and run.batch + 1 < run.config.num_batches
    written = write(run) if writes_ahead else None
    learned = None
    if run.training is not None:
        learned = run.training.learner.learn(current.groups, run.step, run.clock)
    if writes_ahead:
        run.ahead = hand_over(run, written)
    run.batch += 1
    run.step += run.config.steps_per_batch
    run.tokens += current.rollout_tokens
    with run.clock.section("sync"):
        run.sync.send(run.training, run.rollout, run.batch)
    if learned is not None:
        fields = record.batch(current, learned, run.clock.take())
        print_batch(run, fields)


def write(run: RlRun) -> Collected | None:
    """A batch by this rank's engine and those beside it; None on a rank that only trains."""
    return None if run.rollout is None else run.rollout.collector.collect()


def hand_over(run: RlRun, written: Collected | None) -> Collected:
    """The written batch and the collector's cursor, on every rank."""
    own = None if written is None else {"batch": written.to_json(), "cursor": run.rollout.collector.state()}
    if not run.roles.is_split:
        run.cursor = own["cursor"]
        return written
    with run.clock.section("wait"):
        told = next(one for one in all_gather_json(own, run.roles.world, "world") if one is not None)
    run.cursor = told["cursor"]
    return Collected.from_json(told["batch"])


def tell(run: RlRun, record: RlRecord, result: HeldOut) -> None:
    """Write down what the held-out problems say of the weights as they are."""
    record.held_out(result)
    print_held_out(run, result)
    record.write_report("running")


def predicted(run: RlRun, first: HeldOut | None) -> dict[str, Any]:
    """What a batch will take, by lengths that the held-out problems show before the first one; a resumed run keeps its
    own. Nothing where ranks share the work, which the model does not know."""
    if not run.is_main or run.roles.world.world_size > 1:
        return {}
    if first is None:
        report = run.run_dir.path / "report.json"
        return read_json(report).get("predicted", {}) if report.exists() else {}
    prompts = [len(prompt) for prompt in run.rollout.held_out.prompts]
    lengths = Lengths(prompts, first.lengths, run.config.group_size)
    device = device_of(run.hardware, run.config.rollout, run.tokenizer)
    return predict_batch(run.config, run.sync.model_config, device, lengths).fields()


@hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="train_rl")
def main(config: DictConfig) -> None:
    run_script(train_rl, TrainRlConfig, config)


if __name__ == "__main__":
    start_script(main, TrainRlConfig, "train_rl")
