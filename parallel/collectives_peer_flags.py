"""How GPUs that read each other's memory wait for each other, in stream order and without a kernel.

A kernel that spins on a flag holds a processor of the GPU for as long as a peer is late, and a product whose tiles fill
all processors at once then takes a second wave for the tile that found no place. CUDA's stream memory operations
(driver API, "Stream Memory Operations") write and await a 32-bit word between the operations of a stream instead; torch
has the write alone, so both are called in the driver.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

FLAGS_BYTES = 512  # a 32-bit word for each of at most 128 ranks
WAIT_AT_LEAST = 0x0  # CU_STREAM_WAIT_VALUE_GEQ: counts may wrap
WRITE_AFTER_ALL_BEFORE = 0x0  # CU_STREAM_WRITE_VALUE_DEFAULT: with a fence over the whole system


class StreamFlags:
    """`flags[i]` is the memory of the rank at place i: word j of it is how often the rank at place j has come."""

    def __init__(self, flags: list[Tensor], rank: int):
        assert 4 * len(flags) <= FLAGS_BYTES, f"{len(flags)} ranks, words for {FLAGS_BYTES // 4}"
        self.count = 0
        self.write, self.wait = driver_calls()
        others = [place for place in range(len(flags)) if place != rank]
        self.told = [flags[place].data_ptr() + 4 * rank for place in others]  # theirs, which this rank writes
        self.awaited = [flags[rank].data_ptr() + 4 * place for place in others]  # this rank's, which they write

    def meet(self, stream: torch.cuda.Stream) -> None:
        """Tell the others that the stream has come so far, and let it go on when they all have."""
        self.count, handle = (self.count + 1) % 2**32, stream.cuda_stream
        errors = [self.write(handle, address, self.count, WRITE_AFTER_ALL_BEFORE) for address in self.told]
        errors += [self.wait(handle, address, self.count, WAIT_AT_LEAST) for address in self.awaited]
        if any(errors):
            raise RuntimeError(f"cuStreamWriteValue32 and cuStreamWaitValue32 gave CUDA errors {errors}")


def driver_calls() -> tuple[Any, Any]:
    """Write and wait, (stream, address, value, flags) -> error, of the driver that a process with a GPU has loaded."""
    driver = ctypes.CDLL("libcuda.so.1")
    calls = driver.cuStreamWriteValue32_v2, driver.cuStreamWaitValue32_v2
    for call in calls:
        call.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        call.restype = ctypes.c_int
    return calls
