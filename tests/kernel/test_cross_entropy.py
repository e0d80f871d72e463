"""The fused output layer and loss: sums, gradients, chunks, padding, shards of the vocabulary, memory, bad input."""

from dataclasses import replace

import pytest
import torch

from configs.errors import UserError
from kernel.cross_entropy import LossOptions, chunk_rows, linear_cross_entropy, linear_cross_entropy_reference
from kernel.cross_entropy_kernels import RowTiles
from tests.kernel.fused_reference import DEVICE, INTERPRETED, check_against_float64, relative_error
from tests.tolerances import APPROXIMATE_EXP2, FP32_GRADIENT

# N, C, V, and the tiles: a row at once, or in blocks with and without a rest
FEW = [(37, 16, 50, None), (140, 8, 50, RowTiles(16, 4)), (5, 24, 200, RowTiles(256, 4)), (9, 8, 192, RowTiles(64, 4))]
MANY = [(1000, 256, 32_768, None), (777, 128, 5003, None), (300, 64, 50_304, None), (129, 64, 128_256, None)]
TILES = [RowTiles(4096, 4), RowTiles(8192, 8), RowTiles(32_768, 16), RowTiles(32_768, 32)]


def make(N: int, C: int, V: int, dtype: torch.dtype = torch.float32):
    """Inputs whose logits are of the size 1, and targets of which a fifth is ignored."""
    x = torch.randn(N, C, device=DEVICE).to(dtype)
    weight = (2 * torch.randn(V, C, device=DEVICE) / C**0.5).to(dtype)
    targets = torch.randint(V, (N,), device=DEVICE)
    targets[::5] = -100
    return x, weight, targets


def check(case, dtype: torch.dtype, options: LossOptions, weight_dtype: torch.dtype | None = None):
    N, C, V, tiles = case
    x, weight, targets = make(N, C, V, dtype)
    options = replace(options, rows=tiles)
    divisor = options.num_targets or 1

    def mean(operation):
        return lambda x, weight: ((sum(operation(x, weight, targets, options)) / divisor),)

    inputs = [x, weight.to(weight_dtype or dtype)]
    upstream = [torch.ones((), device=DEVICE)]
    least = 0.0 if INTERPRETED else APPROXIMATE_EXP2
    check_against_float64(mean(linear_cross_entropy), mean(linear_cross_entropy_reference), inputs, upstream, least)


@pytest.mark.skipif(not INTERPRETED, reason="the GPU grid below covers it")
@pytest.mark.parametrize("case", FEW)
def test_interpreted_loss_matches_float64(case):
    small = LossOptions(chunk_bytes=1)  # 128 rows a chunk
    check(case, torch.float32, small)
    check(case, torch.float32, replace(small, z_loss=1e-2, num_targets=29))


@pytest.mark.gpu
@pytest.mark.parametrize("case", FEW + MANY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_loss_matches_float64(case, dtype):
    torch.set_float32_matmul_precision("highest")
    for options in (LossOptions(), LossOptions(z_loss=1e-3, num_targets=500, chunk_bytes=1 << 24)):
        check(case, dtype, options)
        check(case, dtype, replace(options, accumulate=torch.float32))
        check(case, dtype, options, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", TILES)
def test_every_tile_gives_the_same_loss(tiles):
    check((300, 128, 32_768, tiles), torch.bfloat16, LossOptions())


def test_the_sums_are_those_of_the_reference():
    """Each of the two on its own, with and without gradients, and nothing from ignored rows."""
    x, weight, targets = make(23, 16, 40)
    options = LossOptions(z_loss=1e-2)
    expected = linear_cross_entropy_reference(x.double(), weight.double(), targets, options)
    for inputs in ((x, weight), (x.clone().requires_grad_(), weight)):
        found = linear_cross_entropy(*inputs, targets, options)
        for a, b in zip(found, expected, strict=True):
            assert relative_error(a.detach(), b) < FP32_GRADIENT
    ignored = linear_cross_entropy(x.requires_grad_(), weight, torch.full_like(targets, -100), options)
    assert ignored[0].item() == ignored[1].item() == 0.0
    assert torch.autograd.grad(ignored[0], x)[0].abs().max() == 0


@pytest.mark.parametrize("factor", [1 / 29, 1.0, 3.0])
def test_any_incoming_gradient_is_honoured(factor):
    x, weight, targets = make(13, 16, 40)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    found = torch.autograd.grad(factor * linear_cross_entropy(*leaves, targets, LossOptions(num_targets=29))[0], leaves)
    expected = torch.autograd.grad(factor * linear_cross_entropy_reference(*leaves, targets)[0], leaves)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_are_handed_out_once():
    x, weight, targets = make(3, 8, 10)
    loss, _ = linear_cross_entropy(x.requires_grad_(), weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="handed out"):
        loss.backward()


def test_padded_columns_get_no_probability_and_no_gradient():
    x, weight, targets = make(11, 16, 40)
    padded = torch.cat((weight, 100 * torch.ones(8, 16, device=DEVICE))).requires_grad_()
    loss, _ = linear_cross_entropy(x.requires_grad_(), padded, targets, LossOptions(vocab_size=40))
    expected, _ = linear_cross_entropy_reference(x, weight, targets)
    assert relative_error(loss.detach(), expected.double()) < FP32_GRADIENT
    assert torch.autograd.grad(loss, padded)[0][40:].abs().max() == 0


def test_shards_of_the_vocabulary_add_up_to_the_whole():
    """A tensor-parallel loss played by hand: 90 columns on three shards of 48, the last of which holds only padding."""
    x, weight, targets = make(21, 16, 90)
    targets[:6] = torch.tensor([0, 47, 48, 89, 1, 46], device=DEVICE)  # the borders
    options = LossOptions(z_loss=1e-2, vocab_size=90, chunk_bytes=1)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    sums = linear_cross_entropy_reference(*leaves, targets, options)
    dx, dweight = torch.autograd.grad(sums[0] + sums[1], leaves)
    parts = [torch.zeros(48, 16, device=DEVICE) for _ in range(3)]
    for part, rows in zip(parts, weight.detach().split(48), strict=False):
        part[: len(rows)] = rows
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def collect(lse, target_logit):
        seen.append((lse, target_logit))
        return lse, target_logit

    for rank, part in enumerate(parts):
        linear_cross_entropy(x, part, targets, replace(options, vocab_offset=48 * rank, combine=collect))
    lse = torch.logsumexp(torch.stack([lse for lse, _ in seen]), dim=0)
    target_logit = torch.stack([logit for _, logit in seen]).sum(0)
    total_dx, found_dweight = torch.zeros_like(dx), []
    for rank, part in enumerate(parts):
        shard = replace(options, vocab_offset=48 * rank, combine=lambda *local: (lse, target_logit))
        found = linear_cross_entropy(x, part.requires_grad_(), targets, shard)
        for a, b in zip(found, sums, strict=True):
            assert relative_error(a.detach(), b.detach().double()) < FP32_GRADIENT
        part_dx, part_dweight = torch.autograd.grad(found[0], (x, part))
        total_dx += part_dx
        found_dweight.append(part_dweight)
    assert relative_error(total_dx, dx.double()) < FP32_GRADIENT
    gathered = torch.cat(found_dweight)
    assert relative_error(gathered[:90], dweight.double()) < FP32_GRADIENT and gathered[90:].abs().max() == 0


def test_operator_matches_the_eager_call():
    x, weight, targets = make(9, 16, 30)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    options = LossOptions(z_loss=1e-2, num_targets=7)

    def call(x, weight, targets):
        loss, z_loss = linear_cross_entropy(x, weight, targets, options)
        return (loss + z_loss) / 7

    results = []
    for f in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        loss = f(*leaves, targets)
        results.append([loss, *torch.autograd.grad(loss, leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_chunks_hold_the_bytes_they_may():
    assert chunk_rows(16_384, 32_768, 2, 1 << 28) == 4096
    assert chunk_rows(16_384, 32_768, 2, 264 << 20) == 4224  # the last is of 3,712
    assert chunk_rows(5000, 32_768, 2, 1 << 28) == 2560  # two even chunks, not one of 4096 and a rest
    assert chunk_rows(100, 128_256, 2, 1 << 30) == 100
    assert chunk_rows(1000, 128_256, 2, 1) == 128


@pytest.mark.gpu
def test_extra_memory_is_a_chunk_and_no_more():
    N, C, V = 8192, 512, 32_768
    x, weight, targets = make(N, C, V, torch.bfloat16)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    linear_cross_entropy(*leaves, targets, LossOptions(chunk_bytes=1 << 26))  # cuBLAS takes its workspace once
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss, _ = linear_cross_entropy(*leaves, targets, LossOptions(chunk_bytes=1 << 26))
    gradients = torch.autograd.grad(loss, leaves)
    returned = sum(x.nbytes for x in gradients)
    extra = torch.cuda.max_memory_allocated() - before - returned
    assert extra < (1 << 26) + (8 << 20), f"{extra / 2**20:.1f} MiB beside the returned gradients"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w, t: (x[None], w, t), r"must be \(N, C\), \(V, C\) and \(N,\)"),
        (lambda x, w, t: (x, w[:, :3], t), r"must be \(N, C\), \(V, C\) and \(N,\)"),
        (lambda x, w, t: (x, w, t[:2]), r"must be \(N, C\), \(V, C\) and \(N,\)"),
        (lambda x, w, t: (x, w.half(), t), "weight of torch.float16 must be torch.float32"),
        (lambda x, w, t: (x.double(), w, t), "x of torch.float64"),
        (lambda x, w, t: (x, w, t.int()), "targets of torch.int32"),
        (lambda x, w, t: (x.T.contiguous().T, w, t), "must be contiguous"),
        (lambda x, w, t: (x[:0], w, t[:0]), "may not be empty"),
    ],
)
def test_bad_input_is_one_line_before_the_launch(change, message):
    with pytest.raises(UserError, match=message) as error:
        linear_cross_entropy(*change(*make(4, 8, 10)))
    assert "\n" not in str(error.value)
