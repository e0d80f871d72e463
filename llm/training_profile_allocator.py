"""The blocks of a step on a GPU, replayed from what CUDA's caching allocator recorded (torch.cuda.memory).

The allocator knows addresses and sizes but neither modules nor owners. Both are told by count: when the step comes to a
module, or someone names the owner of an address, the number of allocations so far is noted, and the replay looks it up
at that allocation. Sizes are those asked for; the allocator rounds them up, so its own peak is somewhat higher. In a
replayed CUDA graph nothing is allocated, so nothing is seen.
"""

import time
from bisect import bisect_right, insort
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llm.training_profile_memory import Block, MemoryTrace, Where

SOURCE = "bytes asked of CUDA's allocator"


@dataclass
class Mark:
    """At this many allocations, the block that holds the address belonged to an owner."""

    allocations: int
    address: int
    owner: str
    name: str


class AllocatorRecorder:
    """`with recorder:` records the allocator; a sink of StepRanges, whose `where` it asks; then trace()."""

    def __init__(self, device: torch.device):
        self.device = device
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self.places: list[tuple[int, Where]] = []
        self.marks: list[Mark] = []
        self.where: Any = lambda: (None, None)
        self.before: dict[str, Any] = {}
        self.snapshot: dict[str, Any] = {}
        self.measured: dict[str, int] = {}
        self.first_allocation = self.last_allocation = 0
        self.start_s = 0.0  # of the epoch, as the allocator counts

    def allocations(self) -> int:
        return torch.cuda.memory_stats_as_nested_dict(self.index)["allocation"]["all"]["allocated"]

    def moved(self, *_: Any) -> None:
        """The step has come to another phase or module."""
        self.places.append((self.allocations(), self.where()))

    def push(self, name: str) -> None:
        self.moved()

    def pop(self) -> None:
        self.moved()

    def backward(self, module: str | None) -> None:
        self.moved()

    def mark(self, tensor: Tensor, owner: str, name: str) -> None:
        address = tensor.untyped_storage().data_ptr()
        if address and tensor.is_cuda:
            self.marks.append(Mark(self.allocations(), address, owner, name))

    def __enter__(self) -> "AllocatorRecorder":
        torch.cuda.synchronize(self.index)
        self.before = torch.cuda.memory._snapshot()
        torch.cuda.reset_peak_memory_stats(self.index)
        self.first_allocation, self.start_s = self.allocations(), time.time()
        torch.cuda.memory._record_memory_history(enabled="all", stacks="python")
        return self

    def __exit__(self, *exception: Any) -> None:
        torch.cuda.synchronize(self.index)
        stats = torch.cuda.memory_stats(self.index)
        self.last_allocation = self.allocations()
        self.snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        self.measured = {
            "requested_peak_bytes": stats["requested_bytes.all.peak"],
            "allocated_peak_bytes": stats["allocated_bytes.all.peak"],
            "reserved_peak_bytes": stats["reserved_bytes.all.peak"],
        }

    def trace(self) -> MemoryTrace:
        events = [
            event
            for event in self.snapshot["device_traces"][self.index]
            if event["action"] in ("alloc", "free_requested")
        ]
        segments = [segment for segment in self.before["segments"] if segment.get("device", self.index) == self.index]
        replay = Replay(live_blocks(segments), self.first_allocation, self.places, self.marks)
        for event in events:
            replay.take(event)
        assert replay.allocations == self.last_allocation, (
            f"{replay.allocations} allocations were replayed, {self.last_allocation} were counted"
        )
        times_s = [max(0.0, time_us * 1e-6 - self.start_s) for time_us in replay.times_us]
        return MemoryTrace(SOURCE, replay.blocks, [0.0, *times_s], measured=self.measured)


def live_blocks(segments: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Address and size of each block of a snapshot that is in use."""
    return [
        (block["address"], block["requested_size"])
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]


class Replay:
    """Goes through the allocator's events in order and keeps the blocks that live."""

    def __init__(
        self, live: list[tuple[int, int]], allocations: int, places: list[tuple[int, Where]], marks: list[Mark]
    ):
        self.blocks = [Block(nbytes, 0) for _, nbytes in live]
        self.live = {address: block for (address, _), block in zip(live, self.blocks, strict=True)}
        self.addresses = sorted(self.live)
        self.allocations = allocations
        self.counts, self.where = [count for count, _ in places], [where for _, where in places]
        self.marks = sorted(marks, key=lambda mark: mark.allocations)
        self.times_us: list[float] = []
        self.next_mark = 0
        self.use_marks()

    def take(self, event: dict[str, Any]) -> None:
        """An "alloc" or a "free_requested"; the free of a block from before the recording of blocks is skipped."""
        address = event["addr"]
        if event["action"] == "alloc":
            self.times_us.append(event["time_us"])
            block = Block(event["size"], len(self.times_us), self.place())
            self.blocks.append(block)
            self.live[address] = block
            insort(self.addresses, address)
            self.allocations += 1
            self.use_marks()
        elif address in self.live:
            self.times_us.append(event["time_us"])
            self.live.pop(address).died = len(self.times_us)
            del self.addresses[bisect_right(self.addresses, address) - 1]

    def place(self) -> Where:
        """Where the step was at this allocation: the last place noted at a count not above it."""
        index = bisect_right(self.counts, self.allocations) - 1
        return self.where[index] if index >= 0 else (None, None)

    def use_marks(self) -> None:
        """Give blocks their owners, before the next allocation can reuse an address."""
        while self.next_mark < len(self.marks) and self.marks[self.next_mark].allocations <= self.allocations:
            mark = self.marks[self.next_mark]
            self.next_mark += 1
            index = bisect_right(self.addresses, mark.address) - 1
            block = self.live[self.addresses[index]] if index >= 0 else None
            if block is not None and mark.address < self.addresses[index] + block.nbytes:
                block.owner, block.name = mark.owner, mark.name
