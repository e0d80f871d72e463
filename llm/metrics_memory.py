"""Peak memory of a region of code, by the counter of a GPU's allocator or by watching every tensor on a CPU."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveTensorBytes(TorchDispatchMode):
    """Counts the bytes of live tensor storages while it is active: `bytes` now and `peak_bytes` at most.

    Tensors made before must be named to count. Storages shared by views count once. Those that are empty when first
    seen may grow and shrink again (FSDP's gathered parameters) and are looked at after every operation. What an
    operation allocates for itself and frees inside is not seen. It costs some 20 us an operation, so it runs for named
    steps only.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()):
        super().__init__()
        self.bytes = 0
        self.peak_bytes = 0
        self.alive: dict[int, weakref.ref] = {}
        self.elastic: dict[int, int] = {}  # bytes at the last look of each storage that may change
        for tensor in tensors:
            self.watch(tensor)

    def watch(self, tensor: Tensor) -> None:
        """Count a tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self.alive:
            return
        nbytes = storage.nbytes()

        def freed(_: Any) -> None:
            self.change(key, -self.elastic.pop(key, nbytes))
            del self.alive[key]

        self.alive[key] = weakref.ref(storage, freed)
        if nbytes == 0:
            self.elastic[key] = 0
        self.change(key, nbytes)
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def change(self, key: int, nbytes: int) -> None:
        """A storage came, went or changed its size, by so many bytes."""
        self.bytes += nbytes

    def look_again(self) -> None:
        """Bring the sum up to date with the storages that may have changed their size."""
        for key, before in list(self.elastic.items()):
            storage = self.alive[key]()
            if storage is not None and storage.nbytes() != before:
                self.elastic[key] = storage.nbytes()
                self.change(key, storage.nbytes() - before)
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.look_again()
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self.watch(value)
        return result


class PeakMemory:
    """`with PeakMemory(device, tensors) as memory: ...`, then memory.peak_bytes.

    `tensors` are those that exist already (weights, optimizer state); a GPU's allocator knows them by itself, but not
    `outside_bytes` (a mesh's peer_bytes).
    """

    def __init__(self, device: torch.device, tensors: Iterable[Tensor] = (), outside_bytes: int = 0):
        self.device, self.outside_bytes = device, outside_bytes
        self.mode = LiveTensorBytes(tensors) if device.type == "cpu" else None
        self.peak_bytes = 0

    def __enter__(self) -> "PeakMemory":
        if self.mode is None:
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self.mode.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.mode is None:
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device) + self.outside_bytes
        else:
            self.mode.__exit__(*exception)
            self.peak_bytes = self.mode.peak_bytes


def graph_bytes(device: torch.device) -> int:
    """Bytes in the memory pools of CUDA graphs that the allocator counts as free: a replay writes there again.

    `max_memory_allocated` over replays leaves them out; over a capture it has seen a part of them. 0 on a CPU.
    """
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    segments = [segment for segment in torch.cuda.memory_snapshot() if segment["device"] == index]
    return free_in_private_pools(segments)


def free_in_private_pools(segments: Iterable[dict[str, Any]]) -> int:
    """Of segments as torch.cuda.memory_snapshot lists them; the common pool's id is (0, 0)."""
    private = [segment for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0)]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in private)


def held_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[Tensor]:
    """Parameters, gradients, buffers and optimizer state: what lives from step to step."""
    parameters = list(model.parameters())
    held = [*parameters, *model.buffers(), *(p.grad for p in parameters if p.grad is not None)]
    if optimizer is not None:
        held += [param for group in optimizer.param_groups for param in group["params"]]  # shards, where there are any
        held += [value for value in tree_iter(dict(optimizer.state)) if isinstance(value, Tensor)]
    return held
