"""Every layout that a plan asks for, with its memory, its bytes and its step time, or the reason why it cannot be."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from llm.args import ParallelConfig
from llm.cost_model_counts import Workload, train_flops_per_token
from llm.hardware_calibration import Rates
from llm.plan_config import PlanConfig
from llm.plan_memory import RankMemory, rank_memory
from llm.plan_shapes import data_layout, meta_params
from llm.plan_time import RankTime, check_known, cluster_of, datasheet_rates, message_seconds, rank_time
from parallel.cost_model import moved_bytes
from parallel.cost_model_matrices import matrix_messages
from parallel.cost_model_traffic import DataLayout, Message, Param, step_messages
from parallel.mesh_degrees import Degrees


@dataclass(frozen=True)
class Choice:
    """One combination of a plan's lists."""

    zero: int
    dp_shard: int
    micro_batch_size: int
    checkpointing: str


@dataclass(frozen=True)
class PlanRow:
    """What one layout needs; bytes are those that leave one GPU in a step, by mesh axis."""

    choice: Choice
    degrees: Degrees
    micro_batches: int
    memory: RankMemory
    axis_bytes: dict[str, float]
    step_s: float
    exposed_s: float
    bound: str  # "device", "network" (what is exposed is the larger part) or "host"
    tokens_per_s: float
    mfu: float

    @property
    def name(self) -> str:
        """As overrides of llm.training, but for the batch."""
        parts = [f"zero={self.choice.zero}", f"dp={self.degrees.dp}"]
        if self.choice.zero and self.degrees.dp_shard != self.degrees.dp:
            parts.append(f"dp_shard={self.degrees.dp_shard}")
        return ",".join(parts)


class Planner:
    """What all layouts of a plan have in common: the model's shapes, the device's rates, the links."""

    def __init__(self, config: PlanConfig):
        check_known(config.hardware)
        self.config = config
        self.model = config.model.with_vocab_of(2)
        self.params: list[Param] = meta_params(self.model, config.optimizer.name)
        self.cluster = cluster_of(config.hardware, config.nodes, config.node_size)
        self.rates: Rates = datasheet_rates(config.hardware, config.dtype)
        self.limit_bytes = config.memory_share * config.hardware.memory_bytes
        self.refused: dict[str, str] = {}

    def rows(self) -> list[PlanRow]:
        """The layouts that fit, quickest first, then those that do not, by the memory that they need."""
        found = [self.evaluate(choice, degrees, count) for choice, degrees, count in self.choices()]
        fitting = sorted((row for row in found if self.fits(row)), key=lambda row: row.step_s)
        return fitting + sorted((row for row in found if not self.fits(row)), key=lambda row: row.memory.peak_bytes)

    def fits(self, row: PlanRow) -> bool:
        return row.memory.peak_bytes <= self.limit_bytes

    def choices(self) -> Iterator[tuple[Choice, Degrees, int]]:
        """The combinations that can be, each once; the others go to `refused` with a reason."""
        config, world, seen = self.config, self.config.world_size, set()
        for zero, wanted, size, kept in product(
            config.zero, config.dp_shard, config.micro_batch_size, config.checkpointing
        ):
            shard = 1 if zero == 0 else {0: world, -1: min(config.node_size, world)}.get(wanted, wanted)
            choice, tokens = Choice(zero, shard, size, kept), size * config.seq_len * world
            if choice in seen:
                continue
            seen.add(choice)
            if zero and world == 1:
                self.refused[f"zero={zero}"] = "one rank has nobody to share with"
            elif world % shard:
                self.refused[f"dp_shard={shard}"] = f"must divide the {world} ranks"
            elif config.global_batch_tokens % tokens:
                self.refused[f"micro_batch_size={size}"] = (
                    f"global_batch_tokens={config.global_batch_tokens} is no multiple of {size} x {config.seq_len} x "
                    f"{world} = {tokens}; use {max(1, round(config.global_batch_tokens / tokens)) * tokens}"
                )
            else:
                yield choice, Degrees(world, shard).resolve(world), config.global_batch_tokens // tokens

    def workload(self, choice: Choice, micro_batches: int) -> Workload:
        config = self.config
        return Workload(
            self.model, choice.micro_batch_size, config.seq_len, config.optimizer.name, micro_batches, "cuda",
            config.dtype, config.compile, False, config.world_size, config.kernels,
        )  # fmt: skip

    def layout(self, choice: Choice, degrees: Degrees, micro_batches: int) -> DataLayout:
        config = self.config
        parallel = ParallelConfig(
            dp_shard=choice.dp_shard if choice.zero else None, zero=choice.zero, bucket_mb=config.bucket_mb,
            reduce_dtype=config.reduce_dtype,
        )  # fmt: skip
        return data_layout(parallel, degrees, micro_batches, config.dtype)

    def messages(self, layout: DataLayout) -> list[Message]:
        return [*step_messages(self.params, layout), *matrix_messages(self.params, layout, rank=0)]

    def evaluate(self, choice: Choice, degrees: Degrees, micro_batches: int) -> PlanRow:
        work, layout = self.workload(choice, micro_batches), self.layout(choice, degrees, micro_batches)
        memory = rank_memory(work, self.params, layout, choice.checkpointing)
        seconds_of = message_seconds(degrees, self.cluster)

        def measure(count: int) -> dict[str, float]:
            """Seconds and bytes with so many micro-batches."""
            work, layout = self.workload(choice, count), self.layout(choice, degrees, count)
            messages = self.messages(layout)
            time = rank_time(work, self.rates, layout, messages, seconds_of, choice.checkpointing)
            return figures(time, messages)

        totals = extrapolate(measure, micro_batches)
        step_s = max(totals["step_s"], totals["host_s"])
        tokens_per_s = self.config.global_batch_tokens / step_s
        peak = self.config.hardware.bf16_flops if self.config.dtype == "bfloat16" else self.config.hardware.fp32_flops
        flops = train_flops_per_token(self.model, self.config.seq_len) * tokens_per_s
        axes = {name: value for name, value in totals.items() if name.startswith("dp")}
        exposed = totals["step_s"] - totals["compute_s"]
        bound = "host" if totals["host_s"] > totals["step_s"] else "network" if exposed > step_s / 2 else "device"
        mfu = flops / (peak * self.config.world_size)
        return PlanRow(choice, degrees, micro_batches, memory, axes, step_s, exposed, bound, tokens_per_s, mfu)


def figures(time: RankTime, messages: list[Message]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for message in messages:
        sums[message.axis] += moved_bytes(message.op, message.nbytes, message.ranks)
    return sums | {"step_s": time.step.step_s, "compute_s": time.step.compute_s, "host_s": time.host_s}


def extrapolate(measure: Callable[[int], dict[str, float]], count: int) -> dict[str, float]:
    """The figures at `count` micro-batches: each one after the second adds the same."""
    if count <= 3:
        return measure(count)
    two, three = measure(2), measure(3)
    return {name: two.get(name, 0.0) + (count - 2) * (three[name] - two.get(name, 0.0)) for name in three}


def best_of_each_kind(rows: list[PlanRow]) -> list[PlanRow]:
    """The first row of every (zero, dp_shard), in the order of the table."""
    kinds: dict[tuple[int, int], PlanRow] = {}
    for row in rows:
        kinds.setdefault((row.choice.zero, row.choice.dp_shard), row)
    return [replace(row) for row in kinds.values()]
