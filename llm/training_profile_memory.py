"""Every block of memory of one training step: when it came and went, what it is, and which module asked for it.

Two recorders give the same MemoryTrace: this file's counts live tensors on a CPU (llm/metrics_memory), that of
llm/training_profile_allocator replays what a GPU's allocator did. What a block is follows from who holds it: weights,
gradients and optimizer state are named by their owners. The rest is an activation when it was made in forward,
"backward" when it was made there (gradients of activations), and "other" else (batches, messages, the optimizer's
temporaries).
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from llm.metrics_memory import LiveTensorBytes

CATEGORIES = ("weights", "optimizer", "gradients", "activations", "backward", "other")
CATEGORY_OF_PHASE = {
    "forward": "activations",
    "recomputation": "activations",
    "graph": "activations",
    "backward": "backward",
}
Where = tuple[str | None, str | None]  # phase and module in force


@dataclass
class Block:
    """One piece of memory from the change that made it to the one that freed it."""

    nbytes: int
    born: int  # index of the change in MemoryTrace.times_s; 0: it was there before the step
    where: Where = (None, None)
    owner: str = ""  # a category of CATEGORIES where someone holds it
    name: str = ""  # of the parameter
    died: int | None = None  # index of the change; None: it outlives the step

    @property
    def category(self) -> str:
        return self.owner or CATEGORY_OF_PHASE.get(self.where[0] or "", "other")


@dataclass
class MemoryTrace:
    """All blocks of a step, and the times of the changes, in seconds since its start; times_s[0] = 0 is its start."""

    source: str  # what was counted
    blocks: list[Block]
    times_s: list[float]
    phases: list[tuple[str, float, float]] = field(default_factory=list)  # name, start and end in seconds
    measured: dict[str, int] = field(default_factory=dict)  # the device's own counters, bytes

    def totals(self) -> dict[str, list[int]]:
        """Live bytes of each category after each change."""
        steps = {category: [0] * len(self.times_s) for category in CATEGORIES}
        for block in self.blocks:
            steps[block.category][block.born] += block.nbytes
            if block.died is not None:
                steps[block.category][block.died] -= block.nbytes
        for values in steps.values():
            for index in range(1, len(values)):
                values[index] += values[index - 1]
        return steps


class Recorder(Protocol):
    """`with recorder:` around the step; then trace()."""

    def mark(self, tensor: Tensor, owner: str, name: str) -> None:
        """Say whose the memory of a tensor is, for as long as it lives."""

    def trace(self) -> MemoryTrace:
        """What was recorded."""


class TensorRecorder(LiveTensorBytes):
    """Blocks of live tensor storages, on any device that runs operation by operation: here, a CPU."""

    def __init__(self, tensors: Iterable[Tensor], where: Callable[[], Where]):
        self.where = where
        self.blocks: list[Block] = []
        self.open: dict[int, Block] = {}
        self.last: dict[int, Block] = {}  # of storages that are empty now and may grow again
        self.start_s, self.times_s, self.counted = 0.0, [], []
        super().__init__(tensors)
        for block in self.blocks:
            block.born = 0
        self.start_s, self.times_s, self.counted = time.time(), [0.0], [self.bytes]

    def change(self, key: int, nbytes: int) -> None:
        super().change(key, nbytes)
        index = len(self.times_s)
        self.times_s.append(time.time() - self.start_s)
        self.counted.append(self.bytes)
        before = self.open.pop(key, None)
        if before is not None:
            before.died = index
            nbytes += before.nbytes
            self.last[key] = before
        known = self.last.get(key, Block(0, 0))
        if nbytes:
            self.open[key] = Block(nbytes, index, self.where(), known.owner, known.name)
            self.blocks.append(self.open[key])
        if key not in self.elastic:
            self.last.pop(key, None)

    def mark(self, tensor: Tensor, owner: str, name: str) -> None:
        key = id(tensor.untyped_storage())
        block = self.open.get(key)
        if block is None and key in self.elastic:  # empty now
            block = self.last.setdefault(key, Block(0, 0))
        if block is not None:
            block.owner, block.name = owner, name

    def trace(self) -> MemoryTrace:
        return MemoryTrace("bytes of live tensors", self.blocks, self.times_s)


class Owners:
    """Tells a recorder which memory is weights, gradients and optimizer state, under any strategy."""

    def __init__(self, model: nn.Module, optimizer: Any, parameters: Iterable[Tensor]):
        self.model, self.optimizer = model, optimizer
        self.names = {id(param): name for name, param in model.named_parameters()}
        self.held = [*model.parameters(), *model.buffers(), *parameters]  # the last: shards that the optimizer updates
        self.recorder: Recorder | None = None
        self.hooks: list[Any] = []

    def attach(self, recorder: Recorder) -> None:
        """From now on each gradient is marked as autograd hands it over."""
        self.recorder = recorder
        for param in self.model.parameters():
            if param.requires_grad:
                self.hooks.append(param.register_hook(self.gradient_hook(self.name_of(param))))
        self.mark()

    def detach(self) -> None:
        while self.hooks:
            self.hooks.pop().remove()

    def gradient_hook(self, name: str) -> Callable[[Tensor], None]:
        def hand_over(gradient: Tensor) -> None:
            self.recorder.mark(gradient, "gradients", name)

        return hand_over

    def name_of(self, tensor: Tensor) -> str:
        return self.names.get(id(tensor), "")

    def mark_module(self, module: nn.Module) -> None:
        """A module's own parameters, which a strategy may just have gathered."""
        for param in module.parameters(recurse=False):
            self.recorder.mark(param, "weights", self.name_of(param))

    def mark(self) -> None:
        """Whatever is held now: at the step's start, and where gradients or optimizer state may be new."""
        for tensor in self.held:
            self.recorder.mark(tensor, "weights", self.name_of(tensor))
            if tensor.grad is not None:
                self.recorder.mark(tensor.grad, "gradients", self.name_of(tensor))
        for param, state in dict(self.optimizer.state).items():
            for value in tree_iter(state):
                if isinstance(value, Tensor):
                    self.recorder.mark(value, "optimizer", self.name_of(param))
