"""Projections of one input together: the layers' own results and gradients, in float32 and under autocast."""

import pytest
import torch

from llm.transformer_layers import Linear, SwiGlu, project_each
from llm.transformer_linear import columns_of_one, linear, project_side_by_side, project_together
from tests.tolerances import BF16_ROUNDING, FP32_GRADIENT, PEER_ERROR


def make_layers(bias: bool, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Linear]:
    layers = [Linear(40, out, bias).to(device, dtype) for out in (24, 8, 8)]
    generator = torch.Generator().manual_seed(0)
    for layer in layers:
        for parameter in layer.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return layers


def results(project, layers, x, upstream, autocast=None):
    """Outputs and the gradients of input and parameters."""
    x = x.detach().clone().requires_grad_()
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    with torch.autocast(x.device.type, autocast, enabled=autocast is not None):
        outputs = project(x, layers)
    upstream = [g.to(out.dtype) for g, out in zip(upstream, outputs, strict=True)]
    return [*outputs, *torch.autograd.grad(outputs, [x, *parameters], upstream)]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def check(project, bias: bool, autocast: torch.dtype | None, device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 7, 40, generator=generator).to(device)
    upstream = [torch.randn(3, 7, out, generator=generator).to(device) for out in (24, 8, 8)]
    exact = results(project_each, make_layers(bias, torch.float64, device), x.double(), upstream)
    ours = results(project, make_layers(bias, device=device), x, upstream, autocast)
    plain = results(project_each, make_layers(bias, device=device), x, upstream, autocast)
    for a, b, expected in zip(ours, plain, exact, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert relative_error(a, expected) <= max(PEER_ERROR * relative_error(b, expected), FP32_GRADIENT)


PROJECTS = [project_together, project_side_by_side]


@pytest.mark.parametrize("project", PROJECTS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_projections_match_each(project, bias, autocast):
    check(project, bias, autocast, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("project", PROJECTS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_projections_match_each_on_a_gpu(project, bias, autocast):
    check(project, bias, autocast, "cuda")


def test_a_weight_gradient_in_float32_is_not_rounded_to_bfloat16():
    layers, x = make_layers(False), torch.randn(5, 40)
    gradients = results(project_together, layers, x, [torch.randn(5, out) for out in (24, 8, 8)], torch.bfloat16)[4:]
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    assert any((gradient != gradient.bfloat16().float()).any() for gradient in gradients)


def test_a_swapped_matmul_is_called():
    layers = make_layers(False)
    layers[1].matmul = lambda x, weight, bias: x @ weight.t() + 1.0
    x = torch.randn(2, 40)
    for a, b in zip(project_together(x, layers), project_each(x, layers), strict=True):
        torch.testing.assert_close(a, b)


def test_only_what_needs_a_gradient_gets_one():
    layer = make_layers(True)[0]
    layer.weight.requires_grad_(False)
    layer.matmul = linear
    layer(torch.randn(3, 40)).sum().backward()
    assert layer.weight.grad is None and layer.bias.grad is not None


def swiglu_results(join: bool):
    """A SwiGLU layer under autocast: output and gradients, its projections each alone or together."""
    layer = SwiGlu(40, 24)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 6)
    if join:
        layer.project, layer.down_proj.matmul = project_side_by_side, linear
    x = torch.randn(3, 7, 40, generator=generator).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    out.float().square().sum().backward()
    return [out, x.grad, *(parameter.grad for parameter in layer.parameters())]


def test_outputs_side_by_side_and_their_gradients_match():
    for a, b in zip(swiglu_results(True), swiglu_results(False), strict=True):
        assert a.dtype == b.dtype and relative_error(a, b) < 2 * BF16_ROUNDING


def test_gradients_side_by_side_are_recognised():
    whole = torch.randn(6, 40)
    assert columns_of_one(whole.split([24, 8, 8], dim=-1)).data_ptr() == whole.data_ptr()
    for parts in (
        whole.split([8, 24, 8], dim=-1)[::-1],  # in another order
        whole.split([24, 8, 8], dim=-1)[:2],  # not complete
        [part.clone() for part in whole.split([24, 8, 8], dim=-1)],
    ):
        assert columns_of_one(parts) is None
