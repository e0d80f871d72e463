"""The whole model with every attention backend: logits, loss, every gradient and ten steps as with SDPA on the CPU.

Without a GPU the Triton kernels run in the interpreter; with one, all backends run on it in float32.
"""

import pytest
import torch

from configs.errors import UserError
from llm.args import ModelConfig
from llm.loss import CrossEntropyLoss
from llm.optimizer import OptimizerConfig, build_optimizer
from llm.transformer import Transformer
from llm.transformer_context import make_context
from llm.transformer_init import initialise
from tests.tolerances import FP32_FORWARD, FP32_GRADIENT

SHAPE = dict(vocab_size=64, max_seq_len=32, d_model=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32, d_ff=48)
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU test below does this on the device")
BACKENDS = ["eager", "mock", "triton"]


def make(attention: str, device: str = "cpu", **changes) -> Transformer:
    model = Transformer(ModelConfig(**(SHAPE | changes), attention=attention))
    initialise(model, seed=0)
    return model.to(device)


def make_batch(packed: bool, step: int, shape: tuple[int, int] = (2, 19), vocab: int = 64) -> list[torch.Tensor]:
    """Token ids, targets with ignored ones, and document ids; or one document a row."""
    generator = torch.Generator().manual_seed(step)
    token_ids, targets = torch.randint(0, vocab, (2, *shape), generator=generator)
    targets[0, shape[1] // 2 :] = -100
    lengths = [4, 9, shape[1] - 13] if packed else [shape[1]]
    doc_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return [token_ids, targets, doc_ids.expand(shape[0], -1)]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.cpu() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def logits_and_loss(model: Transformer, batch: list[torch.Tensor], packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    token_ids, targets, doc_ids = (x.to(model.output.weight.device) for x in batch)
    logits = model(token_ids, make_context(token_ids, doc_ids=doc_ids if packed else None))
    sums = CrossEntropyLoss()(logits, targets)
    return logits, sums.loss_sum / sums.num_targets


def assert_matches_sdpa(models: list[Transformer], packed: bool, steps: int, batch_of) -> None:
    """models: the reference and the one under test; SGD-like checks at the first step, then AdamW's steps."""
    optimizers = [build_optimizer(model.named_parameters(), OptimizerConfig()) for model in models]
    for step in range(steps):
        results = [logits_and_loss(model, batch_of(step), packed) for model in models]
        for expected, actual in zip(*results, strict=True):
            assert relative_error(actual.detach(), expected.detach()) < 10 * FP32_FORWARD, step
        for _, loss in results:
            loss.backward()
        if step == 0:
            for (name, theirs), ours in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
                assert relative_error(ours.grad, theirs.grad) < 10 * FP32_GRADIENT, name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


@on_cpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_model_matches_sdpa_over_ten_steps(backend, packed):
    assert_matches_sdpa([make("sdpa"), make(backend)], packed, 10, lambda step: make_batch(packed, step))


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", ["sdpa", *BACKENDS])
def test_gpu_model_matches_sdpa_on_the_cpu_over_ten_steps(backend, packed):
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    changes = dict(vocab_size=256, max_seq_len=160, d_model=128, head_dim=64, d_ff=192)
    models = [make("sdpa", **changes), make(backend, "cuda", **changes)]
    assert_matches_sdpa(models, packed, 10, lambda step: make_batch(packed, step, (2, 150), 256))
    torch.set_float32_matmul_precision(precision)


def cached_logits(model: Transformer, token_ids: torch.Tensor, grad: bool) -> list[torch.Tensor]:
    """Prefill of unequal rows, then chunks of 1 and 4 tokens over the cache: the logits of each chunk."""
    with torch.set_grad_enabled(grad):
        cache = model.make_cache(3, 24)
        model(token_ids[:, :9], make_context(token_ids[:, :9], cache=cache))
        cache.trim([4, 9, 1])
        found = []
        for size in (1, 4):
            chunk = token_ids.gather(1, cache.positions[:, None] + torch.arange(size, device=token_ids.device))
            found.append(model(chunk, make_context(chunk, cache=cache)))
    return found


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=on_cpu), pytest.param("cuda", marks=pytest.mark.gpu)])
def test_logits_over_a_cache_match_sdpa(device, grad):
    token_ids = torch.randint(0, 64, (3, 20), generator=torch.Generator().manual_seed(2))
    expected = cached_logits(make("sdpa"), token_ids, False)
    for theirs, ours in zip(expected, cached_logits(make("triton", device), token_ids.to(device), grad), strict=True):
        assert relative_error(ours.detach(), theirs) < 10 * FP32_FORWARD


@on_cpu
def test_a_head_width_without_kernel_is_refused():
    token_ids = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(UserError, match="head_dim=16 has no kernel"):
        make("triton", head_dim=16)(token_ids)
