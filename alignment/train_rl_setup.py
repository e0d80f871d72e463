"""What a run of train_rl needs before its first batch, built in the order in which it can fail: cheap checks first.

A rank trains, writes completions, or does both. What it does not do is None here.
"""

import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from alignment.dataset import check_disjoint, load_problems
from alignment.drgrpo_grader import Grader
from alignment.problem import Problem
from alignment.r1_prompt import PromptFormat, encode_prompts, load_prompt_format
from alignment.rollout import RolloutEngine, build_rollout_engine
from alignment.train_rl_clock import Clock
from alignment.train_rl_collect import Collected, Collector, CollectSettings, Task
from alignment.train_rl_config import TrainRlConfig
from alignment.train_rl_learn import Learner
from alignment.train_rl_policy import Policy
from alignment.train_rl_sync import WeightSync
from configs.errors import UserError
from configs.run_dir import RunDir
from llm.args import TrainConfig
from llm.bpe_tokenizer import Tokenizer
from llm.checkpoint import restore, save_checkpoint
from llm.checkpoint_pieces import Sharding, held_pieces
from llm.engine_request import RequestParams
from llm.hardware import Hardware, detect_hardware
from llm.hardware_allocator import keep_freed_memory
from llm.model_loading import load_model, resolve_checkpoint
from llm.parallelize import Parallelized, parallelize
from llm.sampling import SamplingConfig
from llm.training_step import TrainingStep
from llm.transformer import Transformer
from parallel.collectives import all_gather_json
from parallel.mesh import Mesh
from parallel.mesh_roles import RoleMeshes
from parallel.sharded_checkpoint import open_checkpoint
from parallel.sharded_checkpoint_manifest import find_checkpoint, list_checkpoints


@dataclass
class TrainingSide:
    """What a rank that trains has."""

    config: TrainConfig
    mesh: Mesh
    model: Transformer
    parts: Parallelized
    learner: Learner
    sharding: Sharding | None

    def held(self) -> Any:
        return held_pieces(self.model, self.parts.optimizer, self.mesh, self.sharding)


@dataclass
class RolloutSide:
    """What a rank that writes completions has."""

    engine: RolloutEngine
    collector: Collector
    held_out: Task
    grader: Grader


@dataclass
class RlRun:
    """One rank's parts of a run, and how far it has come."""

    config: TrainRlConfig
    roles: RoleMeshes
    hardware: Hardware
    tokenizer: Tokenizer
    tokenizer_dir: Path
    sync: WeightSync
    run_dir: RunDir
    clock: Clock
    training: TrainingSide | None = None
    rollout: RolloutSide | None = None
    batch: int = 0  # batches learned; also the version of the weights
    step: int = 0  # optimizer steps
    tokens: int = 0  # written by the engine
    ahead: Collected | None = None  # one_step_off: the next batch, written already
    cursor: dict[str, Any] = field(default_factory=dict)  # the collector's, as of the last hand-over
    started_s: float = field(default_factory=time.perf_counter)

    @property
    def is_main(self) -> bool:
        return self.roles.world.is_main

    def out_of_time(self) -> bool:
        limit = self.config.max_time_s
        return limit is not None and time.perf_counter() - self.started_s > limit

    def save(self) -> None:
        """The training ranks together write a checkpoint of this batch, cursor and waiting groups in it."""
        if self.training is None:
            return
        side, config = self.training, self.config
        state = {
            "batch": self.batch,
            "tokens_seen": self.tokens,
            "cursor": self.cursor,
            "ahead": None if self.ahead is None else self.ahead.to_json(),
            "config": asdict(config) | {"model": asdict(side.config.model)},
        }
        save_checkpoint(
            self.run_dir.checkpoints, self.step, side.held().pieces(), state, self.tokenizer_dir,
            config.checkpoint.keep_last, side.mesh,
        )  # fmt: skip

    def resume(self) -> None:
        """Go on from the newest whole checkpoint of this run, if there is one; every rank calls it."""
        path = self.find()
        if path is None:
            return
        _, state = open_checkpoint(path)
        if self.training is not None:
            restore(self.training.held(), path, self.training.mesh)
        self.batch, self.step, self.tokens = state["batch"], state["step"], state["tokens_seen"]
        self.cursor = state["cursor"]
        self.ahead = None if state["ahead"] is None else Collected.from_json(state["ahead"])
        if self.rollout is not None and self.cursor:  # empty when it was stopped before its first batch
            self.rollout.collector.restore(self.cursor)
        if self.batch > self.config.num_batches:
            raise UserError(f"{path} is beyond num_batches={self.config.num_batches}; raise it or use another name")
        if self.is_main:
            print(f"resumed from {path}")

    def find(self) -> Path | None:
        """The checkpoint to go on from, as rank 0 sees it."""
        found = None
        if self.is_main:
            if self.config.resume == "none" and list_checkpoints(self.run_dir.checkpoints):
                raise UserError(
                    f"resume=none, but {self.run_dir.checkpoints} holds checkpoints that a fresh run would mix with; "
                    f"use another name, resume=auto, or remove {self.run_dir.path}"
                )
            newest = find_checkpoint(self.run_dir.checkpoints) if self.config.resume == "auto" else None
            found = None if newest is None else str(newest)
        found = all_gather_json(found, self.roles.world, "world")[0]
        return None if found is None else Path(found)


def set_up(config: TrainRlConfig, roles: RoleMeshes) -> RlRun:
    """Build this rank's parts and restore its newest checkpoint; UserError for whatever does not fit."""
    world = roles.world
    if world.device.type == "cpu":
        keep_freed_memory()
    path = find_start(config.init_from)
    train_problems = [problem for data in config.train_data for problem in load_problems(data)]
    held_out_problems = load_problems(config.held_out_data)
    check_disjoint(train_problems, held_out_problems)
    model, tokenizer, _ = load_model(path, world.device)
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if world.device.type == "cuda" else "float32"
    config = replace(config, dtype=dtype)
    run = RlRun(
        config=config, roles=roles, hardware=detect_hardware(config.hardware, world.device, dtype=dtype),
        tokenizer=tokenizer, tokenizer_dir=path, sync=WeightSync(roles, model.config, config.rollout.dtype),
        run_dir=RunDir(f"{config.runs_dir}/{config.name}"), clock=Clock(world.device),
    )  # fmt: skip
    if roles.workers is not None:
        run.rollout = rollout_side(run, model, train_problems, held_out_problems)
    if roles.train is not None:
        run.training = training_side(run, model)
    run.resume()
    run.sync.send(run.training, run.rollout, run.batch)
    run.clock.take()
    return run


def find_start(init_from: str) -> Path:
    """The checkpoint that init_from names: a directory of one, or a run's newest."""
    is_run = (Path(init_from) / "checkpoints").is_dir()
    return resolve_checkpoint(init_from, None) if is_run else resolve_checkpoint(None, init_from)


def training_side(run: RlRun, model: Transformer) -> TrainingSide:
    """The policy, with strategies and optimizer applied, and a frozen copy of it where a KL term needs one."""
    config, mesh = run.config, run.roles.train
    reference = None
    if config.algorithm.kl_coef > 0:
        reference = Transformer(model.config).to(mesh.device)
        reference.load_state_dict(model.state_dict())
        reference.requires_grad_(False)
    train_config = config.train_config(model.config, str(run.tokenizer_dir), config.dtype)
    train_config.parallel.check(mesh.world_size)
    if config.dtype == "bfloat16":
        torch.set_float32_matmul_precision("high")
    parts = parallelize(model.train(), train_config, mesh)
    policy = Policy(parts.model, config.algorithm, config.temperature, run.tokenizer.vocab_size, config.max_new_tokens)
    training_step = TrainingStep(train_config, mesh, parts, policy.forward_loss)
    learner = Learner(config, mesh, policy, training_step, reference)
    sharding = parts.strategy if hasattr(parts.strategy, "pieces") else None
    return TrainingSide(train_config, mesh, parts.model, parts, learner, sharding)


def rollout_side(
    run: RlRun, model: Transformer, train_problems: list[Problem], held_out_problems: list[Problem]
) -> RolloutSide:
    """The engine with a copy of the weights, the collector over the training problems, and the held-out task."""
    config, mesh = run.config, run.roles.workers
    fmt = load_prompt_format(config.prompt, run.tokenizer, run.tokenizer_dir)
    grader = Grader(fmt.mode, num_workers=config.grader_workers)
    settings = CollectSettings(
        config.prompts_per_batch, config.group_size, config.seed, config.algorithm.dynamic_sampling, config.max_tries
    )
    task = make_task(run, train_problems, fmt, grader, config.sampling())
    greedy = SamplingConfig(temperature=0.0, seed=config.seed)
    held_out = make_task(run, held_out_problems, fmt, grader, greedy)
    longest = max(len(prompt) for prompt in (*task.prompts, *held_out.prompts)) + config.max_new_tokens
    room = min(longest, model.config.max_seq_len)
    engine = build_rollout_engine(config.rollout, model, run.tokenizer, mesh.device, room)
    return RolloutSide(engine, Collector(task, settings, engine, mesh), held_out, grader)


def make_task(run: RlRun, problems: list[Problem], fmt: PromptFormat, grader: Grader, sampling: SamplingConfig) -> Task:
    """Problems as prompts' ids; those whose prompt leaves no room in the model's window are left out, and counted."""
    room = run.sync.model_config.max_seq_len - 1
    kept, prompts, dropped = encode_prompts(problems, fmt, run.tokenizer, room)
    if dropped and run.is_main:
        print(f"note: {dropped} of {len(problems)} problems are left out, their prompts exceed {room} tokens")
    params = RequestParams(sampling=sampling, max_new_tokens=run.config.max_new_tokens, stop_ids=(fmt.eos_id,))

    def grade(texts: list[str], asked: list[Problem]) -> list[dict[str, float]]:
        return grader.rewards(texts, [problem.answer for problem in asked])

    return Task(kept, prompts, params, grade, run.tokenizer.vocab_size)
