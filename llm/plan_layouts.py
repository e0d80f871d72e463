"""Every layout that a plan asks for, with its memory, its bytes and its step time, or the reason why it cannot be."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from configs.errors import UserError
from llm.args import DataConfig, ParallelConfig, TrainConfig
from llm.cost_model_counts import train_flops_per_token
from llm.hardware_calibration import Rates
from llm.parallelize_context import check_context
from llm.parallelize_pipeline import check_pipeline
from llm.parallelize_tensor import check_tensor
from llm.plan_config import PlanConfig
from llm.plan_memory import CHECKPOINTING, RankMemory
from llm.plan_memory_layouts import layout_memory
from llm.plan_shapes import data_layout, meta_params, rank_messages
from llm.plan_time import check_known, cluster_of, datasheet_rates
from llm.plan_time_layouts import Machine, layout_time
from parallel.cost_model import moved_bytes
from parallel.cost_model_traffic import DataLayout, Message, Param
from parallel.mesh_degrees import Degrees, known_groups

INTERLEAVED_CHUNKS = 2  # stages on each rank
SHOWN_LARGE = 32  # of the layouts that do not fit


@dataclass(frozen=True)
class Choice:
    """One combination of a plan's lists."""

    zero: int
    dp_shard: int
    micro_batch_size: int
    checkpointing: str
    tp: int = 1
    pp: int = 1
    pp_schedule: str = "1f1b"
    cp: int = 1
    cp_mode: str = "ring"

    @property
    def shared(self) -> int:
        """Ranks that work on the same rows of the batch."""
        return self.tp * self.pp * self.cp

    @property
    def kind(self) -> tuple[int | str, ...]:
        """All but the batch and checkpointing."""
        return (self.zero, self.dp_shard, self.tp, self.pp, self.pp_schedule, self.cp, self.cp_mode)


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
    idle_s: float  # of it, waiting for the pipeline to fill and drain
    bound: str  # "device", "network" (what is exposed is the larger part), "pipeline" (idle is) or "host"
    tokens_per_s: float
    mfu: float

    @property
    def name(self) -> str:
        """As overrides of llm.training, but for the batch."""
        choice = self.choice
        parts = [f"zero={choice.zero}", f"dp={self.degrees.dp}"]
        if choice.zero and self.degrees.dp_shard != self.degrees.dp:
            parts.append(f"dp_shard={self.degrees.dp_shard}")
        parts += [f"{axis}={getattr(choice, axis)}" for axis in ("tp", "pp", "cp") if getattr(choice, axis) > 1]
        if choice.pp > 1:
            parts.append(f"pp_schedule={choice.pp_schedule}")
        if choice.cp > 1 and choice.cp_mode != "ring":
            parts.append(f"cp_mode={choice.cp_mode}")
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
        self.too_large = 0  # layouts that do not fit

    def rows(self) -> list[PlanRow]:
        """The layouts that fit, quickest first, then the smallest of those that do not, by the memory that they need.

        Where ranks share a model's products, recomputation is tried only where its layout does not fit without.
        """
        fitting, large, without = [], [], set()
        for choice, _, count in sorted(self.choices(), key=lambda found: CHECKPOINTING.index(found[0].checkpointing)):
            unkept = replace(choice, checkpointing="")
            if choice.shared > 1 and unkept in without:
                continue
            memory = self.memory(self.train_config(choice, count))
            if memory.peak_bytes > self.limit_bytes:
                large.append((choice, count, memory))
                continue
            without.add(unkept)
            fitting.append(self.evaluate(choice, count, memory))
        large.sort(key=lambda found: found[2].peak_bytes)
        self.too_large = len(large)
        return sorted(fitting, key=lambda row: row.step_s) + [self.evaluate(*found) for found in large[:SHOWN_LARGE]]

    def fits(self, row: PlanRow) -> bool:
        return row.memory.peak_bytes <= self.limit_bytes

    def choices(self) -> Iterator[tuple[Choice, Degrees, int]]:
        """The combinations that can be, each once, with the number of micro-batches; the others go to `refused`."""
        config, seen = self.config, set()
        tried = config.degrees()
        for tp, pp, cp in product(tried["tp"], tried["pp"], tried["cp"]):
            if config.world_size % (tp * pp * cp):
                self.refused["tp x pp x cp"] = f"must divide the {config.world_size} ranks; other products are left out"
                continue
            schedules = config.pp_schedule if pp > 1 else ["1f1b"]
            modes = config.cp_mode if cp > 1 else ["ring"]
            for schedule, mode, zero, wanted, size, kept in product(
                schedules, modes, config.zero, config.dp_shard, config.micro_batch_size, config.checkpointing
            ):
                choice = Choice(zero, 1, size, kept, tp, pp, schedule, cp, mode)
                shard = self.shard_of(choice, wanted)
                choice = Choice(zero, shard, size, kept, tp, pp, schedule, cp, mode)
                if choice not in seen:
                    seen.add(choice)
                    yield from self.checked(choice)

    def shard_of(self, choice: Choice, wanted: int) -> int:
        """dp_shard of a choice: of its data ranks, all for 0, those of a node for -1."""
        if choice.zero == 0:
            return 1
        data = self.config.world_size // choice.shared
        of_node = max(1, self.config.node_size // (choice.tp * choice.cp))
        return {0: data, -1: min(of_node, data)}.get(wanted, wanted)

    def checked(self, choice: Choice) -> Iterator[tuple[Choice, Degrees, int]]:
        """The choice, if nothing speaks against it."""
        config, data = self.config, self.config.world_size // choice.shared
        tokens = choice.micro_batch_size * config.seq_len * data
        if choice.zero and data * choice.cp == 1:
            self.refused[f"zero={choice.zero} of one rank"] = "one rank has nobody to share with"
        elif data % choice.dp_shard:
            self.refused[f"dp_shard={choice.dp_shard}"] = f"must divide the {data} ranks"
        elif config.global_batch_tokens % tokens:
            self.refused[f"micro_batch_size={choice.micro_batch_size}"] = (
                f"global_batch_tokens={config.global_batch_tokens} is no multiple of {choice.micro_batch_size} x "
                f"{config.seq_len} x {data} = {tokens}; "
                f"use {max(1, round(config.global_batch_tokens / tokens)) * tokens}"
            )
        else:
            count = config.global_batch_tokens // tokens
            try:
                train = self.train_config(choice, count)
                for axis, check in (("tp", check_tensor), ("pp", check_pipeline), ("cp", check_context)):
                    if getattr(choice, axis) > 1:
                        check(train)
                if train.kernels.cuda_graph and choice.pp == 1 < config.world_size:
                    raise UserError(
                        f"kernels.cuda_graph=true runs on one rank or with pp > 1, not on {config.world_size} with "
                        f"pp=1; use kernels.cuda_graph=false"
                    )
            except UserError as error:
                self.refuse(choice, str(error))
                return
            yield choice, train.parallel.degrees().resolve(config.world_size), count

    def refuse(self, choice: Choice, reason: str) -> None:
        """Each reason once, whatever its numbers, under the first choice that met it."""
        if without_numbers(reason) not in map(without_numbers, self.refused.values()):
            self.refused[f"tp={choice.tp},pp={choice.pp},cp={choice.cp},zero={choice.zero}"] = reason

    def train_config(self, choice: Choice, micro_batches: int) -> TrainConfig:
        """The run that a choice stands for, with so many micro-batches in a step."""
        config, data = self.config, self.config.world_size // choice.shared
        parallel = ParallelConfig(
            dp=data, dp_shard=choice.dp_shard if choice.zero else None, zero=choice.zero, bucket_mb=config.bucket_mb,
            reduce_dtype=config.reduce_dtype, activation_checkpointing=choice.checkpointing, tp=choice.tp,
            pp=choice.pp, pp_schedule=choice.pp_schedule, cp=choice.cp, cp_mode=choice.cp_mode,
            pp_chunks=INTERLEAVED_CHUNKS if choice.pp_schedule == "interleaved" else 1,
        )  # fmt: skip
        return TrainConfig(
            name="plan", model=self.model, data=DataConfig(seq_len=config.seq_len), dtype=config.dtype,
            compile=config.compile, kernels=config.kernels, optimizer=config.optimizer, parallel=parallel,
            micro_batch_size=choice.micro_batch_size,
            global_batch_tokens=micro_batches * choice.micro_batch_size * config.seq_len * data,
        )  # fmt: skip

    def layout(self, choice: Choice, micro_batches: int) -> DataLayout:
        train = self.train_config(choice, micro_batches)
        return data_layout(
            train.parallel, train.parallel.degrees().resolve(self.config.world_size), micro_batches, train.dtype
        )

    def messages(self, choice: Choice, micro_batches: int) -> list[Message]:
        """Of rank 0."""
        train = self.train_config(choice, micro_batches)
        return rank_messages(self.params, train, self.config.world_size, micro_batches)

    def evaluate(self, choice: Choice, micro_batches: int, memory: RankMemory) -> PlanRow:
        world_size, machine, known = self.config.world_size, Machine("cuda", self.rates, self.cluster), {}

        def measure(count: int) -> dict[str, float]:
            """Seconds and bytes with so many micro-batches."""
            time = layout_time(self.train_config(choice, count), self.params, machine, world_size, known=known)
            step, idle = time.step, time.idle_s or 0.0
            return {"step_s": step.step_s, "compute_s": step.compute_s, "host_s": time.host_s, "idle_s": idle}

        def sent(count: int) -> dict[str, float]:
            """Bytes that leave rank 0, by axis."""
            sums: dict[str, float] = defaultdict(float)
            for message in self.messages(choice, count):
                sums[message.axis] += moved_bytes(message.op, message.nbytes, message.ranks)
            return sums

        totals = extrapolate(measure, micro_batches, choice.pp)
        step_s = max(totals["step_s"], totals["host_s"])
        tokens_per_s = self.config.global_batch_tokens / step_s
        peak = self.config.hardware.bf16_flops if self.config.dtype == "bfloat16" else self.config.hardware.fp32_flops
        flops = train_flops_per_token(self.model, self.config.seq_len) * tokens_per_s
        axes = extrapolate(sent, micro_batches, choice.pp)
        train = self.train_config(choice, micro_batches)
        degrees = train.parallel.degrees().resolve(world_size)
        return PlanRow(
            choice, degrees, micro_batches, memory, axes, step_s,
            max(0.0, totals["step_s"] - totals["compute_s"] - totals["idle_s"]), totals["idle_s"], bound_of(totals),
            tokens_per_s, flops / (peak * world_size),
        )  # fmt: skip

    def memory(self, train: TrainConfig) -> RankMemory:
        """Of the rank that needs most: a pipeline's first holds most micro-batches, its last the logits."""
        world_size = self.config.world_size
        pipelines = known_groups(train.parallel.degrees().resolve(world_size), "pp")[0]
        ranks = sorted({pipelines[0], pipelines[-1]})
        found = [layout_memory(train, self.params, "cuda", world_size, rank) for rank in ranks]
        return max(found, key=lambda memory: memory.peak_bytes)


def without_numbers(text: str) -> str:
    return "".join(character for character in text if not character.isdigit())


def bound_of(totals: dict[str, float]) -> str:
    """What a step's time is mostly made of."""
    if totals["host_s"] > totals["step_s"]:
        return "host"
    waited = totals["step_s"] - totals["compute_s"]
    if waited <= totals["step_s"] / 2:
        return "device"
    return "pipeline" if totals["idle_s"] > waited / 2 else "network"


def extrapolate(measure: Callable[[int], dict[str, float]], count: int, ranks: int = 1) -> dict[str, float]:
    """The figures at `count` micro-batches: each one after the second adds the same, in a pipeline each after 2 P.

    There schedules come in rounds of P micro-batches, so rounds are compared.
    """
    few = 2 if ranks == 1 else 2 * ranks + count % ranks
    if count <= few + ranks:
        return measure(count)
    low, high = measure(few), measure(few + ranks)
    rounds = (count - few) / ranks
    return {name: low.get(name, 0.0) + rounds * (high[name] - low.get(name, 0.0)) for name in high}


def best_of_each_kind(rows: list[PlanRow]) -> list[PlanRow]:
    """The first row of every kind of layout, in the order of the table."""
    kinds: dict[tuple[int | str, ...], PlanRow] = {}
    for row in rows:
        kinds.setdefault(row.choice.kind, row)
    return list(kinds.values())
