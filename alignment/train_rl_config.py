"""Everything that `python -m alignment.train_rl` takes, as typed dataclasses that check their own values."""

from dataclasses import dataclass, field

from alignment.dataset import DatasetConfig
from alignment.grpo import AlgorithmConfig
from alignment.r1_prompt import PromptConfig
from alignment.rollout import RolloutConfig
from configs.errors import UserError, check_choice, check_positive
from llm.args import (
    CheckpointConfig,
    DataConfig,
    HardwareConfig,
    KernelsConfig,
    ModelConfig,
    ParallelConfig,
    TrackingConfig,
    TrainConfig,
)
from llm.optimizer import OptimizerConfig
from llm.sampling import SamplingConfig
from llm.schedule import ScheduleConfig


@dataclass
class TrainRlConfig:
    """One run of reinforcement learning with verifiable rewards.

    A batch is `prompts_per_batch` groups of `group_size` completions. It is used for epochs_per_batch x
    updates_per_batch optimizer steps: `updates_per_batch` shares of its groups, `epochs_per_batch` times.
    """

    name: str = "???"
    runs_dir: str = "runs"
    resume: str = "auto"  # auto: the newest whole checkpoint of this run, else a fresh start; or "none"
    seed: int = 1337
    device: str = "auto"
    dtype: str = "auto"  # of the trainer's matrix products: bfloat16 autocast on a GPU, float32 on a CPU
    compile: str = "none"  # none or block
    init_from: str = "???"  # a run directory (its newest checkpoint) or one checkpoint's directory
    num_batches: int = 100
    max_time_s: float | None = None  # stop, saved and whole, after this long
    prompts_per_batch: int = 16
    group_size: int = 8
    updates_per_batch: int = 1
    epochs_per_batch: int = 1
    one_step_off: bool = False  # write batch k + 1 with the weights from before the updates of batch k
    rollout_ranks: int = 0  # of torchrun's ranks, the last so many only write completions; 0: every rank does both
    max_tries: int = 4  # dynamic sampling: rounds of rollouts for one batch, at most
    max_new_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    micro_batch_tokens: int = 16_384  # padded tokens that a rank takes through the model at once
    evaluate_every: int = 10  # batches; also before the first and after the last
    evaluate_samples: int = 1  # of each held-out problem at `temperature`, beside its greedy answer
    log_completions: int = 16  # of a batch, in completions.jsonl
    train_data: list[DatasetConfig] = field(default_factory=list)  # all their problems, shuffled together each epoch
    held_out_data: DatasetConfig = "???"
    grader_workers: int = 0  # processes that decide LaTeX which the exact rules leave open; 0: it counts as wrong
    prompt: PromptConfig = field(default_factory=lambda: PromptConfig("r1_short"))
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)  # every_steps counts batches here
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, ("auto", "float32", "bfloat16"))
        check_choice("compile", self.compile, ("none", "block"))
        check_choice("device", self.device, ("auto", "cpu", "cuda"))
        check_choice("resume", self.resume, ("auto", "none"))
        names = (
            "num_batches", "prompts_per_batch", "group_size", "updates_per_batch", "epochs_per_batch", "max_tries",
            "max_new_tokens", "micro_batch_tokens", "evaluate_every", "temperature",
        )  # fmt: skip
        check_positive(**{name: getattr(self, name) for name in names})
        if not self.train_data:
            raise UserError("train_data=[]: there is nothing to train on; name at least one data set (train_data)")
        if self.prompts_per_batch % self.updates_per_batch:
            raise UserError(
                f"updates_per_batch={self.updates_per_batch} must divide prompts_per_batch={self.prompts_per_batch}"
            )
        if self.evaluate_samples < 0:
            raise UserError(
                f"evaluate_samples={self.evaluate_samples} must not be negative; use 0 for greedy answers alone"
            )
        if self.rollout_ranks < 0:
            raise UserError(f"rollout_ranks={self.rollout_ranks} must not be negative; use 0 for ranks that do both")
        parallel = self.parallel
        for axis in ("tp", "cp", "pp", "ep"):
            if getattr(parallel, axis) > 1:
                raise UserError(
                    f"parallel.{axis}={getattr(parallel, axis)} is not implemented for train_rl, whose layouts are "
                    f"data parallel (parallel.zero=0 to 3) and rollout_ranks; use parallel.{axis}=1"
                )
        if self.kernels.cuda_graph:
            raise UserError("kernels.cuda_graph=true needs batches of one shape, completions differ; use false")
        if self.group_size == 1 and self.algorithm.baseline != "none":
            raise UserError(
                f"group_size=1 leaves algorithm.baseline={self.algorithm.baseline} nothing to compare with: every "
                f"advantage is 0; use group_size=2 or more, or algorithm.baseline=none"
            )

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps."""
        return self.updates_per_batch * self.epochs_per_batch

    def sampling(self) -> SamplingConfig:
        kept = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        return SamplingConfig(temperature=self.temperature, seed=self.seed, **kept)

    def train_config(self, model: ModelConfig, tokenizer: str, dtype: str) -> TrainConfig:
        """The same run as llm's training step and strategies know it."""
        return TrainConfig(
            name=self.name, runs_dir=self.runs_dir, seed=self.seed, device=self.device, dtype=dtype,
            compile=self.compile, max_steps=self.num_batches * self.steps_per_batch, model=model,
            data=DataConfig(tokens="", tokenizer=tokenizer, seq_len=model.max_seq_len), optimizer=self.optimizer,
            schedule=self.schedule, parallel=self.parallel, kernels=self.kernels, tracking=self.tracking,
            hardware=self.hardware,
        )  # fmt: skip
