"""What `python -m llm.plan` takes: a model, a device, a cluster, and which layouts to compare."""

from dataclasses import dataclass, field

from configs.errors import UserError, check_choice, check_positive
from llm.args import HardwareConfig, KernelsConfig, ModelConfig
from llm.optimizer import OptimizerConfig
from llm.plan_memory import CHECKPOINTING
from parallel.context_parallel_layout import MODES as CONTEXT_MODES
from parallel.pipeline_schedules import SCHEDULES, SPLIT_SCHEDULES

LISTS = ("micro_batch_size", "zero", "dp_shard", "checkpointing", "pp_schedule", "cp_mode")
DEGREES = ("tp", "pp", "cp")
CONTEXT_TOKENS = 2048  # of a sequence on a rank: a ring's messages hide behind blocks from about there on


@dataclass
class PlanConfig:
    """Every combination of the lists is a layout; those that cannot be are left out with a reason."""

    model: ModelConfig = "???"
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    nodes: int = 1
    gpus_per_node: int | None = None  # null: the hardware's
    seq_len: int = 4096
    global_batch_tokens: int = 4_194_304
    micro_batch_size: list[int] = field(default_factory=lambda: [1, 2, 4])  # sequences a rank takes at once
    zero: list[int] = field(default_factory=lambda: [0, 1, 2, 3])
    # Ranks that share one copy; 0 stands for all of them, -1 for those of a node.
    dp_shard: list[int] = field(default_factory=lambda: [0, -1])
    checkpointing: list[str] = field(default_factory=lambda: ["none", "full"])
    # null: every power of two that can be; tp stays within a node, and a cp rank keeps CONTEXT_TOKENS of a sequence.
    tp: list[int] | None = None
    pp: list[int] | None = None
    cp: list[int] | None = None
    pp_schedule: list[str] = field(default_factory=lambda: ["1f1b", "interleaved", *SPLIT_SCHEDULES])
    cp_mode: list[str] = field(default_factory=lambda: ["ring", "ulysses"])
    reduce_dtype: str | None = None
    bucket_mb: float = 25.0
    dtype: str = "bfloat16"
    compile: str = "block"
    memory_share: float = 0.92  # of the device's memory that tensors may take: the rest is for libraries and fragments
    dry_run: bool = True  # run the best layout of each kind on a fake process group and compare its messages
    rows: int = 12  # of the table
    output: str | None = None  # a directory for plan.json and plan.html

    def __post_init__(self) -> None:
        check_positive(
            nodes=self.nodes, seq_len=self.seq_len, global_batch_tokens=self.global_batch_tokens, rows=self.rows,
            memory_share=self.memory_share, bucket_mb=self.bucket_mb,
        )  # fmt: skip
        check_choice("dtype", self.dtype, ("bfloat16", "float32"))
        check_choice("compile", self.compile, ("none", "block", "model"))
        for name in (*LISTS, *DEGREES):
            if getattr(self, name) == []:
                raise UserError(f"{name}=[] leaves nothing to plan; give at least one value, such as {name}=[1]")
        for value in self.checkpointing:
            check_choice("checkpointing", value, CHECKPOINTING)
        for value in self.zero:
            if value not in (0, 1, 2, 3):
                raise UserError(f"zero={value} must be 0, 1, 2 or 3")
        for name in ("micro_batch_size", *DEGREES):
            for value in getattr(self, name) or []:
                check_positive(**{name: value})
        for value in self.pp_schedule:
            check_choice("pp_schedule", value, SCHEDULES)
        for value in self.cp_mode:
            check_choice("cp_mode", value, CONTEXT_MODES)
        if self.gpus_per_node is not None:
            check_positive(gpus_per_node=self.gpus_per_node)

    @property
    def node_size(self) -> int:
        return self.gpus_per_node or self.hardware.gpus_per_node

    @property
    def world_size(self) -> int:
        return self.nodes * self.node_size

    def degrees(self) -> dict[str, list[int]]:
        """The degrees of each axis to try."""
        heads, layers = self.model.num_heads, self.model.num_layers
        limits = {
            "tp": min(self.node_size, heads),
            "pp": min(self.world_size, layers // 2),
            "cp": min(self.world_size, self.seq_len // CONTEXT_TOKENS),
        }
        return {name: getattr(self, name) or powers_of_two(max(1, limit)) for name, limit in limits.items()}


def powers_of_two(limit: int) -> list[int]:
    return [1 << power for power in range(limit.bit_length())]
