"""The model against Hugging Face transformers with copied weights, its backends against each other, its start."""

import math

import pytest
import torch
import transformers
from torch.nn import functional as F

from configs.errors import UserError
from llm.args import ModelConfig, MoeConfig, RopeScaling
from llm.transformer import RmsNorm, RoPE, Transformer
from llm.transformer_context import make_context
from llm.transformer_init import initialise
from tests.tolerances import FP32_FORWARD, FP64, INITIAL_LOSS

SMALL = dict(vocab_size=96, max_seq_len=64, d_model=32, num_layers=2, num_heads=4, d_ff=48)
HF_SMALL = dict(
    vocab_size=96, max_position_embeddings=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=48, attn_implementation="eager", experts_implementation="eager",
)  # fmt: skip
RENAMES = [
    ("model.embed_tokens", "embedding"), ("model.norm", "norm"), ("lm_head", "output"), ("model.layers", "blocks"),
    ("self_attn", "attention"), ("input_layernorm", "attention_norm"), ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate.weight", "ffn.router.weight"), ("mlp", "ffn"),
]  # fmt: skip
LLAMA3_ROPE = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32, rope_theta=500_000.0,
)  # fmt: skip
# Our shape, and the transformers model and settings that must compute the same.
FAMILIES = {
    "llama": (
        ModelConfig(**SMALL, num_kv_heads=2),
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(**HF_SMALL, num_key_value_heads=2, rms_norm_eps=1e-5),
    ),
    "llama3-scaled-tied": (
        ModelConfig(
            **SMALL, num_kv_heads=1, rope_theta=5e5, tie_embeddings=True, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32)
        ),
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(
            **HF_SMALL, num_key_value_heads=1, rms_norm_eps=1e-5, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True
        ),
    ),
    "qwen2": (
        ModelConfig(**SMALL, num_kv_heads=2, qkv_bias=True, norm_eps=1e-6),
        transformers.Qwen2ForCausalLM,
        transformers.Qwen2Config(**HF_SMALL, num_key_value_heads=2, rms_norm_eps=1e-6),
    ),
    "qwen3": (
        ModelConfig(**SMALL, num_kv_heads=2, head_dim=16, qk_norm=True, norm_eps=1e-6),
        transformers.Qwen3ForCausalLM,
        transformers.Qwen3Config(**HF_SMALL, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6),
    ),
    "mixtral": (
        ModelConfig(**SMALL, num_kv_heads=2, rope_theta=1e6, moe=MoeConfig(4, 2, 48)),
        transformers.MixtralForCausalLM,
        transformers.MixtralConfig(
            **HF_SMALL, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, rms_norm_eps=1e-5
        ),
    ),
    "qwen3-moe": (
        ModelConfig(
            **SMALL, num_kv_heads=2, head_dim=16, qk_norm=True, norm_eps=1e-6, moe=MoeConfig(4, 2, 24, False)
        ),
        transformers.Qwen3MoeForCausalLM,
        transformers.Qwen3MoeConfig(
            **HF_SMALL, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=24, norm_topk_prob=False, rms_norm_eps=1e-6,
        ),
    ),
}  # fmt: skip


def under_our_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Hugging Face's tensors renamed; its fused expert weights (E, 2F, C) split into gate and up."""
    renamed = {}
    for name, value in tensors.items():
        for theirs, ours in RENAMES:
            name = name.replace(theirs, ours)
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("experts.gate_up_proj")
            renamed[stem + "gate_proj"], renamed[stem + "up_proj"] = value.chunk(2, dim=1)
        else:
            renamed[name.replace("experts.down_proj", "down_proj")] = value
    return renamed


def random_pair(family: str, backend: str) -> tuple[Transformer, torch.nn.Module]:
    """Our model and the reference with the same weights, all random: a norm of ones would hide a missing product."""
    config, reference_class, reference_config = FAMILIES[family]
    reference = reference_class(reference_config).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.15, generator=generator)
    config.attention = backend
    model = Transformer(config).double()
    model.load_state_dict(under_our_names(reference.state_dict()), strict=True)
    return model, reference


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-30)).item()


@pytest.mark.parametrize("backend", ["eager", "sdpa", "mock"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_match_transformers(family, backend):
    model, reference = random_pair(family, backend)
    token_ids = torch.randint(0, 96, (2, 48), generator=torch.Generator().manual_seed(1))
    ours, theirs = model(token_ids), reference(token_ids).logits
    # transformers computes norms, RoPE and the router in float32, so float64 weights do not bring it to 1e-12.
    assert relative_error(ours, theirs) < FP32_FORWARD
    weights = torch.randn(ours.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    expected = under_our_names({name: parameter.grad for name, parameter in reference.named_parameters()})
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad, expected[name]) < 10 * FP32_FORWARD, name


def test_rms_norm_matches_torch():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 16, generator=generator)
    norm = RmsNorm(16, eps=1e-3)
    with torch.no_grad():
        norm.weight.normal_(generator=generator)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (16,), norm.weight, 1e-3), rtol=1e-6, atol=1e-6)


def test_rope_scores_depend_on_relative_positions_only():
    rope = RoPE(16, 10_000.0)
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def score(query_position: int, key_position: int) -> float:
        turned_q = RoPE.rotate(q, rope(torch.tensor([[query_position]])))
        turned_k = RoPE.rotate(k, rope(torch.tensor([[key_position]])))
        return (turned_q * turned_k).sum().item()

    assert score(7, 3) == pytest.approx(score(100_040, 100_036), abs=1e-5)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-3)


def test_rope_keeps_its_angles_when_the_model_is_cast():
    rope = RoPE(16, 10_000.0)
    positions = torch.tensor([[131_071]])
    before = rope(positions)
    after = rope.to(torch.bfloat16)(positions)
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])


@pytest.mark.parametrize("backend", ["eager", "sdpa", "mock"])
def test_packed_documents_match_documents_alone(backend):
    model = Transformer(ModelConfig(**SMALL, num_kv_heads=2, attention=backend)).double()
    initialise(model, seed=0)
    token_ids = torch.randint(0, 96, (1, 24), generator=torch.Generator().manual_seed(3))
    lengths = [5, 12, 7]
    doc_ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(token_ids, make_context(token_ids, token_positions=positions, doc_ids=doc_ids))[0]
    alone = torch.cat([model(part[None])[0] for part in token_ids[0].split(lengths)])
    assert relative_error(packed, alone) < FP64
    assert relative_error(model(token_ids)[0], alone) > 1e-3, "documents must matter, or the test shows nothing"


@pytest.mark.parametrize("backend", ["eager", "sdpa", "mock"])
def test_attention_matches_its_equation(backend):
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(2, 6, 4, 8, dtype=torch.float64, generator=generator)
    k, v = torch.randn(2, 2, 6, 2, 8, dtype=torch.float64, generator=generator)
    attention = Transformer(ModelConfig(**SMALL, num_kv_heads=2, attention=backend)).blocks["0"].attention
    out, lse = attention.attend(q, k, v, make_context(torch.zeros(2, 6, dtype=torch.long)))
    for b, t, h in [(0, 0, 0), (0, 3, 2), (1, 5, 1)]:
        scores = k[b, : t + 1, h // 2] @ q[b, t, h] / math.sqrt(8)  # query heads 0, 1 share kv head 0
        torch.testing.assert_close(out[b, t, h], torch.softmax(scores, 0) @ v[b, : t + 1, h // 2])
        if lse is not None:
            torch.testing.assert_close(lse[b, h, t], torch.logsumexp(scores, 0))
    assert (lse is None) == (backend == "sdpa")


def test_a_query_that_sees_nothing_gets_zero():
    attention = Transformer(ModelConfig(**SMALL, attention="eager")).blocks["0"].attention
    q = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(5), requires_grad=True)
    ctx = make_context(torch.zeros(1, 2, dtype=torch.long))
    ctx.mask = torch.tensor([[[[False, False], [True, True]]]])
    out, lse = attention.attend(q, q, q, ctx)
    assert out[0, 0].abs().max() == 0 and lse[0, :, 0].max() == float("-inf")
    out.sum().backward()
    assert out[0, 1].abs().max() > 0 and q.grad.isfinite().all()


@pytest.mark.parametrize("shape", [{}, {"tie_embeddings": True}, {"d_model": 128, "num_layers": 3}])
def test_a_fresh_model_starts_at_the_predicted_loss(shape):
    config = ModelConfig(**(SMALL | dict(vocab_size=4096) | shape))
    model = Transformer(config)
    initialise(model, seed=0)
    token_ids, targets = torch.randint(0, 4096, (2, 16, 64), generator=torch.Generator().manual_seed(6))
    loss = F.cross_entropy(model(token_ids).flatten(0, 1), targets.flatten()).item()
    assert loss == pytest.approx(math.log(4096) + 0.0002 * config.d_model, rel=INITIAL_LOSS)


def test_initial_weights_depend_on_seed_and_name_only():
    first, second, other = (Transformer(ModelConfig(**SMALL)) for _ in range(3))
    initialise(first, seed=0)
    torch.manual_seed(99)  # torch's global seed must not matter
    initialise(second, seed=0)
    initialise(other, seed=1)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert not torch.equal(first.embedding.weight, other.embedding.weight)
    outputs = [first.blocks[layer].attention.o_proj.weight for layer in "01"]
    assert not torch.equal(*outputs)
    assert outputs[0].std().item() == pytest.approx(0.02 / math.sqrt(2 * 2), rel=0.1)
    assert first.blocks["0"].attention.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(num_kv_heads=3), "must divide num_heads=4"),
        (dict(num_heads=5), "must divide d_model=32"),
        (dict(head_dim=7), "must be even"),
        (dict(attention="magic"), "use one of"),
        (dict(d_ff=0), "must be positive"),
        (dict(rope_scaling=dict(low_freq_factor=4.0)), "high_freq_factor"),
        (dict(moe=dict(num_experts=2, experts_per_token=3, d_ff=8)), "experts_per_token"),
    ],
)
def test_impossible_shapes_are_refused(changes, words):
    with pytest.raises(UserError, match=words):
        nested = dict(rope_scaling=RopeScaling, moe=MoeConfig)
        changes = {key: nested[key](**value) if key in nested else value for key, value in changes.items()}
        ModelConfig(**(SMALL | changes))


def test_vocab_size_comes_from_the_tokenizer_and_must_hold_it():
    assert ModelConfig(**(SMALL | dict(vocab_size=None))).with_vocab_of(1000).vocab_size == 1024
    with pytest.raises(UserError, match="smaller than the tokenizer's 97"):
        ModelConfig(**SMALL).with_vocab_of(97)
