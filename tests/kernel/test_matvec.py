"""The engine by its kernels against the engine without: the same tokens; in the interpreter where no GPU is."""

import numpy as np
import pytest
import torch

from llm import engine_runner
from llm.args import ModelConfig
from llm.engine import Engine, EngineConfig, RequestParams
from llm.engine_graphs import DecodeGraphs
from llm.engine_single import SingleToken, runs_single
from llm.sampling import SamplingConfig
from llm.transformer import Transformer
from tests.tolerances import ENGINE_LOG_PROBS

SHAPE = dict(vocab_size=80, max_seq_len=64, d_model=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, d_ff=72)
PROMPTS = [[1, 2, 3], [4] * 18]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class EagerGraphs(DecodeGraphs):
    """The steps that would be captured, run as they are: a graph needs a GPU."""

    def __init__(self, runner):
        self.runner, self.sizes = runner, [1, 4]
        self.launched = []

    def replay(self, key, rows: np.ndarray):
        size, mode, _ = key
        self.launched.append(size)
        rows = self.runner.upload(rows)
        return self.step_of(rows, mode, self.runner.max_len)(), rows


def random_model(**changes) -> Transformer:
    model = Transformer(ModelConfig(**(SHAPE | changes))).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
    return model.to(DEVICE)


def generate(model: Transformer, prompts: list[list[int]], sampling: SamplingConfig, graphs=None):
    config = EngineConfig(page_size=16, max_running=4, num_pages=20, prefill_chunk=16, cuda_graph=False, num_ids=77)
    engine = Engine(model, config)
    if graphs is not None:
        engine.runner.single = SingleToken(engine.runner)
        engine.runner.graphs = graphs(engine.runner)
    params = [RequestParams(sampling, max_new_tokens=3, index=i, top_log_probs=3) for i in range(len(prompts))]
    return engine, engine.generate(prompts, params)


@pytest.mark.parametrize(
    ("changes", "sampling"),
    [
        (dict(qkv_bias=True, num_kv_heads=4), SamplingConfig(temperature=0.0)),
        (dict(tie_embeddings=True, max_seq_len=2048), SamplingConfig(temperature=0.8)),
    ],
    ids=["bias", "tied"],
)
def test_engine_with_kernels_matches_the_plain_one(monkeypatch, changes, sampling):
    model = random_model(**changes)
    monkeypatch.setattr(engine_runner, "kernels_run", lambda model, device: False)
    expected = [generate(model, [prompt], sampling)[1][0] for prompt in PROMPTS[:1]]
    _, batch = generate(model, PROMPTS, sampling)
    expected += batch
    monkeypatch.setattr(engine_runner, "kernels_run", lambda model, device: True)
    assert runs_single(model)
    engine, found = generate(model, PROMPTS[:1], sampling, EagerGraphs)
    assert engine.runner.graphs.launched == [1] * 2, "a request alone must decode by the matrix-vector kernels"
    engine, batch = generate(model, PROMPTS, sampling, EagerGraphs)
    assert 4 in engine.runner.graphs.launched
    for ours, plain in zip(found + batch, expected, strict=True):
        assert ours.token_ids == plain.token_ids
        torch.testing.assert_close(ours.log_probs, plain.log_probs, atol=ENGINE_LOG_PROBS, rtol=0)


def test_models_with_other_layers_stay_with_their_own():
    assert not runs_single(random_model(qk_norm=True))
    model = random_model()
    assert not runs_single(model), "not before its projections are joined"
    generate(model, PROMPTS[:1], SamplingConfig(temperature=0.0))
    assert runs_single(model)
    model.blocks["1"].ffn.down_proj.matmul = lambda x, weight, bias: x @ weight.T
    assert not runs_single(model)
