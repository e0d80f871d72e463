"""Pipeline parallelism: each rank of the axis runs its stages of the model, after the table of a schedule.

`PipelineRunner` takes a rank's program (pipeline_schedules_program) and does what it says: receive, run a stage forward
or backward, send on. Sends and receives are started in the program's order and waited for where their tensor is
needed, so they run beside the stages. It knows nothing of the model: a stage is a function from its input and a
micro-batch to its output, a boundary is an empty tensor of the right shape.

Gradients add up in the parameters as on one device. Everything that is done with them over other axes is done after
the last backward pass of the step.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from parallel.collectives import exchange
from parallel.collectives_pending import Pending
from parallel.mesh import Mesh
from parallel.pipeline_parallel_backward import DeferredGradients
from parallel.pipeline_parallel_graph import GraphedStages
from parallel.pipeline_schedules import FORWARD, INPUT, WEIGHT, Operation, build_schedule
from parallel.pipeline_schedules_program import Exchange, Message, Program, program_of

# From a stage's input, None on the first stage, and a micro-batch: on the last stage a scalar to be differentiated,
# already divided, and whatever the caller wants to have of it; on others the output and None.
StageFunction = Callable[[Tensor | None, Any], tuple[Tensor, Any]]


@dataclass(frozen=True)
class PipelineSettings:
    """Which schedule runs over which axis."""

    schedule: str = "1f1b"
    chunks: int = 1
    axis: str = "pp"


@dataclass
class Passes:
    """What one step holds on to between its operations."""

    stages: dict[int, StageFunction]  # of this rank, by their number
    inputs: dict[tuple[int, int], Tensor | None] = field(default_factory=dict)  # by stage and micro-batch
    outputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # of inputs, to be sent
    arriving: dict[Message, tuple[Pending, Tensor]] = field(default_factory=dict)
    started: list[Pending] = field(default_factory=list)
    results: dict[int, Any] = field(default_factory=dict)  # of the last stage, by micro-batch
    graphs: GraphedStages | None = None  # replays this step's operations


class Keeper(Protocol):
    """Has a stage's parameters there for each pass, and takes the gradients that it leaves (fsdp_pipeline)."""

    def begin_passes(self, operations: tuple[Operation, ...]) -> None:
        """Before a step's first operation; these are all that this rank will run, in order; () for forward alone."""

    def begin_pass(self, op: Operation) -> None:
        """Before an operation, and before what it needs of other ranks is waited for."""

    def end_pass(self, op: Operation) -> None:
        """After it."""


class PipelineRunner:
    """Runs the stages of this rank; `boundary(batch)` is what crosses between two of them, empty."""

    def __init__(
        self,
        boundary: Callable[[Any], Tensor],
        mesh: Mesh,
        settings: PipelineSettings,
        deferred: DeferredGradients | None = None,
        keeper: Keeper | None = None,
        graphs: GraphedStages | None = None,
    ):
        self.boundary, self.mesh, self.settings, self.deferred = boundary, mesh, settings, deferred
        self.keeper, self.graphs = keeper, graphs
        self.ranks, self.rank = mesh.size(settings.axis), mesh.rank_in(settings.axis)
        self.num_stages = self.ranks * settings.chunks
        self.programs: dict[int, Program] = {}  # by the number of micro-batches
        # Entered around each operation, its message being there, and with None around all of a step's operations and
        # messages, which leaves out what is done before and after them; who times a step puts its own in.
        self.observe: Callable[[Operation | None], AbstractContextManager] = nullcontext

    def program(self, micro_batches: int) -> Program:
        """What this rank does in a step; checked by the simulator when it is made."""
        if micro_batches not in self.programs:
            schedule = build_schedule(self.settings.schedule, self.ranks, micro_batches, self.settings.chunks)
            self.programs[micro_batches] = program_of(schedule, self.rank)
        return self.programs[micro_batches]

    def run(self, stages: dict[int, StageFunction], micro_batches: list[Any]) -> list[Any]:
        """Forward and backward of all micro-batches, one or more; the last stage's results in their order, else []."""
        passes, program = Passes(stages), self.program(len(micro_batches))
        if self.keeper is not None:
            self.keeper.begin_passes(tuple(step for step in program if isinstance(step, Operation)))
        if self.graphs is not None and self.graphs.begin_step(stages, micro_batches, program):
            passes.graphs = self.graphs
        with self.observe(None):
            self.run_program(program, micro_batches, passes)
        return [passes.results[index] for index in sorted(passes.results)]

    def run_program(self, program: Program, micro_batches: list[Any], passes: Passes) -> None:
        """Operations and messages in their order, until all of them are done."""
        for step in program:
            if isinstance(step, Exchange):
                self.start_exchange(step, micro_batches, passes)
                continue
            with self.kept(step):
                if step.kind == FORWARD:
                    self.forward(step, micro_batches[step.micro_batch], passes)
                elif step.kind == WEIGHT:
                    with self.observe(step):
                        self.weight(step, passes)
                else:
                    self.backward(step, passes)
        for pending in passes.started:
            pending.wait()

    @torch.no_grad()
    def run_forward(self, stages: dict[int, StageFunction], micro_batches: list[Any]) -> list[Any]:
        """Forward alone, a micro-batch after the other; the last stage's results, else []."""
        passes = Passes(stages)
        if self.keeper is not None:
            self.keeper.begin_passes(())
        for index, batch in enumerate(micro_batches):
            for stage in range(self.num_stages):
                if stage in stages:
                    with self.kept(op := Operation(FORWARD, stage, index)):
                        self.forward(op, batch, passes)
                message = Message(stage, stage + 1, index)
                sends = (message,) if stage in stages else ()
                receives = (message,) if stage + 1 in stages else ()
                if stage + 1 < self.num_stages and (sends or receives):
                    self.start_exchange(Exchange(sends, receives), {index: batch}, passes)
            passes.inputs.clear()
            passes.outputs.clear()
        for pending in passes.started:
            pending.wait()
        return [passes.results[index] for index in sorted(passes.results)]

    @contextmanager
    def kept(self, op: Operation) -> Iterator[None]:
        """One pass, with its parameters in place and its gradients taken."""
        if self.keeper is None:
            yield
            return
        self.keeper.begin_pass(op)
        yield
        self.keeper.end_pass(op)

    def start_exchange(self, step: Exchange, micro_batches: Any, passes: Passes) -> None:
        """Post sends and receives at once."""
        sends, receives = [], []
        for message in step.sends:
            key = (message.source, message.micro_batch)
            is_forward = message.target > message.source
            tensor = passes.outputs[key].detach() if is_forward else passes.gradients.pop(key)
            sends.append((tensor.contiguous(), message.target % self.ranks))
        for message in step.receives:
            receives.append((self.boundary(micro_batches[message.micro_batch]), message.source % self.ranks))
        pending = exchange(sends, receives, self.mesh, self.settings.axis)
        passes.started = [earlier for earlier in passes.started if not earlier.is_done]
        while len(passes.started) >= 2 * self.ranks:  # what was sent long ago would be held until the step's end
            passes.started.pop(0).wait()
        passes.started.append(pending)
        for message, (tensor, _) in zip(step.receives, receives, strict=True):
            passes.arriving[message] = (pending, tensor)

    @staticmethod
    def receive(message: Message, passes: Passes) -> Tensor:
        pending, tensor = passes.arriving.pop(message)
        pending.wait()
        return tensor

    def forward(self, op: Operation, batch: Any, passes: Passes) -> None:
        key = (op.stage, op.micro_batch)
        x = None
        if op.stage > 0:
            x = self.receive(Message(op.stage - 1, op.stage, op.micro_batch), passes)
            x.requires_grad_(torch.is_grad_enabled())
        with self.observe(op):
            run = passes.stages[op.stage] if passes.graphs is None else partial(passes.graphs.forward, op)
            output, result = run(x, batch)
        if op.stage == self.num_stages - 1:
            passes.results[op.micro_batch] = result
        passes.inputs[key], passes.outputs[key] = x, output

    def backward(self, op: Operation, passes: Passes) -> None:
        """B or I: gradients of the stage's parameters add up, but for those that I leaves to W; its input's is kept."""
        key = (op.stage, op.micro_batch)
        x, output = passes.inputs.pop(key), passes.outputs.pop(key)
        gradient = None
        if op.stage < self.num_stages - 1:
            gradient = self.receive(Message(op.stage + 1, op.stage, op.micro_batch), passes)
        with self.observe(op):
            if passes.graphs is not None:
                passes.gradients[key] = passes.graphs.backward(op, gradient)
                return
            if self.deferred is not None:
                self.deferred.begin(key)
            if output.requires_grad:  # not so before the first trainable parameter
                torch.autograd.backward(output, gradient)
            if self.deferred is not None and op.kind != INPUT:
                self.deferred.run(key)
        if x is not None:
            passes.gradients[key] = x.grad

    def weight(self, op: Operation, passes: Passes) -> None:
        if passes.graphs is not None:
            passes.graphs.weight(op)
        else:
            self.deferred.run((op.stage, op.micro_batch))
