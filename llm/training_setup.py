"""Everything a run needs before its first step, built in the order in which it can fail: cheap checks first.

Ranks, data, model, optimizer, the newest whole checkpoint, and then the prediction, which is on disk before step 1.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from configs.errors import UserError
from configs.run_dir import RunDir
from llm.args import TrainConfig
from llm.bpe_tokenizer import Tokenizer
from llm.checkpoint import load_weights, restore, save_checkpoint
from llm.checkpoint_pieces import Sharding, held_pieces
from llm.data_loader import Batch, BatchLoader, LoaderConfig, ValidationSet, open_sources, source_weights
from llm.hardware import Hardware, detect_hardware
from llm.hardware_allocator import keep_freed_memory
from llm.metrics import Throughput
from llm.model_loading import resolve_checkpoint
from llm.optimizer import MixedOptimizer
from llm.parallelize import Parallelized, make_forward_loss, parallelize
from llm.training_communication import OTHER, STEP, Communication
from llm.training_record import Record
from llm.training_step import TrainingStep, rows_of_rank
from llm.transformer import Transformer
from llm.transformer_init import initialise, transformer_on_meta
from llm.transformer_kernels import make_loss
from parallel.mesh import Mesh
from parallel.sharded_checkpoint_manifest import find_checkpoint, list_checkpoints


@dataclass(frozen=True)
class Task:
    """What a run learns from, and what it measures besides the loss; the defaults are pretraining's.

    open_data(config, tokenizer, mesh) -> loader, validation: what the loop uses of BatchLoader and ValidationSet.
    evaluate(trainer) -> fields of a line of metrics.jsonl, and a short status; called by all ranks before the first
        step and at each validation. describe(trainer) -> facts about the data for report.json's "run".
    """

    open_data: Callable[..., tuple[Any, Any]] | None = None
    evaluate: Callable[..., tuple[dict[str, Any], str]] | None = None
    describe: Callable[..., dict[str, Any]] | None = None


@dataclass
class Trainer:
    """The parts of a run, and how far it has come."""

    config: TrainConfig  # resolved: vocab_size and dtype filled in
    mesh: Mesh
    hardware: Hardware
    tokenizer: Tokenizer
    loader: BatchLoader
    validation: ValidationSet
    model: Transformer
    loss: torch.nn.Module
    optimizer: MixedOptimizer
    training_step: TrainingStep
    run_dir: RunDir
    record: Record
    throughput: Throughput
    communication: Communication
    task: Task = field(default_factory=Task)
    sharding: Sharding | None = None  # the strategy under which ranks hold parts of parameters, if there is one
    step: int = 0  # optimizer steps done
    tokens_seen: int = 0  # of all ranks, padding and ignored targets included
    peak_bytes: int = 0  # of memory, so far
    started_s: float = field(default_factory=time.perf_counter)

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.config.dtype == "bfloat16" else None

    @property
    def sharded_in_bfloat16(self) -> bool:
        return self.sharding is not None and self.config.parallel.zero >= 2 and self.autocast_dtype is not None

    def micro_batches(self) -> list[Batch]:
        """This rank's rows of the next global batch: contiguous shares, in micro-batches."""
        rows = rows_of_rank(self.loader.config.num_sequences, self.mesh)
        return self.loader.micro_batches(self.step, rows, self.config.micro_batch_size)

    def out_of_time(self) -> bool:
        limit = self.config.max_time_s
        return limit is not None and time.perf_counter() - self.started_s > limit

    @property
    def skipped_steps(self) -> int:
        """Steps of this process whose gradient was not finite; waits for the last one."""
        self.training_step.settle()
        return self.training_step.skipped_steps

    def count(self) -> None:
        self.step += 1
        self.tokens_seen += self.config.global_batch_tokens
        self.throughput.add_step(self.config.global_batch_tokens)
        self.communication.steps += 1

    @contextmanager
    def off_the_clock(self) -> Iterator[None]:
        """Validation and saving do not count in tokens/s, and what they send is not a step's."""
        self.throughput.pause()
        self.communication.take(STEP, self.step)
        yield
        self.communication.take(OTHER, self.step)
        self.throughput.resume()

    def save(self) -> None:
        """All ranks together write a checkpoint of this step."""
        config, mesh = self.config, self.mesh
        self.training_step.settle()
        with self.off_the_clock():
            layout = {"world_size": mesh.world_size} | {axis: mesh.size(axis) for axis in ("dp", "tp", "cp", "pp")}
            state = {
                "tokens_seen": self.tokens_seen,
                "data": {"next_batch": self.step, "seed": config.seed},
                "layout": layout,
                "config": asdict(config),
            }
            pieces = held_pieces(self.model, self.optimizer, mesh, self.sharding).pieces()
            save_checkpoint(
                self.run_dir.checkpoints, self.step, pieces, state, config.data.tokenizer,
                config.checkpoint.keep_last, mesh,
            )  # fmt: skip

    def resume(self) -> None:
        """Continue from the newest whole checkpoint of this run, if there is one."""
        checkpoints = self.run_dir.checkpoints
        if self.config.resume == "none":
            if list_checkpoints(checkpoints):
                raise UserError(
                    f"resume=none, but {checkpoints} holds checkpoints that a fresh run would mix with; "
                    f"use another name, resume=auto, or remove {self.run_dir.path}"
                )
            self.start_from_weights()
            return
        path = find_checkpoint(checkpoints, self.mesh)
        if path is None:
            self.start_from_weights()
            return
        state = restore(held_pieces(self.model, self.optimizer, self.mesh, self.sharding), path, self.mesh)
        self.step, self.tokens_seen = state["step"], state["tokens_seen"]
        if self.step > self.config.max_steps:
            raise UserError(
                f"{path} is beyond max_steps={self.config.max_steps}; raise max_steps or use another name for a new run"
            )
        if self.mesh.is_main:
            print(f"resumed from {path}")

    def start_from_weights(self) -> None:
        """Of a fresh run: the weights of `init_from`, where it is given."""
        if self.config.init_from is None:
            return
        path = weights_path(self.config.init_from)
        if Tokenizer.load(path).sha256 != self.tokenizer.sha256:
            raise UserError(
                f"init_from={path} has another tokenizer than data.tokenizer={self.config.data.tokenizer}: its weights "
                f"know other tokens; tokenise the data with {path}"
            )
        held = held_pieces(self.model, self.optimizer, self.mesh, self.sharding)
        load_weights(held, path, self.mesh, has_adapters=self.config.lora.rank > 0)
        if self.mesh.is_main:
            print(f"started from the weights of {path}")


def weights_path(init_from: str) -> Path:
    """The checkpoint that `init_from` names: a directory that is one, or a run's newest whole one."""
    path = Path(init_from)
    if (path / "index.json").is_file():
        return path
    return resolve_checkpoint(init_from, None)


def set_up(config: TrainConfig, mesh: Mesh, task: Task = Task()) -> Trainer:
    """Build every part of a run and restore its newest checkpoint; UserError for whatever does not fit."""
    if mesh.device.type == "cpu":
        keep_freed_memory()  # before the calibration, which then sees the allocator that the run will have
    config.parallel.check(mesh.world_size)
    config.grad_accum_steps(mesh.size("dp"))
    tokenizer = Tokenizer.load(config.data.tokenizer)
    config = resolve(config, tokenizer, mesh)
    loader, validation = (task.open_data or open_data)(config, tokenizer, mesh)
    parts = build_model(config, mesh)
    config.compile = parts.compile
    loss = make_loss(config.kernels, config.z_loss)
    forward_loss = make_forward_loss(parts.head_model, loss, config.compile, parts.shards)
    run_dir = RunDir(f"{config.runs_dir}/{config.name}")
    trainer = Trainer(
        config=config,
        mesh=mesh,
        hardware=detect_hardware(config.hardware, mesh.device, dtype=config.dtype),
        tokenizer=tokenizer,
        loader=loader,
        validation=validation,
        model=parts.model,
        loss=loss,
        optimizer=parts.optimizer,
        training_step=TrainingStep(config, mesh, parts, forward_loss),
        run_dir=run_dir,
        record=Record(run_dir, config, mesh.is_main),
        throughput=Throughput(mesh.device),
        communication=Communication(mesh),
        task=task,
        sharding=parts.strategy if hasattr(parts.strategy, "pieces") else None,
    )
    trainer.resume()
    trainer.communication.take(OTHER, trainer.step)  # weights and checkpoint, before the first step
    return trainer


def resolve(config: TrainConfig, tokenizer: Tokenizer, mesh: Mesh) -> TrainConfig:
    """The config with everything that depended on the tokenizer or the machine filled in, as it is written down."""
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if mesh.device.type == "cuda" else "float32"
    model = config.model.with_vocab_of(tokenizer.vocab_size)
    return replace(config, dtype=dtype, model=model)


def open_data(config: TrainConfig, tokenizer: Tokenizer, mesh: Mesh) -> tuple[BatchLoader, ValidationSet]:
    """The training batches and the validation windows."""
    data = config.data
    sources = open_sources(data.tokens, "train", tokenizer.sha256)
    settings = LoaderConfig(
        seq_len=data.seq_len,
        num_sequences=config.global_batch_tokens // data.seq_len,
        seed=config.seed,
        order=data.order,
        document_masking=data.document_masking,
        pin_memory=mesh.device.type == "cuda",
    )
    loader = BatchLoader(list(sources.values()), source_weights(sources, data.weights), settings)
    validation_sources = list(open_sources(data.tokens, "val", tokenizer.sha256).values())
    validation = ValidationSet(validation_sources, data.seq_len, config.validation_tokens, data.document_masking)
    return loader, validation


def build_model(config: TrainConfig, mesh: Mesh) -> Parallelized:
    """The model with its initial weights, on the device, with the strategies and the optimizer applied."""
    if config.dtype == "bfloat16":
        torch.set_float32_matmul_precision("high")  # what is left in float32 may use TF32 tensor cores
    if config.parallel.zero >= 2 and mesh.is_active("dp_cp"):  # each rank draws its shards, and never the whole model
        return parallelize(transformer_on_meta(config.model), config, mesh)
    model = Transformer(config.model)
    initialise(model, config.seed)
    model.to(mesh.device)
    return parallelize(model, config, mesh)
