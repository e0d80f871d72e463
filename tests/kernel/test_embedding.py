"""The embedding's rows and their gradient: rare and frequent ids, fixed order, the operator, bad input."""

import pytest
import torch

from configs.errors import UserError
from kernel.embedding import CHUNK, embedding, embedding_reference, run_backward
from tests.kernel.fused_reference import DEVICE, INTERPRETED, relative_error, results_and_gradients
from tests.tolerances import BF16_ROUNDING, FP32_GRADIENT

# ids by how often they come: all one, none twice, runs that begin and end at the borders of chunks or beside them
IDS = {
    "one id": [3] * (3 * CHUNK + 5),
    "each once": list(range(40)),
    "runs": [0] * CHUNK + [1] * (2 * CHUNK) + [2] * 7 + [5] * (CHUNK - 7) + [9] * 3,
    "runs beside borders": [0] * (CHUNK - 1) + [1] * (CHUNK + 1) + [4] * (2 * CHUNK - 1) + [6] * 2,
    "single": [7],
}


def ids_of(name: str) -> torch.Tensor:
    if name == "mixture":
        return (torch.rand(3, 50, device=DEVICE) ** 3 * 40).long()
    ids = torch.tensor(IDS[name], device=DEVICE)
    return ids[torch.randperm(len(ids), device=DEVICE)]


def check(name: str, C: int, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    token_ids, weight = ids_of(name), torch.randn(40, C, device=DEVICE).to(dtype)
    upstream = [torch.randn(*token_ids.shape, C, device=DEVICE)]
    out, dweight = results_and_gradients(lambda w: (embedding(token_ids, w, out_dtype),), [weight], upstream)
    assert torch.equal(out, embedding_reference(token_ids, weight, out_dtype))
    rounded = [g.to(out_dtype).double() for g in upstream]
    _, exact = results_and_gradients(
        lambda w: (embedding_reference(token_ids, w, torch.float64),), [weight.double()], rounded
    )
    assert dweight.dtype == dtype
    assert relative_error(dweight, exact) < (FP32_GRADIENT if dtype == torch.float32 else BF16_ROUNDING)


@pytest.mark.skipif(not INTERPRETED, reason="the GPU grid below covers it")
@pytest.mark.parametrize("name", [*IDS, "mixture"])
def test_interpreted_embedding_matches_float64(name):
    check(name, 20, torch.float32, torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*IDS, "mixture"])
@pytest.mark.parametrize("C", [1, 20, 768, 3000])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [(torch.float32, torch.bfloat16), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
def test_embedding_matches_float64(name, C, dtype, out_dtype):
    check(name, C, dtype, out_dtype)


def test_the_gradient_is_the_same_twice():
    token_ids, dout = ids_of("mixture"), torch.randn(3, 50, 20, device=DEVICE)
    first, second = (run_backward(token_ids, dout, 40, torch.float32) for _ in range(2))
    assert torch.equal(first, second)


def test_operator_matches_the_eager_call():
    token_ids, weight = ids_of("mixture"), torch.randn(40, 20, device=DEVICE)
    upstream = [torch.randn(3, 50, 20, device=DEVICE)]
    compiled = torch.compile(lambda w: (embedding(token_ids, w),), backend="aot_eager", fullgraph=True)
    eager, traced = (
        results_and_gradients(f, [weight], upstream) for f in (lambda w: (embedding(token_ids, w),), compiled)
    )
    assert all(torch.equal(a, b) for a, b in zip(eager, traced, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids, w: (ids.int(), w), "must be int64"),
        (lambda ids, w: (ids[:0], w), "at least one"),
        (lambda ids, w: (ids, w.double()), "weight of torch.float64"),
        (lambda ids, w: (ids, w.T), "must be a contiguous"),
        (lambda ids, w: (ids, w[0]), "must be a contiguous"),
    ],
)
def test_bad_input_is_one_line_before_the_launch(change, message):
    arguments = change(torch.zeros(3, dtype=torch.long, device=DEVICE), torch.ones(5, 4, device=DEVICE))
    with pytest.raises(UserError, match=message) as error:
        embedding(*arguments)
    assert "\n" not in str(error.value)
