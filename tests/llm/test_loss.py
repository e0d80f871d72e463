"""Cross-entropy sums against torch's F.cross_entropy and autograd through plain formulas."""

import pytest
import torch
from torch.nn import functional as F

from llm import loss
from llm.loss import IGNORE_INDEX, CrossEntropyLoss, token_losses
from tests.tolerances import BF16_ROUNDING, FP32_FORWARD, FP32_GRADIENT, FP64

B, T, V = 3, 7, 29


def example(dtype=torch.float64, scale=3.0):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(B, T, V, generator=generator, dtype=torch.float64) * scale).to(dtype)
    targets = torch.randint(0, V, (B, T), generator=generator)
    targets[0, 2:5] = IGNORE_INDEX
    return logits.requires_grad_(), targets


def reference(logits, targets, z_loss):
    """Loss and z-loss sums by torch's own operations in float64, and the gradient of 0.3 loss + 0.7 z-loss."""
    logits = logits.detach().double().requires_grad_()
    loss_sum = F.cross_entropy(logits.view(-1, V), targets.view(-1), ignore_index=IGNORE_INDEX, reduction="sum")
    z_loss_sum = z_loss * (logits.logsumexp(-1)[targets != IGNORE_INDEX] ** 2).sum()
    (0.3 * loss_sum + 0.7 * z_loss_sum).backward()
    return loss_sum.detach(), z_loss_sum.detach(), logits.grad


@pytest.fixture(params=[1 << 17, 4 * V + 3], ids=["one_chunk", "chunks_of_4_rows"])
def chunks(request, monkeypatch):
    monkeypatch.setattr(loss, "CPU_CHUNK_ELEMENTS", request.param)


@pytest.mark.parametrize("z_loss", [0.0, 0.05])
def test_sums_and_gradient_match_torch(chunks, z_loss):
    logits, targets = example()
    expected_loss, expected_z, expected_gradient = reference(logits, targets, z_loss)
    sums = CrossEntropyLoss(z_loss=z_loss)(logits, targets)
    (0.3 * sums.loss_sum + 0.7 * sums.z_loss_sum).backward()
    assert sums.num_targets.item() == B * T - 3
    torch.testing.assert_close(sums.loss_sum, expected_loss, rtol=FP64, atol=0)
    torch.testing.assert_close(sums.z_loss_sum, expected_z, rtol=FP64, atol=0)
    torch.testing.assert_close(logits.grad, expected_gradient, rtol=FP64, atol=FP64)
    assert torch.equal(logits.grad[0, 2:5], torch.zeros(3, V, dtype=torch.float64))


def test_float32_matches_float64(chunks):
    logits, targets = example(torch.float32)
    expected_loss, expected_z, expected_gradient = reference(logits, targets, 0.05)
    sums = CrossEntropyLoss(z_loss=0.05)(logits, targets)
    (0.3 * sums.loss_sum + 0.7 * sums.z_loss_sum).backward()
    torch.testing.assert_close(sums.loss_sum.double(), expected_loss, rtol=FP32_FORWARD, atol=0)
    torch.testing.assert_close(sums.z_loss_sum.double(), expected_z, rtol=FP32_FORWARD, atol=0)
    bound = FP32_GRADIENT * expected_gradient.abs().max().item()
    torch.testing.assert_close(logits.grad.double(), expected_gradient, rtol=0, atol=bound)


def test_bfloat16_logits_lose_only_the_last_rounding(chunks):
    """Arithmetic is float32, so each gradient entry is within a rounding of the exact one, also at a target with p
    near 1, where p - 1 would vanish had p been rounded first."""
    logits, targets = example(torch.bfloat16, scale=1.0)
    with torch.no_grad():
        logits[1, 0, targets[1, 0]] = 12.0
    expected_loss, _, expected_gradient = reference(logits, targets, 0.0)
    sums = CrossEntropyLoss()(logits, targets)
    (0.3 * sums.loss_sum).backward()
    assert sums.loss_sum.dtype == torch.float32 and logits.grad.dtype == torch.bfloat16
    torch.testing.assert_close(sums.loss_sum.double(), expected_loss, rtol=FP32_FORWARD, atol=0)
    torch.testing.assert_close(logits.grad.double(), expected_gradient, rtol=BF16_ROUNDING, atol=1e-7)


def test_micro_batches_sum_to_the_whole_batch():
    logits, targets = example()
    whole = CrossEntropyLoss(z_loss=0.01)(logits, targets)
    (whole.loss_sum / whole.num_targets).backward()
    expected, logits.grad = logits.grad, None
    parts = [CrossEntropyLoss(z_loss=0.01)(logits[:, part], targets[:, part]) for part in (slice(0, 1), slice(1, None))]
    for part in parts:
        (part.loss_sum / whole.num_targets).backward(retain_graph=True)
    assert sum(part.num_targets for part in parts) == whole.num_targets
    for field in ("loss_sum", "z_loss_sum"):
        torch.testing.assert_close(sum(getattr(p, field) for p in parts), getattr(whole, field), rtol=FP64, atol=0)
    torch.testing.assert_close(logits.grad, expected, rtol=FP64, atol=FP64)


def test_ignored_rows_change_nothing_and_a_batch_of_them_is_zero():
    logits, targets = example()
    padded_logits = torch.cat([logits.detach(), 50 * torch.ones(B, T, V, dtype=torch.float64)], dim=1).requires_grad_()
    padded_targets = torch.cat([targets, torch.full((B, T), IGNORE_INDEX)], dim=1)
    plain, padded = (
        CrossEntropyLoss(z_loss=0.1)(*pair) for pair in ((logits, targets), (padded_logits, padded_targets))
    )
    for one, other in zip(plain, padded, strict=True):
        torch.testing.assert_close(one, other, rtol=FP64, atol=0)
    nothing = CrossEntropyLoss(z_loss=0.1)(logits, torch.full((B, T), IGNORE_INDEX))
    (nothing.loss_sum + nothing.z_loss_sum).backward()
    assert [value.item() for value in nothing] == [0, 0, 0] and not logits.grad.any()


def test_another_ignore_index_is_obeyed():
    logits, targets = example()
    expected = F.cross_entropy(logits.view(-1, V), targets.view(-1).clamp(min=0), ignore_index=0, reduction="sum")
    sums = CrossEntropyLoss(ignore_index=0)(logits, targets.clamp(min=0))
    assert sums.num_targets == (targets > 0).sum() < B * T - 3
    torch.testing.assert_close(sums.loss_sum, expected, rtol=FP64, atol=0)


def test_token_losses_match_torch_without_a_gradient(chunks):
    logits, targets = example()
    ours = token_losses(logits, targets)
    theirs = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORE_INDEX, reduction="none")
    assert not ours.requires_grad and ours.shape == (B, T)
    torch.testing.assert_close(ours, theirs.detach(), rtol=FP64, atol=FP64)


def test_large_logits_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    sums = CrossEntropyLoss()(logits, torch.tensor([1]))
    sums.loss_sum.backward()
    assert sums.loss_sum.item() == 2e4 and logits.grad.tolist() == [[1.0, -1.0, 0.0]]


@pytest.mark.parametrize("bad", [-1, -101, V, V + 1000])
def test_a_target_out_of_range_raises(bad):
    logits, targets = example()
    targets[2, 1] = bad
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        CrossEntropyLoss()(logits, targets)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        token_losses(logits, targets)


def test_shapes_that_do_not_belong_together_are_refused():
    with pytest.raises(AssertionError, match=r"logits \(2, 3, 4\) for targets \(2, 4\)"):
        CrossEntropyLoss()(torch.zeros(2, 3, 4), torch.zeros(2, 4, dtype=torch.int64))


def test_backward_keeps_only_the_logits_and_one_number_a_row():
    saved = []
    logits, targets = example()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        CrossEntropyLoss(z_loss=0.1)(logits, targets)
    others = [tensor for tensor in saved if tensor.data_ptr() != logits.data_ptr()]
    assert len(others) < len(saved) and all(tensor.numel() <= B * T for tensor in others)


def test_compiles_without_a_graph_break():
    logits, targets = example()

    def total(logits, targets):
        sums = CrossEntropyLoss(z_loss=0.05)(logits, targets)
        return (sums.loss_sum + sums.z_loss_sum) / sums.num_targets

    total(logits, targets).backward()
    expected, logits.grad = logits.grad, None
    torch.compile(total, backend="aot_eager", fullgraph=True)(logits, targets).backward()
    torch.testing.assert_close(logits.grad, expected, rtol=FP64, atol=FP64)
