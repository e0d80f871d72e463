"""Runs a function on several ranks, each a process with a gloo mesh, for tests of what is parallel.

The parent holds the rendezvous store, so no port is guessed and none is raced for; it starts the store after the forks,
because a fork beside a running thread can leave a lock held for ever. No rank leaves before all have answered, since
gloo fails a slow rank whose peer hangs up. Where there is no CUDA the ranks are forked (0.05 s); with CUDA they are
spawned, since a forked process cannot use it.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch.distributed import TCPStore
from torch.utils._pytree import tree_map_only

from parallel.mesh import Mesh, close_mesh, init_mesh

TIMEOUT_S = 60.0


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call `function(mesh, *args)` on every rank and return its results in rank order, tensors among them as tensors.

    `function` stands at the top of a module. Raises RuntimeError with the traceback of the first rank that failed.
    """
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    processes, pipes = [], []
    for rank in range(world_size):
        pipe, child_pipe = context.Pipe()
        process = context.Process(target=rank_main, args=(child_pipe, rank, world_size, function, args), daemon=True)
        process.start()
        child_pipe.close()
        processes.append(process)
        pipes.append(pipe)
    store = TCPStore("127.0.0.1", 0, world_size=None, is_master=True, wait_for_workers=False)
    try:
        for pipe in pipes:
            pipe.send(store.port)
        results = collect(pipes)
        for pipe in pipes:
            pipe.send("all have answered")
        for process in processes:
            process.join(TIMEOUT_S)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [tree_map_only(NumpyTensor, NumpyTensor.restore, result) for result in results]


class NumpyTensor:
    """A tensor as bytes that outlive the process that sent it."""

    def __init__(self, tensor: torch.Tensor):
        self.array = tensor.detach().cpu().contiguous().numpy()

    def restore(self) -> torch.Tensor:
        return torch.from_numpy(self.array.copy())


def rank_main(
    pipe: Connection, rank: int, world_size: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)  # first: after a fork the parent's OpenMP threads are gone and would be waited for
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(pipe.recv()), TORCHELASTIC_USE_AGENT_STORE="True")
    try:
        mesh: Mesh = init_mesh(device="cpu", timeout_s=TIMEOUT_S)
        result = function(mesh, *args)
        pipe.send((tree_map_only(torch.Tensor, NumpyTensor, result), None))
        pipe.recv()
        close_mesh(mesh)
    except BaseException:
        pipe.send((None, traceback.format_exc()))


def collect(pipes: list[Connection]) -> list[Any]:
    """One result a rank; the first failure ends the wait, since the other ranks may hang on the one that failed."""
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in results], timeout=TIMEOUT_S)
        assert ready, f"no rank answered within {TIMEOUT_S} s; answered: {sorted(results)} of {len(pipes)}"
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                results[rank], failure = pipe.recv()
            except EOFError as error:
                raise RuntimeError(f"rank {rank} died without a word") from error
            if failure:
                raise RuntimeError(f"rank {rank} failed:\n{failure}")
    return [results[rank] for rank in range(len(pipes))]
