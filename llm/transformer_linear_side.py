"""Weight gradients on a stream beside the rest of backward, inside a captured CUDA graph.

dx is on backward's critical path, dW is not: its product can fill the processors that the tails of other kernels and
the gaps between them leave idle. One product is outstanding at a time; its inputs are held until the main stream has
waited for it, since the allocator would hand their memory on. Outside a capture everything runs in order.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class SideStream:
    """Runs products of one model's backward beside the stream that is being captured."""

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None
        self.held: tuple[torch.cuda.Event, Any] | None = None  # of the product under way, with what it reads

    def runs(self, parameters: Sequence[Tensor | None]) -> bool:
        """Whether to go aside: in a capture, and where no gradient waits to be added to by the main stream."""
        if self.stream is None and torch.cuda.is_available():
            self.stream = torch.cuda.Stream()  # in a pass before the capture
        return torch.cuda.is_current_stream_capturing() and all(p is None or p.grad is None for p in parameters)

    def run(self, make: Callable[[], list[Tensor | None]], reads: Sequence[Tensor]) -> list[Tensor | None]:
        """make() on the side stream, after what the current one has been given so far."""
        current = torch.cuda.current_stream()
        self.join()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            made = make()
            event = torch.cuda.Event()
            event.record(self.stream)
        self.held = (event, list(reads))
        torch.autograd.Variable._execution_engine.queue_callback(self.join)
        return made

    def join(self) -> None:
        """Have the current stream wait for the product under way; only then is its input's memory free again."""
        if self.held is not None:
            torch.cuda.current_stream().wait_event(self.held[0])
            self.held = None
