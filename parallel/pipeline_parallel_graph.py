"""A rank's pipeline operations as CUDA graphs: one launch each, so that the host is ahead whatever a stage launches.

Of each stage as many micro-batches are under way as its schedule holds. Each has a place of its own: fixed tensors for
what comes in and goes out, and a graph for each kind of operation over them, in a memory pool that no other place
shares, since operations of two places run in any order. Messages stay outside. Gradients add up in fixed buffers,
which the parameters' `grad` points at during a step: autograd is asked for them rather than left to accumulate, so
hooks on the parameters do not fire.

With backward split, or not, weight gradients of linear layers are added to their buffers by the products that make them
(pipeline_parallel_backward). On a device without graphs `run_again` in place of `capture` runs the same functions.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel.pipeline_parallel_backward import DeferredGradients
from parallel.pipeline_schedules import BACKWARD, FORWARD, INPUT, WEIGHT, Operation

Run = Callable[[], None]
Capture = Callable[[Run, Any], Run]  # a function and the pool of its place -> what repeats it


@dataclass(frozen=True)
class BatchCopies:
    """What is done with micro-batches, of which nothing else is known here."""

    copy: Callable[[Any], Any]  # to fixed tensors
    fill: Callable[[Any, Any], None]  # fixed, given
    signature: Callable[[Any], Any]  # equal for batches that fit the same fixed tensors


class CudaCapture:
    """Records functions over fixed tensors as graphs, on a stream of its own."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def warm_up(self, function: Run) -> None:
        """Run once as it is: kernels are compiled and libraries hold what they need on this stream."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            function()
        torch.cuda.current_stream().wait_stream(self.stream)
        torch.cuda.synchronize()

    def __call__(self, function: Run, pool: Any) -> Run:
        graph = torch.cuda.CUDAGraph()
        # Other threads (the watchdogs of NCCL and ours) go on asking events, which a global capture forbids.
        with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
            function()
        return graph.replay

    def end(self) -> None:
        """To be called after the last capture: what they took for a while is no more than a replayed step does."""
        torch.cuda.reset_peak_memory_stats()


class RunAgain:
    """Stands for CudaCapture on other devices: the functions themselves."""

    def pool(self) -> None:
        return None

    def warm_up(self, function: Run) -> None:
        pass

    def __call__(self, function: Run, pool: None) -> Run:
        function()
        return function

    def end(self) -> None:
        pass


@dataclass
class Place:
    """One micro-batch under way in one stage."""

    x: Tensor | None
    batch: Any
    gradient: Tensor | None = None  # of the output; none for a loss
    output: Tensor | None = None
    result: Any = None
    dx: Tensor | None = None
    forward: Run | None = None
    backward: Run | None = None
    weight: Run | None = None


class GraphedStages:
    """Forward, backward and weight gradients of this rank's stages by replaying what the second step captured."""

    def __init__(
        self,
        boundary: Callable[[Any], Tensor],
        parameters: Callable[[], Iterable[Tensor]],
        deferred: DeferredGradients,
        copies: BatchCopies,
        capture: CudaCapture | RunAgain,
    ):
        self.boundary, self.parameters, self.deferred = boundary, parameters, deferred
        self.copies, self.capture = copies, capture
        self.places: dict[int, list[Place]] = {}  # by stage
        self.of_key: dict[tuple[int, int], int] = {}  # which place a stage and micro-batch has
        self.buffers: dict[Tensor, Tensor] = {}  # gradients, by parameter
        self.known: Any = None  # what was captured: the batches' signature and the program
        self.eager_steps = 0

    def begin_step(self, stages: dict[int, Callable], micro_batches: list[Any], program: tuple) -> bool:
        """Whether this step's operations are replayed; the first of a kind runs as it is, the second is captured."""
        signatures = {self.copies.signature(batch) for batch in micro_batches}
        if len(signatures) > 1 or any(param.grad is not None for param in self.parameters()):
            return False
        operations = tuple(step for step in program if isinstance(step, Operation))
        known = (signatures.pop(), operations)
        if known != self.known:
            self.places, self.buffers, self.known, self.eager_steps = {}, {}, known, 0
        if self.eager_steps == 0:
            self.eager_steps = 1
            return False
        if not self.places:
            with without_collection():
                self.capture_all(stages, micro_batches[0], operations)
            self.capture.end()
        self.deferred.renew_casts()
        torch._foreach_zero_(list(self.buffers.values()))
        for param, buffer in self.buffers.items():
            param.grad = buffer
        return True

    def capture_all(self, stages: dict[int, Callable], batch: Any, operations: tuple[Operation, ...]) -> None:
        """Give every stage its places, and capture their operations."""
        params = [param for param in self.parameters() if param.requires_grad]
        self.buffers = {param: torch.zeros_like(param) for param in params}
        used: set[Tensor] = set()
        self.deferred.casts = {}  # made in the first pass, outside the places' memory, and renewed once a step
        self.of_key, counts = assign_places(operations)
        for stage, function in stages.items():
            kinds = {op.kind for op in operations if op.stage == stage}
            self.places[stage] = [self.new_place(stage, batch) for _ in range(counts[stage])]
            for place in self.places[stage]:
                used |= self.capture_place(place, function, WEIGHT in kinds)
        self.buffers = {param: buffer for param, buffer in self.buffers.items() if param in used}

    def new_place(self, stage: int, batch: Any) -> Place:
        fixed = self.copies.copy(batch)
        return Place(self.boundary(batch).zero_().requires_grad_() if stage > 0 else None, fixed)

    def capture_place(self, place: Place, function: Callable, splits: bool) -> set[Tensor]:
        """Capture one place's operations in the order in which they run; returns whose gradients they make."""
        used: set[Tensor] = set()
        key = id(place)

        def leave_room() -> None:
            if place.gradient is None and place.output.dim() > 0:
                place.gradient = torch.zeros_like(place.output)

        def forward() -> None:
            place.output, place.result = function(place.x, place.batch)

        def add_weights() -> None:
            used.update(self.deferred.add_to(key, self.buffers))

        def backward() -> None:
            self.deferred.begin(key)
            used.update(self.differentiate(place))
            if not splits:
                add_weights()

        def all_of_it() -> None:
            forward()
            leave_room()
            backward()
            if splits:
                add_weights()

        self.capture.warm_up(all_of_it)
        pool = self.capture.pool()
        place.forward = self.capture(forward, pool)
        leave_room()
        place.backward = self.capture(backward, pool)
        place.weight = self.capture(add_weights, pool) if splits else None
        return used

    def differentiate(self, place: Place) -> list[Tensor]:
        """Backward of a place: its input's gradient, and the parameters' into their buffers; returns these."""
        output, place.output = place.output, place.output.detach()
        if not output.requires_grad:
            return []
        params = list(self.buffers)
        inputs = params if place.x is None else [place.x, *params]
        gradients = torch.autograd.grad(output, inputs, place.gradient, allow_unused=True)
        if place.x is not None:
            place.dx, *gradients = gradients
        found = [(param, gradient) for param, gradient in zip(params, gradients, strict=True) if gradient is not None]
        if found:
            torch._foreach_add_([self.buffers[param] for param, _ in found], [gradient for _, gradient in found])
        return [param for param, _ in found]

    def place_of(self, op: Operation) -> Place:
        return self.places[op.stage][self.of_key[op.stage, op.micro_batch]]

    @torch.no_grad()
    def forward(self, op: Operation, x: Tensor | None, batch: Any) -> tuple[Tensor, Any]:
        """The stage's output and result, copied: the place will be used again."""
        place = self.place_of(op)
        if place.x is not None:
            place.x.copy_(x)
        self.copies.fill(place.batch, batch)
        with torch.enable_grad():
            place.forward()
        return place.output.detach().clone(), copied(place.result)

    @torch.no_grad()
    def backward(self, op: Operation, gradient: Tensor | None) -> Tensor | None:
        """The gradient of the stage's input, copied."""
        place = self.place_of(op)
        if gradient is not None:
            place.gradient.copy_(gradient)
        with torch.enable_grad():
            place.backward()
        return None if place.dx is None else place.dx.clone()

    @torch.no_grad()
    def weight(self, op: Operation) -> None:
        self.place_of(op).weight()


@contextmanager
def without_collection() -> Iterator[None]:
    """Python's collection of garbage may free graphs of before, which makes a capture that is under way invalid."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def assign_places(operations: Iterable[Operation]) -> tuple[dict[tuple[int, int], int], dict[int, int]]:
    """A place for each stage and micro-batch, free again after its last operation, and how many each stage needs."""
    operations = list(operations)
    splits = any(op.kind == WEIGHT for op in operations)
    places: dict[tuple[int, int], int] = {}
    free: dict[int, list[int]] = {}
    counts: dict[int, int] = {}
    for op in operations:
        key = (op.stage, op.micro_batch)
        if op.kind == FORWARD:
            if not free.setdefault(op.stage, []):
                counts[op.stage] = counts.get(op.stage, 0) + 1
                free[op.stage].append(counts[op.stage] - 1)
            places[key] = free[op.stage].pop()
        elif op.kind == (WEIGHT if splits else BACKWARD):
            free[op.stage].append(places[key])
        else:
            assert op.kind == INPUT, f"{op} in a schedule that does not split its backward passes"
    return places, counts


def copied(result: Any) -> Any:
    """A stage's result with its tensors copied."""
    if isinstance(result, Tensor):
        return result.clone()
    return tuple(map(copied, result)) if isinstance(result, tuple) else result
