"""Named ranges of a training step: its phases and, by name, the modules that run in them, forward and backward.

Hooks tell a list of sinks (torch.profiler's trace, NVTX, the memory recorder) where the step is. Forward, a module's
hooks surround it; operations that it calls through a seam (norm, RoPE, SwiGLU, joint projections) are surrounded there.
Backward has no hooks of that kind that leave autograd's graph alone, so the graph's nodes at the modules' borders tell
when the pass comes to one. A compiled block is one range: hooks inside it would be traced away. Recomputed modules
(activation checkpointing) show as forward ranges within the backward phase.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils._pytree import tree_iter

# Callables that modules hold as attributes and that run without a module's call, with the range's ending.
SEAMS = {"normalise": "", "rotate": ".rope", "activate": ".activate", "project": ".project"}
BACKWARD = "backward of "  # what a trace calls the moment at which backward comes to a module
NO_MODULE = "-"


class Sink(Protocol):
    """What listens to the ranges; calls come from whichever thread runs the step, one at a time."""

    def push(self, name: str) -> None:
        """A phase or a module begins, inside those that have begun and not ended."""

    def pop(self) -> None:
        """The last one ends."""

    def backward(self, module: str | None) -> None:
        """The backward pass comes to the nodes of a module, or has left the last one."""


class TraceSink:
    """Ranges in torch.profiler's trace. Backward ranges would cut through autograd's own, so a mark opens each."""

    def __init__(self) -> None:
        self.open: list[record_function] = []

    def push(self, name: str) -> None:
        self.open.append(record_function(name))
        self.open[-1].__enter__()

    def pop(self) -> None:
        self.open.pop().__exit__(None, None, None)

    def backward(self, module: str | None) -> None:
        with record_function(BACKWARD + (module or NO_MODULE)):
            pass


class NvtxSink:
    """Ranges for Nsight Systems; backward ones belong to the process, since another thread may end them."""

    def __init__(self) -> None:
        self.open_backward: Any = None

    def push(self, name: str) -> None:
        torch.cuda.nvtx.range_push(name)

    def pop(self) -> None:
        torch.cuda.nvtx.range_pop()

    def backward(self, module: str | None) -> None:
        if self.open_backward is not None:
            torch.cuda.nvtx.range_end(self.open_backward)
        self.open_backward = None if module is None else torch.cuda.nvtx.range_start(BACKWARD + module)


class StepRanges:
    """Knows the phase and the module in force, and tells the sinks. `phase` is what TrainingStep.phase becomes.

    sinks: listeners. on_module(module): called before each forward pass of a module, with its parameters in place.
    """

    def __init__(self, sinks: Iterable[Sink], on_module: Callable[[nn.Module], None] | None = None):
        self.sinks, self.on_module = list(sinks), on_module
        self.phases: list[str] = []
        self.modules: list[str] = []  # forward, outermost first
        self.backward_module: str | None = None
        self.undo: list[Callable[[], None]] = []
        self.seen: set[int] = set()  # sequence numbers of this forward pass's nodes that know their module

    @property
    def where(self) -> tuple[str | None, str | None]:
        """The phase and the module in force; a module that backward calls again makes the phase "recomputation"."""
        phase = self.phases[-1] if self.phases else None
        if not self.modules:
            return phase, self.backward_module
        return ("recomputation" if phase == "backward" else phase), self.modules[-1]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the step."""
        if name == "forward":
            self.seen.clear()
        self.phases.append(name)
        for sink in self.sinks:
            sink.push(name)
        try:
            yield
        finally:
            self.go_backward(None)
            self.phases.pop()
            for sink in self.sinks:
                sink.pop()

    def enter(self, name: str, inputs: Any) -> None:
        self.label(inputs)  # they were made by what is in force still
        self.modules.append(name)
        for sink in self.sinks:
            sink.push(name)

    def leave(self, outputs: Any) -> None:
        self.label(outputs)
        self.modules.pop()
        for sink in self.sinks:
            sink.pop()

    def label(self, values: Any) -> None:
        """Have the nodes that made these tensors tell when backward comes to them, unless they know a module."""
        if not self.phases or self.phases[-1] != "forward" or not self.modules:
            return
        for value in tree_iter(values):
            node = value.grad_fn if isinstance(value, Tensor) else None
            if node is None or node._sequence_nr() in self.seen:
                continue
            if not self.seen:  # the first to be made is the last that backward comes to
                node.register_hook(lambda *_: self.go_backward(None))
            self.seen.add(node._sequence_nr())
            node.register_prehook(partial(self.arrive, self.modules[-1]))

    def arrive(self, module: str, _: Any) -> None:
        """A node of `module` is about to run."""
        if self.phases and self.phases[-1] == "backward":
            self.go_backward(module)

    def go_backward(self, module: str | None) -> None:
        if module != self.backward_module:
            self.backward_module = module
            for sink in self.sinks:
                sink.backward(module)

    def attach(self, named_modules: Iterable[tuple[str, nn.Module]], compile_mode: str = "none") -> None:
        """Surround modules with ranges of their names; nothing when the whole model is one compiled graph."""
        if compile_mode == "model":
            return
        compiled: tuple[str, ...] = ()
        for name, module in named_modules:
            if name.startswith(compiled) and compiled:
                continue
            if module._compiled_call_impl is not None:
                self.surround_compiled(name, module)
                compiled += (name + ".",)
                continue
            seams = [seam for seam in SEAMS if callable(vars(module).get(seam))]
            for seam in seams:
                self.surround_seam(name, module, seam)
            if "normalise" not in seams:  # that seam is the whole module, and blocks go past its call
                self.surround(name, module)

    def surround(self, name: str, module: nn.Module) -> None:
        before = module.register_forward_pre_hook(lambda module, inputs: self.begin_module(name, module, inputs))
        # Checkpointing ends a recomputation early by an exception, past which a range must end too.
        after = module.register_forward_hook(lambda _, __, outputs: self.leave(outputs), always_call=True)
        self.undo += [before.remove, after.remove]

    def begin_module(self, name: str, module: nn.Module, inputs: Any) -> None:
        if self.on_module is not None:
            self.on_module(module)
        self.enter(name, inputs)

    def surround_compiled(self, name: str, module: nn.Module) -> None:
        """Around the compiled call, since hooks would become a part of what is compiled."""
        compiled = module._compiled_call_impl
        module._compiled_call_impl = self.wrap(name, compiled, module)
        self.undo.append(partial(setattr, module, "_compiled_call_impl", compiled))

    def surround_seam(self, name: str, module: nn.Module, seam: str) -> None:
        function = getattr(module, seam)
        setattr(module, seam, self.wrap(name + SEAMS[seam], function, module))
        self.undo.append(partial(setattr, module, seam, function))

    def wrap(self, name: str, function: Callable, module: nn.Module) -> Callable:
        def ranged(*args: Any, **kwargs: Any) -> Any:
            self.begin_module(name, module, args)
            outputs = None
            try:
                outputs = function(*args, **kwargs)
            finally:
                self.leave(outputs)
            return outputs

        return ranged

    def detach(self) -> None:
        """Take every hook and wrapper away again."""
        while self.undo:
            self.undo.pop()()


def named_parts(model: nn.Module, loss: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules of a step with the names of their ranges: the model's own, "model" for the root, and "loss"."""
    return [("loss", loss), *((name or "model", module) for name, module in model.named_modules())]
