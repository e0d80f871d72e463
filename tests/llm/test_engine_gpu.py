"""On a GPU: graphs, kernels and batch-invariant steps against the engine on the CPU."""

from dataclasses import replace

import pytest
import torch

from llm.args import ModelConfig
from llm.engine import Engine, EngineConfig, RequestParams
from llm.sampling import SamplingConfig
from llm.transformer import Transformer
from tests.tolerances import ENGINE_BF16_LOG_PROBS, ENGINE_BF16_LOG_PROBS_MEAN, ENGINE_LOG_PROBS

pytestmark = pytest.mark.gpu
SHAPES = {
    "dense": dict(num_kv_heads=2, head_dim=64),
    "qwen": dict(num_kv_heads=1, head_dim=64, qkv_bias=True, qk_norm=True, tie_embeddings=True),
}
SETTINGS = [SamplingConfig(temperature=0.0), SamplingConfig(temperature=0.8, seed=2), SamplingConfig(top_k=20, seed=3)]
PROMPTS = [[1 + i, 7, 30 * i % 250, 9] * (1 + 11 * i) for i in range(6)]


@pytest.fixture(autouse=True)
def exact_products():
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(precision)


def random_model(shape: str, device: str, dtype: torch.dtype = torch.float32) -> Transformer:
    base = dict(vocab_size=256, max_seq_len=512, d_model=128, num_layers=2, num_heads=4, d_ff=192)
    model = Transformer(ModelConfig(**base, **SHAPES[shape]))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1, generator=generator)
    return model.to(device, dtype).eval()


def params() -> list[RequestParams]:
    return [RequestParams(SETTINGS[i % 3], max_new_tokens=24, index=i) for i in range(len(PROMPTS))]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_and_log_probs_are_the_cpus(shape, graphs):
    expected = Engine(random_model(shape, "cpu"), EngineConfig(max_running=4)).generate(PROMPTS, params())
    config = EngineConfig(max_running=4, page_size=16, prefill_chunk=64, cuda_graph=graphs)
    engine = Engine(random_model(shape, "cuda"), config)
    found = engine.generate(PROMPTS, params())
    found += [engine.generate([prompt], [own])[0] for prompt, own in zip(PROMPTS, params(), strict=True)]
    for ours, theirs in zip(found, expected * 2, strict=True):
        assert ours.token_ids == theirs.token_ids
        torch.testing.assert_close(ours.log_probs, theirs.log_probs, atol=10 * ENGINE_LOG_PROBS, rtol=0)
    assert (engine.runner.single is not None) == (shape == "dense")
    assert graphs == any(size == 1 for size, *_ in (engine.runner.graphs.captured if graphs else {}))


def test_in_batch_invariant_mode_company_changes_no_bit():
    engine = Engine(random_model("dense", "cuda", torch.bfloat16), EngineConfig(max_running=4, batch_invariant=True))
    together = engine.generate(PROMPTS, params())
    for prompt, own, whole in zip(PROMPTS, params(), together, strict=True):
        alone = engine.generate([prompt], [own])[0]
        assert alone.token_ids == whole.token_ids and alone.log_probs == whole.log_probs


def test_new_weights_reach_recorded_graphs():
    model, other = random_model("dense", "cuda"), random_model("dense", "cuda")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    engine = Engine(model, EngineConfig(max_running=4))
    engine.generate(PROMPTS, params())
    engine.load_weights(other.state_dict(), version=1)
    fresh = Engine(other, EngineConfig(max_running=4)).generate(PROMPTS, params())
    for ours, theirs in zip(engine.generate(PROMPTS, params()), fresh, strict=True):
        assert ours.token_ids == theirs.token_ids and set(ours.weight_versions) == {1}


@torch.no_grad()
def log_prob_errors(model: Transformer, completions: list) -> torch.Tensor:
    """|engine - full pass| of every token of greedy and drawn completions at temperature 1."""
    errors = []
    for one in completions:
        row = torch.tensor([one.prompt_ids + one.token_ids], device="cuda")
        exact = model(row)[0, len(one.prompt_ids) - 1 : -1].log_softmax(-1)
        exact = exact.gather(1, row[0, len(one.prompt_ids) :, None])[:, 0].cpu()
        errors.append((exact - torch.tensor(one.log_probs)).abs())
    return torch.cat(errors)


@pytest.mark.parametrize("pdl", [True, False])
def test_batches_in_bfloat16_match_a_full_pass(pdl):
    """Rows of every length, more of them than the 16 of the smallest tile, through kernel/few_rows."""
    model, exact = random_model("dense", "cuda", torch.bfloat16), random_model("dense", "cuda")
    exact.load_state_dict({name: x.float() for name, x in model.state_dict().items()})
    engine = Engine(model, EngineConfig(max_running=24, page_size=16))
    engine.runner.few.config = replace(engine.runner.few.config, pdl=pdl and engine.runner.few.config.pdl)
    taken, scores = set(), engine.runner.few.scores
    engine.runner.few.scores = lambda rows: taken.add(rows.shape[1]) or scores(rows)
    prompts = [[1 + i, 7, 30 * i % 250, 9] * (1 + 3 * i) for i in range(20)]
    own = [
        RequestParams(SamplingConfig(temperature=float(i % 2), seed=i), max_new_tokens=12 + i, index=i)
        for i in range(20)
    ]
    errors = log_prob_errors(exact, engine.generate(prompts, own))
    assert {2, 8, 24} <= taken, taken
    assert errors.max() < ENGINE_BF16_LOG_PROBS and errors.mean() < ENGINE_BF16_LOG_PROBS_MEAN, errors


def test_prompts_are_replayed_as_graphs():
    engine = Engine(random_model("dense", "cuda"), EngineConfig(max_running=4, page_size=16, prefill_chunk=64))
    first = engine.generate(PROMPTS, params())
    assert {key[0] for key in engine.runner.prompt_graphs.captured} == {64}
    eager = Engine(random_model("dense", "cuda"), EngineConfig(max_running=4, page_size=16, cuda_graph=False))
    for ours, theirs in zip(first, eager.generate(PROMPTS, params()), strict=True):
        assert ours.token_ids == theirs.token_ids
        torch.testing.assert_close(ours.log_probs, theirs.log_probs, atol=10 * ENGINE_LOG_PROBS, rtol=0)
