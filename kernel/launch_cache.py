"""Launching a Triton kernel again without what Triton works out anew at every launch.

`kernel[grid](...)` derives from each argument which compiled variant to run, and binds, names and hashes all of them:
some 100 us of the host for a kernel with 25 arguments and tensor descriptors, longer than a short attention takes. Here
the variant found the first time is kept under what Triton's choice depends on (types, alignment to 16, integers equal
to 1, the constants) and launched directly.
"""

from collections.abc import Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kernel.operator_inputs import is_interpreted

INT32_LIMIT = 2**31


class LaunchCache:
    """The compiled variants of one kernel."""

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self.interpreted = is_interpreted(kernel)
        self.variants: dict[Hashable, Any] = {}

    def launch(self, grid: tuple[int, ...], args: tuple, constants: dict[str, Any], **options: Any) -> None:
        """Run over `grid` with run-time `args`, then `constants`, in the kernel's order; options: num_warps, ..."""
        if self.interpreted:
            self.kernel[grid](*args, **constants, **options)
            return
        values = tuple(constants.values())
        kinds = tuple(map(specialisation, args))
        key = (kinds, values, tuple(options.values()), torch.cuda.current_device())
        variant = self.variants.get(key)
        if variant is None:
            self.variants[key] = self.kernel[grid](*args, **constants, **options)
        else:
            variant[grid + (1,) * (3 - len(grid))](*args, *values)


def specialisation(value: Any) -> Hashable:
    """What Triton's choice of a variant depends on in one argument."""
    if type(value) is int:
        return "1" if value == 1 else (value % 16 == 0, -INT32_LIMIT <= value < INT32_LIMIT)
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if type(value) is float:
        return "float"
    return value.base.dtype, tuple(value.block_shape), getattr(value, "layout", None)  # a tensor descriptor


@cache
def cached(kernel: Any) -> LaunchCache:
    """The one cache of a kernel."""
    return LaunchCache(kernel)
