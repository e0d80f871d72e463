"""The gradient's norm on its way from the device to the host, which waits for it only when it asks."""

import math
from functools import cached_property

import torch
from torch import Tensor


class NormReading:
    """A scalar copied to the host when the device gets there."""

    def __init__(self, norm: Tensor):
        self.event: torch.cuda.Event | None = None
        self.host = norm.detach()
        if norm.is_cuda:
            self.host = torch.empty((), dtype=norm.dtype, pin_memory=True)
            self.host.copy_(norm, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    @cached_property
    def value(self) -> float:
        if self.event is not None:
            self.event.synchronize()
        return self.host.item()

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.value)
