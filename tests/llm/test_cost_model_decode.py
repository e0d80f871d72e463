"""What decoding must cost, against parameters, caches and sums counted another way."""

import pytest
import torch

from llm.args import ModelConfig, MoeConfig
from llm.cost_model_counts import forward_flops_per_token
from llm.cost_model_decode import (
    DecodeRates,
    cache_bytes_per_token,
    decode_step_bytes,
    decode_step_flops,
    decode_step_time,
    decode_weight_bytes,
    generation_time,
    prefill_time,
)
from llm.engine import Engine, EngineConfig
from llm.transformer import Transformer

SHAPES = {
    "untied": dict(num_kv_heads=2, qkv_bias=True),
    "tied": dict(num_kv_heads=1, tie_embeddings=True, qk_norm=True),
    "moe": dict(num_kv_heads=4, moe=MoeConfig(4, 2, 24)),
}
RATES = DecodeRates(1e12, 1e11)


def config_of(shape: str) -> ModelConfig:
    return ModelConfig(vocab_size=96, max_seq_len=64, d_model=32, num_layers=3, num_heads=4, d_ff=48, **SHAPES[shape])


@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_are_those_of_the_parameters_and_of_the_cache(shape):
    config = config_of(shape)
    model = Transformer(config)
    held = {name: tensor.numel() for name, tensor in model.state_dict().items()}
    read = sum(held.values()) - held["embedding.weight"]  # state_dict() has a tied table twice: once as the output
    assert decode_weight_bytes(config, 4) == 4 * read
    engine = Engine(model, EngineConfig(page_size=8, num_pages=5, max_running=2))
    tokens = engine.runner.num_pages * 8
    assert cache_bytes_per_token(config, 4) * tokens == engine.runner.cache.num_bytes
    step = decode_step_bytes(config, 3, 10, 4) - decode_weight_bytes(config, 4)
    assert step == 3 * 11 * cache_bytes_per_token(config, 4)


def test_flops_are_the_forward_passes_with_all_keys_seen():
    config = config_of("untied")
    # A forward pass counts half of seq_len keys a query; a decoding token sees all of its context.
    assert decode_step_flops(config, 5, 20) == 5 * forward_flops_per_token(config, 40)


def test_time_is_the_longer_of_both_and_a_batch_is_the_sum_of_its_steps():
    config = config_of("untied")
    few, many = decode_step_time(config, 1, 10, RATES, 4), decode_step_time(config, 4096, 1, RATES, 4)
    assert few.bound == "memory" and few.seconds == decode_step_bytes(config, 1, 10, 4) / RATES.memory_bytes
    assert many.bound == "matmul" and many.seconds == decode_step_flops(config, 4096, 1) / RATES.matmul_flops
    total = generation_time(config, [6, 9], [1, 4], RATES, 4)
    steps = sum(decode_step_time(config, 1, 9 + step, RATES, 4).seconds for step in (1, 2, 3))
    assert total.seconds == pytest.approx(prefill_time(config, [6, 9], RATES, 4).seconds + steps)
    assert prefill_time(config, [60] * 400, RATES, 4).bound == "matmul"
    assert torch.isfinite(torch.tensor(total.seconds))
