"""How GPUs that read each other's memory wait for each other, in stream order and without a kernel.

A kernel that spins on a flag holds a processor of the GPU for as long as a peer is late, and a product whose tiles fill
all processors at once then takes a second wave for the tile that found no place. CUDA's stream memory operations
(driver API, "Stream Memory Operations") write and await a 32-bit word between the operations of a stream instead; torch
has the write alone, so both are called in the driver.
"""

import ctypes

import torch
from torch import Tensor

FLAGS_BYTES = 512  # a 32-bit word for each of at most 128 ranks
WAIT_AT_LEAST = 0x0  # CU_STREAM_WAIT_VALUE_GEQ: counts may wrap
WRITE_AFTER_ALL_BEFORE = 0x0  # CU_STREAM_WRITE_VALUE_DEFAULT: with a fence over the whole system


class StreamFlags:
    """`flags[i]` is the memory of the rank at place i: word j of it is how often the rank at place j has come."""

    def __init__(self, flags: list[Tensor], rank: int):
        assert 4 * len(flags) <= FLAGS_BYTES, f"{len(flags)} ranks, words for {FLAGS_BYTES // 4}"
        self.count, self.driver = 0, load_driver()
        others = [place for place in range(len(flags)) if place != rank]
        self.told = [flags[place].data_ptr() + 4 * rank for place in others]  # theirs, which this rank writes
        self.awaited = [flags[rank].data_ptr() + 4 * place for place in others]  # this rank's, which they write

    def meet(self, stream: torch.cuda.Stream) -> None:
        """Tell the others that the stream has come so far, and let it go on when they all have."""
        self.count = (self.count + 1) % 2**32
        for address in self.told:
            self.call("cuStreamWriteValue32_v2", stream, address, WRITE_AFTER_ALL_BEFORE)
        for address in self.awaited:
            self.call("cuStreamWaitValue32_v2", stream, address, WAIT_AT_LEAST)

    def call(self, name: str, stream: torch.cuda.Stream, address: int, flags: int) -> None:
        error = getattr(self.driver, name)(stream.cuda_stream, address, self.count, flags)
        if error:
            raise RuntimeError(f"{name} failed with CUDA error {error} at {address:#x}")


def load_driver() -> ctypes.CDLL:
    """The CUDA driver, which is loaded already where a GPU is in use, with the two calls' types."""
    driver = ctypes.CDLL("libcuda.so.1")
    for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"):
        function = getattr(driver, name)
        function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        function.restype = ctypes.c_int
    return driver
