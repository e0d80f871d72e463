"""Batch-invariant steps: every forward pass of the engine has one shape, so a token's numbers never depend on company.

Matrix products choose their kernels, and with them the order of their sums, by the number of rows; the attention
kernels cut sequences by how many there are. Here a step is always `num_rows` rows, and a row is one token of one
request, prompt or completion alike, with the request's block table and its own length: within a layer all keys are
written before any is read, so tokens of one prompt see each other. Chunks of keys have a fixed size. It costs rows that
are padding, and a prompt's keys are read once a token. On a GPU all steps replay one CUDA graph. Idea: He et al. 2025
(Thinking Machines, "Defeating nondeterminism in LLM inference"), who make each kernel invariant instead.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from llm.engine_cache import DecodeRows
from llm.engine_graphs import record
from llm.engine_scheduler import StepPlan

SPLIT_KEYS = 512  # a chunk of the decode kernel
FROM_DEVICE = -1  # in place of a token id: the slot's last token


def invariant_rows(max_running: int) -> int:
    """Rows of every step: all decoding requests, and at least as many prompt tokens."""
    return max(64, 2 * max_running)


class InvariantSteps:
    """Scores of a plan's rows by passes of one shape; one for each EngineRunner."""

    def __init__(self, runner: Any):
        self.runner = runner
        self.num_rows = invariant_rows(runner.config.max_running)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.rows: Tensor | None = None  # (3, num_rows) int64 that the graph reads
        self.scores: Tensor | None = None  # (num_rows, V) that it leaves

    def logits(self, plan: StepPlan, sampling: list[int]) -> Tensor:
        """Scores (R, V) of the rows `sampling` of a plan's tokens."""
        rows = self.runner.upload(self.token_rows(plan))
        if self.runner.uses_graphs:
            scores = self.replay(rows)
        else:
            scores = self.forward(rows)
        return scores[self.runner.upload(np.array(sampling, dtype=np.int64))]

    def token_rows(self, plan: StepPlan) -> np.ndarray:
        """(3, num_rows): slot, length with the token itself, and id of every token; the spare slot fills up."""
        rows = np.zeros((3, self.num_rows), dtype=np.int64)
        rows[0], rows[1] = self.runner.spare_slot, 1
        count = len(plan.decode)
        rows[:, :count] = [
            [request.slot for request in plan.decode],
            [request.num_computed for request in plan.decode],
            [FROM_DEVICE] * count,
        ]
        for segment in plan.segments:
            end = count + len(segment.token_ids)
            rows[0, count:end] = segment.request.slot
            rows[1, count:end] = np.arange(segment.start + 1, segment.start + 1 + end - count)
            rows[2, count:end] = segment.token_ids
            count = end
        return rows

    def forward(self, rows: Tensor) -> Tensor:
        """The model over rows (3, num_rows) -> scores (num_rows, V)."""
        runner = self.runner
        tokens, decode = runner.decode_inputs(rows, runner.max_len)
        tokens[0] = torch.where(rows[2] == FROM_DEVICE, tokens[0], rows[2])
        decode = DecodeRows(decode.lens, decode.tables, runner.max_len, SPLIT_KEYS)
        return runner.scores(tokens, decode, None, None)

    def replay(self, rows: Tensor) -> Tensor:
        """forward from a CUDA graph."""
        if self.graph is None:
            self.rows = self.runner.upload(self.token_rows(StepPlan())).clone()  # padding, which touches no page
            self.graph, self.scores = record(lambda: self.forward(self.rows))
        self.rows.copy_(rows)
        self.graph.replay()
        return self.scores
