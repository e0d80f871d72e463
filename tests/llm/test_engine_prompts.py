"""Pieces of prompts: their arrays against loops, and the padded steps of the graphs, run as they are."""

import numpy as np
import pytest
import torch

from llm.engine import Engine, EngineConfig, RequestParams
from llm.engine_graphs_prompt import PromptGraphs, bound
from llm.engine_prompts import prompt_arrays
from llm.engine_scheduler import Request, Segment
from llm.engine_text import RequestText
from llm.sampling import SamplingConfig
from tests.kernel.test_matvec import EagerGraphs, random_model
from tests.tolerances import ENGINE_LOG_PROBS

PROMPTS = [[1, 2, 3], [4] * 20, [4] * 17]
SAMPLINGS = [
    SamplingConfig(temperature=0.8, seed=1),
    SamplingConfig(temperature=1.5, top_k=7, top_p=0.9, seed=2),
    SamplingConfig(temperature=0.9, repetition_penalty=1.3, seed=3),
]


def segment(start: int, ids: list[int], pages: list[int], samples: bool) -> Segment:
    request = Request(0, ids, RequestParams(), 1, RequestText(None, ()))
    request.pages = pages
    return Segment(request, start, ids, samples)


def test_arrays_match_loops_over_the_pieces():
    segments = [
        segment(0, [7, 8, 9, 10, 11], [3, 1], True),
        segment(6, [20, 21, 22], [5, 2, 9, 4], False),
        segment(3, [30], [8], True),
    ]
    found = prompt_arrays(segments, page_size=4)
    expected, history, bounds, ends = [], [], [], []
    for one in segments:
        place = lambda t, pages=one.request.pages: pages[t // 4] * 4 + t % 4  # noqa: E731
        first = len(history)
        for i, token_id in enumerate(one.token_ids):
            t = one.start + i
            expected.append((token_id, t, place(t)))
            bounds.append((first, first + t + 1))
        history += [place(t) for t in range(one.start + len(one.token_ids))]
        ends += [len(expected) - 1] if one.samples else []
    assert found.tokens.T.tolist() == [list(column) for column in expected]
    assert found.history.tolist() == history and found.bounds.T.tolist() == [list(pair) for pair in bounds]
    assert found.offsets.tolist() == [0, 5, 8, 9] and found.history_offsets.tolist() == [0, 5, 14, 18]
    assert found.ends.tolist() == ends == [4, 8]


class EagerPrompts(PromptGraphs):
    """The steps that would be captured, run as they are: a graph needs a GPU."""

    def __init__(self, runner):
        super().__init__(runner)
        self.keys = []

    def replay(self, key, values: np.ndarray):
        self.keys.append(key)
        inputs = self.runner.upload(values)
        return self.step(inputs, *key), inputs


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/llm/test_engine_gpu.py replays real graphs")
def test_padded_steps_match_the_plain_engine(monkeypatch):
    monkeypatch.setattr("llm.engine_graphs_prompt.SHORTEST", 16)  # the interpreter pays for each padded token
    model, params = random_model(), [RequestParams(s, max_new_tokens=2, top_log_probs=2) for s in SAMPLINGS]
    config = EngineConfig(page_size=16, max_running=4, num_pages=20, prefill_chunk=16, cuda_graph=False, num_ids=77)
    monkeypatch.setattr("llm.engine_runner.kernels_run", lambda model, device: False)
    expected = Engine(model, config).generate(PROMPTS, params)
    monkeypatch.setattr("llm.engine_runner.kernels_run", lambda model, device: True)
    engine = Engine(model, config)
    engine.runner.graphs, engine.runner.prompt_graphs = EagerGraphs(engine.runner), EagerPrompts(engine.runner)
    found = engine.generate(PROMPTS, params)
    assert set(engine.runner.prompt_graphs.keys) == {(16, 16, True), (16, 64, False)}
    for ours, plain in zip(found, expected, strict=True):
        assert ours.token_ids == plain.token_ids
        torch.testing.assert_close(ours.log_probs, plain.log_probs, atol=ENGINE_LOG_PROBS, rtol=0)
        torch.testing.assert_close(ours.kept_masses, plain.kept_masses, atol=ENGINE_LOG_PROBS, rtol=0)


def test_bounds_are_powers_of_two():
    assert [bound(count) for count in (1, 64, 65, 128, 1000)] == [64, 64, 128, 128, 1024]
