"""Ranks for tests of what is parallel: one persistent pool of processes a world size, each with its mesh.

Starting eight ranks and connecting them costs seconds, a job on ranks that stand ready milliseconds. A process beside
the ranks holds the rendezvous store, so no port is guessed, no rank is special, and this process has no thread whose
lock a later fork could copy. Without CUDA ranks are forked (0.05 s); with CUDA they are spawned, since a forked process
cannot use it. A pool in which a rank failed is killed: its other ranks may hang in a collective.
"""

import atexit
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch._dynamo  # optimizers import it in their first step: once here, before the ranks fork, not in each of them
from torch.distributed import TCPStore
from torch.utils._pytree import tree_map_only

from parallel.mesh import Mesh, init_mesh, make_mesh
from parallel.mesh_degrees import Degrees

TIMEOUT_S = 60.0
POOLS: dict[tuple[int, str], "Pool"] = {}


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call `function(mesh, *args)` on every rank and return its results in rank order, tensors among them as tensors.

    `function` stands at the top of a module. Raises RuntimeError with the traceback of the first rank that failed.
    """
    return pool_of(world_size).run(function, *args)


def pool_of(world_size: int, device: str = "cpu") -> "Pool":
    """The living pool of this size, started on first use."""
    key = (world_size, device)
    if key not in POOLS or not POOLS[key].is_alive:
        POOLS[key] = Pool(world_size, device)
    return POOLS[key]


class Pool:
    """`world_size` processes that wait for jobs; on device "cuda" each with a GPU of its own."""

    def __init__(self, world_size: int, device: str = "cpu", timeout_s: float = TIMEOUT_S):
        self.context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
        self.timeout_s = timeout_s
        self.host, self.host_pipe = self.start(hold_store)
        assert self.host_pipe.poll(timeout_s), "the store's process does not answer"
        port = self.host_pipe.recv()
        settings = (world_size, port, device, timeout_s)
        self.processes, self.pipes = zip(
            *(self.start(serve, rank, *settings) for rank in range(world_size)), strict=True
        )
        atexit.register(self.kill)

    def start(self, target: Callable[..., None], *args: Any) -> tuple[Any, Connection]:
        pipe, child_pipe = self.context.Pipe()
        process = self.context.Process(target=target, args=(child_pipe, *args), daemon=True)
        process.start()
        child_pipe.close()
        return process, pipe

    @property
    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def run(
        self, function: Callable[..., Any], *args: Any, degrees: Degrees | None = None, force: bool = False
    ) -> list[Any]:
        """`function(mesh, *args)` on every rank, on the mesh of these degrees, or with all ranks data parallel.

        `force` gives a pool of one rank groups of one.
        """
        try:
            for pipe in self.pipes:
                pipe.send((function, args, (degrees or Degrees(), force)))
            results = self.collect(self.timeout_s)
        except BaseException:
            self.kill()
            raise
        return [tree_map_only(NumpyTensor, NumpyTensor.restore, result) for result in results]

    def collect(self, timeout_s: float) -> list[Any]:
        """One result a rank; the first failure ends the wait, since the other ranks may hang on the one that failed."""
        results: dict[int, Any] = {}
        while len(results) < len(self.pipes):
            ready = wait([pipe for rank, pipe in enumerate(self.pipes) if rank not in results], timeout=timeout_s)
            if not ready:
                raise TimeoutError(
                    f"no rank answered within {timeout_s} s; answered: {sorted(results)} of {len(self.pipes)}"
                )
            for pipe in ready:
                rank = self.pipes.index(pipe)
                try:
                    results[rank], failure = pipe.recv()
                except EOFError as error:
                    raise RuntimeError(f"rank {rank} died without a word") from error
                if failure:
                    raise RuntimeError(f"rank {rank} failed:\n{failure}")
        return [results[rank] for rank in range(len(self.pipes))]

    def kill(self) -> None:
        """End the ranks and the store's process; a pool is not used again afterwards."""
        for process in (*self.processes, self.host):
            process.kill()
        for process in (*self.processes, self.host):
            process.join()
        for pipe in (*self.pipes, self.host_pipe):
            pipe.close()
        atexit.unregister(self.kill)


class NumpyTensor:
    """A tensor as bytes that outlive the process that sent it."""

    def __init__(self, tensor: torch.Tensor):
        tensor = tensor.detach().cpu().contiguous()
        self.dtype = tensor.dtype
        self.array = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()

    def restore(self) -> torch.Tensor:
        return torch.from_numpy(self.array.copy()).view(self.dtype)


def hold_store(pipe: Connection) -> None:
    """A process that keeps the store until it is killed or its parent is gone."""
    store = TCPStore("127.0.0.1", 0, world_size=None, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    try:
        pipe.recv()
    except EOFError:
        del store


def serve(pipe: Connection, rank: int, world_size: int, port: int, device: str, timeout_s: float) -> None:
    """A rank's life: join the mesh, then a job after the other until the parent hangs up."""
    torch.set_num_threads(1)  # first: after a fork the parent's OpenMP threads are gone and would be waited for
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    meshes: dict[tuple[Degrees, bool], Mesh] = {}
    base: Mesh | None = None
    while True:
        try:
            function, args, layout = pipe.recv()
        except EOFError:
            return
        try:
            if base is None:
                base = init_mesh(device=device, timeout_s=timeout_s, force=True)
                if world_size > 1:
                    meshes[Degrees(), False] = base  # the one that a watchdog looks after
            if layout not in meshes:
                meshes[layout] = make_mesh(layout[0], base.device, base.local_rank, force=layout[1])
            meshes[layout].log.drain(0)
            result = function(meshes[layout], *args)
            pipe.send((tree_map_only(torch.Tensor, NumpyTensor, result), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))
