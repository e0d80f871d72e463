"""The whole model with attention=triton, in Triton's interpreter: logits and every gradient as with SDPA."""

import pytest
import torch

from configs.errors import UserError
from llm.args import ModelConfig
from llm.generating_loop import GenerationLimits, generate
from llm.sampling import SamplingConfig
from llm.transformer import Transformer
from llm.transformer_context import make_context
from llm.transformer_init import initialise
from tests.tolerances import FP32_FORWARD, FP32_GRADIENT

SHAPE = dict(vocab_size=64, max_seq_len=32, d_model=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32, d_ff=48)


def make(attention: str, **changes) -> Transformer:
    model = Transformer(ModelConfig(**(SHAPE | changes), attention=attention))
    initialise(model, seed=0)
    return model


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-30)).item()


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/llm/test_gpu.py does this on the device")
@pytest.mark.parametrize("packed", [False, True])
def test_model_with_triton_matches_sdpa(packed):
    token_ids = torch.randint(0, 64, (2, 19), generator=torch.Generator().manual_seed(0))
    doc_ids = torch.repeat_interleave(torch.arange(3), torch.tensor([4, 9, 6]))[None].expand(2, -1) if packed else None
    models = [make(attention) for attention in ("sdpa", "triton")]
    logits = [model(token_ids, make_context(token_ids, doc_ids=doc_ids)) for model in models]
    assert relative_error(logits[1], logits[0]) < FP32_FORWARD
    weights = torch.randn(logits[0].shape, generator=torch.Generator().manual_seed(1))
    for output in logits:
        (output * weights).sum().backward()
    for (name, ours), theirs in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
        assert relative_error(ours.grad, theirs.grad) < 10 * FP32_GRADIENT, name


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/llm/test_gpu.py does this on the device")
def test_generation_with_triton_matches_sdpa():
    outputs = [
        generate(make(attention).eval(), [[1, 2, 3], [4]], SamplingConfig(temperature=0), GenerationLimits(3))
        for attention in ("sdpa", "triton")
    ]
    assert outputs[0] == outputs[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about the interpreter's input checks on a CPU")
def test_a_head_width_without_kernel_is_refused():
    token_ids = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(UserError, match="head_dim=16 has no kernel"):
        make("triton", head_dim=16)(token_ids)
