"""Pieces of prompts as CUDA graphs: one for each bound on their tokens and on their histories, at first use.

A short prompt is a millisecond of the device and some 200 launches, which take the host ten times as long. So up to
LONGEST tokens a step's pieces are padded to a power of two and replayed. Padding tokens are of page 0, which nobody
has, see no key, and sample for the spare slot. More tokens keep the device busy for longer than the host launches.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from llm.engine_cache import PromptPieces
from llm.engine_graphs import needs_host, record
from llm.engine_prompts import PromptArrays, prompt_arrays
from llm.engine_sampling import Sampled, SamplingMode
from llm.engine_scheduler import Request, Segment

SHORTEST, LONGEST = 64, 8192  # tokens of a graph
MOST_HISTORY = 8  # times the tokens: longer histories are rare
MOST_SAMPLED = 64  # rows whose states become scores
DRAWS = SamplingMode(draws=True)  # right for rows that take the likeliest too


class PromptGraphs:
    """The graphs of one EngineRunner, in a memory pool of their own.

    In the decode graphs' pool a prompt graph's intermediate results could lie where a decode graph recorded later
    leaves its tokens, which a step with both reads when both have run.
    """

    def __init__(self, runner: Any):
        self.runner = runner
        self.pool = torch.cuda.graph_pool_handle() if runner.device.type == "cuda" else None
        self.most_sampled = min(MOST_SAMPLED, runner.config.max_running)
        self.captured: dict[tuple[int, int, bool], tuple[torch.cuda.CUDAGraph, Tensor, Any]] = {}

    def takes(self, segments: list[Segment]) -> bool:
        """Whether these pieces fit a graph."""
        tokens = sum(len(segment.token_ids) for segment in segments)
        history = tokens + sum(segment.start for segment in segments)
        sampled = sum(segment.samples for segment in segments)
        return tokens <= LONGEST and history <= MOST_HISTORY * bound(tokens) and sampled <= self.most_sampled

    def run(self, segments: list[Segment], sampled: list[Request], rows: np.ndarray) -> Sampled:
        """Compute the pieces and sample for the requests whose prompts end here, (3, R) `rows` as row_numbers makes."""
        arrays = prompt_arrays(segments, self.runner.config.page_size)
        M, S = bound(arrays.tokens.shape[1]), bound(len(arrays.history))
        mode = SamplingMode.of([request.params.sampling for request in sampled])
        draws = not mode.truncates and not any(needs_host(request) for request in sampled)
        key = M, max(M, S), draws
        result, inputs = self.replay(key, self.packed(arrays, rows, *key[:2]))
        count = len(sampled)
        if draws:
            return result.first(count)
        return self.runner.sample(result[:count], sampled, self.parts(inputs, *key[:2])[3][:, :count])

    def replay(self, key: tuple[int, int, bool], values: np.ndarray) -> tuple[Any, Tensor]:
        """What the graph of `key` leaves for these inputs, and where they are on the device."""
        if key not in self.captured:
            padding = self.packed(None, np.zeros((3, 0), dtype=np.int64), *key[:2])  # touches nobody's pages
            inputs = self.runner.upload(padding).clone()
            self.captured[key] = *record(lambda: self.step(inputs, *key), self.pool), inputs
        graph, result, inputs = self.captured[key]
        inputs.copy_(self.runner.staged(values), non_blocking=True)
        graph.replay()
        return result, inputs

    def num_inputs(self, M: int, S: int) -> int:
        return 5 * M + S + 4 * self.most_sampled

    def packed(self, arrays: PromptArrays | None, rows: np.ndarray, M: int, S: int) -> np.ndarray:
        """All that a graph reads, in one array; `arrays` None: padding alone."""
        values = np.zeros(self.num_inputs(M, S), dtype=np.int64)
        tokens, bounds, history, filled, chosen = self.parts(values, M, S)
        filled[0], filled[1] = self.runner.spare_slot, 1
        filled[:, : rows.shape[1]] = rows
        if arrays is not None:
            count, seen = arrays.tokens.shape[1], len(arrays.history)
            tokens[:, :count], history[:seen], bounds[:, :count] = arrays.tokens, arrays.history, arrays.bounds
            bounds[:, count:] = seen  # an empty interval, at the end so that the ends stay sorted
            chosen[: rows.shape[1]] = arrays.ends
        return values

    def parts(self, values: Any, M: int, S: int) -> tuple[Any, ...]:
        """Views of the one array or tensor: tokens (3, M), bounds (2, M), history (S,), rows (3, R), chosen (R,)."""
        R = self.most_sampled
        ends = np.cumsum([3 * M, 2 * M, S, 3 * R, R]).tolist()
        pieces = [values[first:end] for first, end in zip([0, *ends], ends, strict=False)]
        return pieces[0].reshape(3, M), pieces[1].reshape(2, M), pieces[2], pieces[3].reshape(3, R), pieces[4]

    def step(self, inputs: Tensor, M: int, S: int, draws: bool) -> Any:
        """What a graph records: scores (R, V) of the chosen tokens, or what they have drawn."""
        from kernel.flash_attention_ranges import ranges_from_keys

        runner = self.runner
        tokens, bounds, history, rows, chosen = self.parts(inputs, M, S)
        ranges = ranges_from_keys(*bounds.int().split(1), S)
        scores = runner.scores(tokens, None, PromptPieces([], [], history, ranges), chosen)
        return runner.choose(scores[:, : runner.config.num_ids], rows, DRAWS) if draws else scores


def bound(count: int) -> int:
    """The power of two that holds `count`, at least SHORTEST."""
    return max(SHORTEST, 1 << (count - 1).bit_length())
