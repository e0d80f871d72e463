"""Decoding steps as CUDA graphs: one for each size of batch, way of sampling and bound on lengths, at first use.

A step of a small model is some 200 kernels of a few microseconds, which the host cannot launch as fast as the device
runs them. Replayed, they are one launch. Rows that a batch lacks to the graph's size belong to the spare slot. Bans and
penalties come from the host, so where a request has them the graph ends with the scores.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llm.engine_sampling import Sampled, SamplingMode
from llm.engine_scheduler import Request

SMALL_SIZES = (1, 2, 4, 8)
SHORTEST = 512  # tokens: attention is planned for a bound on the rows' lengths, and short rows are not cut
WARMUPS = 2  # runs before the capture: kernels are compiled, libraries make their workspaces


@dataclass
class Captured:
    """A graph, the tensor that it reads, and what it leaves: Sampled, or scores (B, V) where it does not draw."""

    graph: torch.cuda.CUDAGraph
    rows: Tensor  # (3, B) int64: slots, lengths, bits of uniforms
    result: Any


class DecodeGraphs:
    """The graphs of one EngineRunner, in one memory pool."""

    def __init__(self, runner: Any):
        self.runner = runner
        self.captured: dict[tuple[int, SamplingMode | None, int], Captured] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.sizes = graph_sizes(runner.config.max_running)

    def run(self, requests: list[Request], rows: np.ndarray) -> Sampled:
        """One token for each request; rows (3, B) on the host as llm.engine_runner.row_numbers makes them."""
        size = next(size for size in self.sizes if size >= len(requests))
        configs = [request.params.sampling for request in requests]
        mode = None if any(map(needs_host, requests)) else SamplingMode.of(configs)
        key = size, mode, length_bound(max(request.num_computed for request in requests), self.runner.max_len)
        result, on_device = self.replay(key, self.padded(rows, size))
        count = len(requests)
        if mode is not None:
            return result.first(count)
        return self.runner.sample(result[:count], requests, on_device[:, :count])

    def replay(self, key: tuple[int, SamplingMode | None, int], rows: np.ndarray) -> tuple[Any, Tensor]:
        """What the graph of `key` leaves for these rows, and where they are on the device."""
        if key not in self.captured:
            self.captured[key] = self.capture(*key)
        captured = self.captured[key]
        captured.rows.copy_(self.runner.staged(rows), non_blocking=True)
        captured.graph.replay()
        return captured.result, captured.rows

    def padded(self, rows: np.ndarray, size: int) -> np.ndarray:
        """(3, B) -> (3, size): the spare slot with one token."""
        filled = np.zeros((3, size), dtype=np.int64)
        filled[0], filled[1] = self.runner.spare_slot, 1
        filled[:, : rows.shape[1]] = rows
        return filled

    def capture(self, size: int, mode: SamplingMode | None, max_len: int) -> Captured:
        """Record one step on padded rows, which touch nobody's pages."""
        rows = self.runner.upload(self.padded(np.zeros((3, 0), dtype=np.int64), size)).clone()
        graph, result = record(self.step_of(rows, mode, max_len), self.pool)
        return Captured(graph, rows, result)

    def step_of(self, rows: Tensor, mode: SamplingMode | None, max_len: int) -> Callable[[], Any]:
        """The work to record, for rows of at most `max_len` tokens."""
        runner = self.runner

        def step() -> Any:
            if rows.shape[1] == 1 and runner.single is not None:
                scores = runner.single.scores(rows, max_len)
            elif runner.few is not None and runner.few.takes(rows.shape[1], max_len):
                scores = runner.few.scores(rows)
            else:
                tokens, decode = runner.decode_inputs(rows, max_len)
                scores = runner.scores(tokens, decode, None, None)
            return scores if mode is None else runner.choose(scores[:, : runner.config.num_ids], rows, mode)

        return step


def needs_host(request: Request) -> bool:
    """Whether its scores are changed by what the host knows: bans of n-grams, penalties."""
    return request.ngrams is not None or request.params.sampling.repetition_penalty != 1.0


def record(step: Callable[[], Any], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of `step`, and the tensors that it leaves."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUPS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = step()
    return graph, result


def length_bound(length: int, max_len: int) -> int:
    """What a graph for rows of `length` tokens is recorded for: 512 times a power of four, at most max_len."""
    bound = SHORTEST
    while bound < length:
        bound *= 4
    return min(bound, max_len)


def graph_sizes(max_running: int) -> list[int]:
    """1, 2, 4, 8, then by eights to 64, by thirty-twos beyond; the last is max_running."""
    sizes = [*SMALL_SIZES, *range(16, 65, 8), *range(96, max_running + 32, 32)]
    return [size for size in sizes if size < max_running] + [max_running]
