"""Step time of any layout: a rank's products, what it waits for within its layers, and the pipeline's idle time.

Tensor parallelism's crossings stand between products and are waited for; of crossings in k chunks one is. A ring's
messages hide behind its blocks of attention (cost_model_context), gathered keys and traded heads do not. A pipeline is
run on paper with each stage's own seconds (pipeline_schedules_simulation); its data ranks sum gradients afterwards.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from llm.args import TrainConfig
from llm.cost_model_counts import Workload
from llm.cost_model_time import attention_times, block_products_s, output_product_s, predict_step_time
from llm.hardware_calibration import Rates
from llm.plan_rank import RankShare, rank_share, stages_of
from llm.plan_shapes import rank_messages
from llm.plan_shapes_pipeline import pipeline_shape
from llm.plan_time import RankTime, compute_of, message_losses, message_seconds
from llm.plan_time_passes import PassMessages
from parallel.cost_model import Cluster
from parallel.cost_model_context import ring_backward_time, ring_forward_time
from parallel.cost_model_pipeline import simulate_stages
from parallel.cost_model_timeline import Compute, StepTime, step_time
from parallel.cost_model_traffic import ITEM_BYTES, Message, Param
from parallel.mesh_degrees import Degrees, known_groups
from parallel.pipeline_schedules import SPLIT_SCHEDULES
from parallel.pipeline_schedules_simulation import Durations, Simulation

COLLECTIVE_OPS = 12  # operations' worth of the host's time that one collective takes to issue, assumed


@dataclass(frozen=True)
class Machine:
    """What a step runs on: a device's rates and the links between devices."""

    device: str
    rates: Rates
    cluster: Cluster


@dataclass(frozen=True)
class RankWork:
    """One rank's share, its messages, and its seconds by stage of one micro-batch."""

    share: RankShare
    messages: list[Message]
    compute: Compute
    host_s: float
    rates: Rates
    stalls_s: dict[str, float]  # of a micro-batch, within its layers, over tp and over cp

    def waits(self, seconds_of: Callable[[Message], float]) -> dict[str, float]:
        """Seconds of a step that this rank waits for messages within its layers and for what tp sums after them."""
        waits = {axis: self.share.layout.micro_batches * stall for axis, stall in self.stalls_s.items()}
        if "tp" in waits:
            waits["tp"] += sum(seconds_of(m) for m in self.messages if m.axis == "tp" and m.phase == "matrices")
        return waits


KnownMessages = dict[int, list[Message]]  # by rank of a pipeline: those of one micro-batch


def layout_time(
    config: TrainConfig,
    params: list[Param],
    machine: Machine,
    world_size: int,
    rank: int = 0,
    known: KnownMessages | None = None,
) -> RankTime:
    """Seconds of one optimizer step as rank `rank` sees it; `params` are the whole model's, config is resolved.

    Who asks for one pipeline with several numbers of micro-batches gives the same `known`, empty at first.
    """
    degrees = config.parallel.degrees().resolve(world_size)
    seconds_of = message_seconds(degrees, machine.cluster)
    if degrees.pp > 1:
        return pipeline_time(config, params, machine, degrees, rank, known)
    own = rank_work(config, params, machine, degrees, rank)
    data = [message for message in own.messages if is_of_data(message)]
    step = step_time(data, own.compute, own.share.layout, seconds_of, message_losses(machine.cluster, own.share.layout))
    waits = own.waits(seconds_of)
    rest = step.exposed_s - own.share.layout.micro_batches * sum(own.stalls_s.values())
    for axis in dict.fromkeys(message.axis for message in data if message.phase != "host"):  # the first has them all
        waits[axis], rest = max(0.0, rest), 0.0
    return RankTime(after(step, own.messages, seconds_of), own.host_s, exposed_by_axis=waits)


def is_of_data(message: Message) -> bool:
    return message.axis.startswith("dp")


def after(step: StepTime, messages: list[Message], seconds_of: Callable[[Message], float]) -> StepTime:
    """The step with the sums of shares and Muon's gathers over tp, which follow backward."""
    waited = sum(seconds_of(m) for m in messages if m.axis == "tp" and m.phase == "matrices")
    return replace(step, step_s=step.step_s + waited, communication_s=step.communication_s + waited)


def rank_work(
    config: TrainConfig,
    params: list[Param],
    machine: Machine,
    degrees: Degrees,
    rank: int,
    known: KnownMessages | None = None,
) -> RankWork:
    world_size = degrees.grid().size
    share = rank_share(config, params, machine.device, world_size, rank)
    count = share.layout.micro_batches
    if degrees.pp > 1:  # the table says how often: of the messages within stages those of one micro-batch are enough
        config, count = replace(config, global_batch_tokens=config.global_batch_tokens // count), 1
    messages = None if known is None else known.get(rank)
    if messages is None:
        messages = rank_messages(params, config, world_size, count, rank)
    if known is not None:
        known[rank] = messages
    data = [message for message in messages if is_of_data(message)] if degrees.pp == 1 else []
    checkpointing = config.parallel.activation_checkpointing
    compute = compute_of(share.work, machine.rates, share.layout, checkpointing, data)
    seconds_of = message_seconds(degrees, machine.cluster)
    stalls = {
        axis: stalls_of([m for m in messages if m.axis == axis], compute, share.work, machine.rates, seconds_of)
        for axis in ("tp", "cp")
        if getattr(degrees, axis) > 1
    }
    compute = with_stalls(compute, list(stalls.values()))
    host = predict_step_time(share.work, machine.rates).host_s
    # Backward in two parts costs the host no more: 0.26 and 0.29 s with it, 0.25 and 0.33 without, on two H200.
    if machine.device == "cuda":
        host += COLLECTIVE_OPS * machine.rates.op_overhead_s * len(messages) * share.layout.micro_batches / count
    waits = {axis: sum(map(sum, both)) for axis, both in stalls.items()}
    return RankWork(share, messages, compute, host, machine.rates, waits)


Stalls = tuple[list[float], list[float]]  # seconds by stage, of forward and of backward


def with_stalls(compute: Compute, stalls: list[Stalls]) -> Compute:
    """The computation with the seconds that each stage waits for messages of its own."""
    if not stalls:
        return compute
    forward, backward = (tuple(map(sum, zip(*side, strict=True))) for side in zip(*stalls, strict=True))
    return replace(compute, forward_stalls_s=forward, backward_stalls_s=backward)


def stalls_of(
    messages: list[Message], compute: Compute, work: Workload, rates: Rates, seconds_of: Callable[[Message], float]
) -> Stalls:
    """The seconds that one micro-batch waits within each stage of this rank for the messages of the tp or cp axis."""
    stalls = {"forward": [0.0] * len(compute.forward_s), "backward": [0.0] * len(compute.forward_s)}
    of_block = {"forward": 0.0, "backward": 0.0}  # all of a rank's blocks are alike
    ring = [message for message in messages if message.op == "exchange"]
    last, layers = len(compute.forward_s) - 1, work.model.num_layers
    for message in messages:
        if message.op == "exchange" or message.phase not in stalls or message.micro_batch:
            continue
        if 1 <= message.stage <= layers:
            of_block[message.phase] += seconds_of(message) / work.part.tensor_chunks / work.layers
        else:
            stalls[message.phase][min(last, message.stage)] += seconds_of(message)
    if ring:
        forward, backward = ring_waits(work, rates, ring, seconds_of)
        of_block = {"forward": of_block["forward"] + forward, "backward": of_block["backward"] + backward}
    for phase, seconds in of_block.items():
        stalls[phase][1:last] = [seconds] * (last - 1)
    return stalls["forward"], stalls["backward"]


def ring_waits(
    work: Workload, rates: Rates, messages: list[Message], seconds_of: Callable[[Message], float]
) -> tuple[float, float]:
    """Seconds that one layer's attention waits for keys in forward, and for keys and sums in backward."""
    ranks, layers = work.part.context_ranks, max(1, work.layers)
    forward_s, backward_s = (seconds / layers / ranks for seconds in attention_times(work, rates))
    keys_s = seconds_of(next(m for m in messages if m.phase == "forward"))
    sums_s = seconds_of(next(m for m in reversed(messages) if m.phase == "backward"))
    forward = ring_forward_time(ranks, forward_s, keys_s)
    return forward.exposed_s, ring_backward_time(ranks, backward_s, keys_s, sums_s).exposed_s


def pipeline_time(
    config: TrainConfig,
    params: list[Param],
    machine: Machine,
    degrees: Degrees,
    rank: int,
    known: KnownMessages | None = None,
) -> RankTime:
    """All stages on paper, then the sums over the data ranks and the update of the rank that is last to end."""
    neighbours = next(ranks for ranks in known_groups(degrees, "pp") if rank in ranks)
    works = works_of(config, params, machine, degrees, neighbours, known)
    seconds_of = message_seconds(degrees, machine.cluster)
    simulation = simulated(config, params, works, seconds_of)
    ends = [ends_s(work, config, seconds_of) for work in works]
    own = works[neighbours.index(rank)]
    count = own.share.layout.micro_batches
    # On average: what one rank waits longer than another is idle time and no message's.
    busy = sum(count * work.compute.micro_batch_s + work.compute.optimizer_s for work in works) / len(works)
    begun = ends[0][0]  # the others gather while they wait for the first rank
    tails = [after + work.compute.optimizer_s for (_, after), work in zip(ends, works, strict=True)]
    exposed = max(0.0, begun + simulation.total + max(tails) - busy)
    step = StepTime(busy + exposed, busy, exposed)
    idle = sum(simulation.idle) / len(simulation.idle)
    waits = own.waits(seconds_of) | {"pp": simulation.idle[neighbours.index(rank)]}
    sums = [m for m in own.messages if is_of_data(m) and m.phase != "host"]
    if sums:  # which nothing hides
        waits[sums[0].axis] = sum(ends[neighbours.index(rank)])
    return RankTime(step, own.host_s, idle, simulation, waits)


def works_of(
    config: TrainConfig,
    params: list[Param],
    machine: Machine,
    degrees: Degrees,
    neighbours: tuple[int, ...],
    known: KnownMessages | None = None,
) -> list[RankWork]:
    """Every rank's work; ranks with as many blocks and the same ends do the same, so one of them is counted for all.

    Not under ZeRO-2 and 3, whose messages are placed by the blocks' numbers.
    """
    layers, by_kind, works = config.model.num_layers, {}, []
    for place, rank in enumerate(neighbours):
        stages = tuple(stages_of(config, place))
        kind = tuple((0 in stage, layers + 1 in stage, len(stage)) for stage in stages)
        if kind not in by_kind or config.parallel.zero >= 2:
            by_kind[kind] = rank_work(config, params, machine, degrees, rank, known)
        works.append(replace(by_kind[kind], share=replace(by_kind[kind].share, stages=stages)))
    return works


def simulated(
    config: TrainConfig, params: list[Param], works: list[RankWork], seconds_of: Callable[[Message], float]
) -> Simulation:
    """The schedule with each stage's own seconds."""
    parallel, work = config.parallel, works[0].share.work
    tokens = work.tokens // work.part.stream_ranks
    shape = pipeline_shape(params, config, [tokens] * works[0].share.layout.micro_batches)
    boundary = Message("exchange", "pp", shape.dtype, shape.ranks, tokens * shape.width * ITEM_BYTES[shape.dtype], "")
    send_s = seconds_of(boundary)
    durations = []
    for chunk in range(parallel.pp_chunks):
        for own in works:
            passes, pieces = passes_of(own, config), own.share.stages[chunk]
            alone = stage_durations(own, pieces, config, send_s)
            durations.append(alone if passes is None else passes.longer(alone, pieces, seconds_of))
    return simulate_stages(shape, durations)


def passes_of(own: RankWork, config: TrainConfig) -> PassMessages | None:
    """Under ZeRO-2 and 3 what a rank's passes send over the data ranks; else None, for then nothing is sent in them."""
    splits = config.parallel.pp_schedule in SPLIT_SCHEDULES
    return PassMessages.of(own.messages, own.share.layout, config.model.num_layers, splits)


def stage_durations(own: RankWork, pieces: range, config: TrainConfig, send_s: float) -> Durations:
    """Of one stage without the data ranks' messages: its blocks' share of the rank's, and the ends where they are."""
    compute, work, layers = own.compute, own.share.work, config.model.num_layers
    blocks = sum(1 <= piece <= layers for piece in pieces)
    places = ([0] if 0 in pieces else []) + [1] * blocks + ([-1] if layers + 1 in pieces else [])
    forward, backward = (
        sum(operation.seconds + operation.stall_s for operation in map(side, places))
        for side in (compute.forward, compute.backward)
    )
    rates, weight = own.rates, 0.0
    if config.parallel.pp_schedule in SPLIT_SCHEDULES:
        weight = blocks * block_products_s(work, rates)
        weight += output_product_s(work, rates) if layers + 1 in pieces and not work.fuses("loss") else 0.0
    return Durations(forward, backward - weight, weight, send_s)


def ends_s(own: RankWork, config: TrainConfig, seconds_of: Callable[[Message], float]) -> tuple[float, float]:
    """Seconds of messages before a rank's first pass, and after its last one: sums over tp and the data ranks."""
    passes = passes_of(own, config)
    data = [m for m in own.messages if is_of_data(m) and m.phase != "host"]
    data = [m for m in data if passes is None or m.phase == "matrices"]
    after = sum(seconds_of(m) for m in [*data, *(m for m in own.messages if m.axis == "tp" and m.phase == "matrices")])
    if passes is None:
        return 0.0, after
    pieces = own.share.stages[0]
    alone = stage_durations(own, pieces, config, 0.0)
    return passes.before(alone, pieces, seconds_of), passes.after(alone, pieces, seconds_of) + after
