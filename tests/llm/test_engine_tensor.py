"""The engine over a model cut by tensor parallelism, on two gloo ranks, beside the whole model."""

import pytest
import torch

from llm.args import DataConfig, ModelConfig, ParallelConfig, TrainConfig
from llm.engine import Engine, EngineConfig, RequestParams
from llm.parallelize_tensor import apply_tensor
from llm.sampling import SamplingConfig
from llm.transformer import Transformer
from tests.parallel.pool import pool_of
from tests.tolerances import ENGINE_LOG_PROBS

SHAPES = {
    "gqa": dict(num_kv_heads=2, qkv_bias=True),
    "one kv head, tied": dict(num_kv_heads=1, tie_embeddings=True, qk_norm=True),
}
PROMPTS = [[5, 17, 60], [1], [9, 33, 2, 41, 8, 60, 7, 7, 12], [5, 17, 60, 4]]
SETTINGS = [SamplingConfig(temperature=0.0), SamplingConfig(temperature=0.8, top_k=20, seed=4)]


def random_model(shape: str, seed: int = 0) -> Transformer:
    base = dict(vocab_size=61, max_seq_len=64, d_model=32, num_layers=2, num_heads=4, d_ff=48)
    model = Transformer(ModelConfig(**base, **SHAPES[shape]))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.4, generator=generator)
    return model.eval()


def params() -> list[RequestParams]:
    return [RequestParams(SETTINGS[i % 2], max_new_tokens=12, index=i) for i in range(len(PROMPTS))]


def engine_config() -> EngineConfig:
    return EngineConfig(page_size=4, num_pages=40, max_running=3, prefill_chunk=8)


def generate_on_rank(mesh, shape):
    """Tokens and log-probabilities of the cut model, and again with other weights in place."""
    model = random_model(shape)
    parallel = ParallelConfig(tp=2, sequence_parallel=False)
    config = TrainConfig(name="tp", model=model.config, data=DataConfig("", "", seq_len=8), parallel=parallel)
    layout = apply_tensor(model, config, mesh)
    engine = Engine(model, engine_config(), tensor_layout=layout)
    first = engine.generate(PROMPTS, params())
    engine.load_weights(random_model(shape, seed=1).state_dict(), version=1)
    heads = engine.runner.cache.keys[0].shape[2]
    return [(c.token_ids, c.log_probs) for c in first + engine.generate(PROMPTS, params())], heads


@pytest.mark.dist
@pytest.mark.parametrize("shape", SHAPES)
def test_a_cut_model_generates_as_the_whole_one_does(shape):
    expected = Engine(random_model(shape), engine_config()).generate(PROMPTS, params())
    expected += Engine(random_model(shape, seed=1), engine_config()).generate(PROMPTS, params())
    degrees = ParallelConfig(tp=2).degrees().resolve(2)
    for found, heads in pool_of(2).run(generate_on_rank, shape, degrees=degrees):
        assert heads == 1, "each rank caches its own kv heads"
        for (tokens, log_probs), whole in zip(found, expected, strict=True):
            assert tokens == whole.token_ids
            torch.testing.assert_close(log_probs, whole.log_probs, atol=ENGINE_LOG_PROBS, rtol=0)
