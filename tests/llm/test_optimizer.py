"""Optimizers against torch's own over ten steps, parameter groups, and clipping."""

import math
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from configs.errors import UserError
from configs.loader import CONFIG_DIR, load_config
from llm import optimizer_adamw
from llm.optimizer import (
    AdamW,
    Muon,
    OptimizerConfig,
    SGDDecay,
    build_optimizer,
    clip_gradients,
    gradient_norm,
    scale_gradients,
    set_learning_rate,
)
from llm.optimizer_muon import newton_schulz, orthogonalise_all
from llm.schedule import ScheduleConfig
from tests.tolerances import BF16_ROUNDING, OPTIMIZER_STEPS

SHAPES = [(9, 14), (14, 9), (9, 14), (6, 6)]


def make_params(shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype) * 0.5) for shape in shapes]


def run_steps(optimizer, params, steps=10, skip=()):
    """Steps with the same random gradients for any two optimizers; `skip` lists (step, index) without a gradient."""
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        for index, param in enumerate(params):
            gradient = torch.randn(param.shape, generator=generator)
            param.grad = None if (step, index) in skip else gradient.to(param.dtype)
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("first_lr", group["lr"]) / (1 + step)
        optimizer.step()


def assert_equal_params(ours, theirs, tolerance=OPTIMIZER_STEPS):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bundle", [1 << 18, 50], ids=["whole", "pieces_of_50"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_adamw_matches_torch(weight_decay, bundle, monkeypatch):
    monkeypatch.setattr(optimizer_adamw, "CPU_BUNDLE_ELEMENTS", bundle)
    options = {"lr": 0.02, "betas": (0.8, 0.97), "eps": 1e-4, "weight_decay": weight_decay}
    shapes = [*SHAPES, (7,), (1,), (2, 3, 4)]
    ours, theirs = make_params(shapes), make_params(shapes)
    skip = {(0, 1), (4, 1), (4, 5)}  # a skipped parameter keeps its own count of steps
    run_steps(AdamW(ours, **options), ours, skip=skip)
    run_steps(torch.optim.AdamW(theirs, **options), theirs, skip=skip)
    assert_equal_params(ours, theirs)


def test_adamw_updates_a_transposed_parameter(monkeypatch):
    monkeypatch.setattr(optimizer_adamw, "CPU_BUNDLE_ELEMENTS", 10)
    ours, theirs = ([nn.Parameter(make_params([(5, 8)])[0].detach().t())] for _ in range(2))
    run_steps(AdamW(ours), ours)
    run_steps(torch.optim.AdamW(theirs), theirs)
    assert_equal_params(ours, theirs)


def test_bfloat16_parameters_keep_float32_state_and_round_once():
    half = make_params(SHAPES, torch.bfloat16)
    full = [nn.Parameter(param.detach().float()) for param in half]
    generator = torch.Generator().manual_seed(2)
    ours, theirs = AdamW(half, lr=0.1), torch.optim.AdamW(full, lr=0.1)
    for _ in range(5):
        for one, other in zip(half, full, strict=True):
            one.grad = torch.randn(one.shape, generator=generator).bfloat16()
            other.grad = one.grad.float()
            other.data.copy_(one.detach())  # both start the step from the rounded weights
        ours.step()
        theirs.step()
        for one, other in zip(half, full, strict=True):
            torch.testing.assert_close(one.float(), other.detach(), rtol=BF16_ROUNDING, atol=0)
            for key in ("exp_avg", "exp_avg_sq"):
                assert ours.state[one][key].dtype == torch.float32
                torch.testing.assert_close(ours.state[one][key], theirs.state[other][key], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_matches_torch(nesterov, adjust):
    options = {"lr": 0.05, "momentum": 0.9, "nesterov": nesterov, "ns_steps": 4, "weight_decay": 0.2}
    ours, theirs = make_params(SHAPES), make_params(SHAPES)
    skip = {(0, 2), (3, 0)}
    run_steps(Muon(ours, adjust_lr=adjust, **options), ours, skip=skip)
    run_steps(torch.optim.Muon(theirs, adjust_lr_fn=adjust, **options), theirs, skip=skip)
    assert_equal_params(ours, theirs)


def test_muon_takes_a_stack_of_experts_as_matrices():
    """(E, F, C) moves as E matrices would on their own; the batched bfloat16 products may round elsewhere."""
    stacked = make_params([(3, 12, 8)])
    single = [nn.Parameter(matrix.detach().clone()) for matrix in stacked[0]]
    ours, theirs = Muon(stacked, lr=0.1), torch.optim.Muon(single, lr=0.1)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        stacked[0].grad = torch.randn(3, 12, 8, generator=generator)
        for param, gradient in zip(single, stacked[0].grad, strict=True):
            param.grad = gradient.clone()
        ours.step()
        theirs.step()
    bound = 3 * 0.1 * 4 * BF16_ROUNDING  # three steps of lr 0.1, entries below 1, a few roundings each
    torch.testing.assert_close(stacked[0].detach(), torch.stack([p.detach() for p in single]), rtol=0, atol=bound)


@pytest.mark.parametrize("shape", [(10, 30), (30, 10), (4, 16, 24), (2, 3, 24, 16)])
def test_newton_schulz_makes_singular_values_near_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = newton_schulz(matrix, ns_steps=5).float()
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.mT @ result @ vh.mT  # diagonal, were the iteration exact: it keeps the singular vectors
    diagonal = torch.diagonal(inner, dim1=-2, dim2=-1)
    assert diagonal.min() > 0.6 and diagonal.max() < 1.3  # the band that the quintic's coefficients give
    assert (inner - torch.diag_embed(diagonal)).abs().max() < 0.05
    assert result.shape == matrix.shape


@pytest.mark.parametrize("batched", [True, False])
def test_orthogonalise_all_keeps_the_order_of_mixed_shapes(batched):
    matrices = [param.detach() for param in make_params([*SHAPES, (2, 6, 6), (9, 14), (2, 6, 6)])]
    results = orthogonalise_all(matrices, 5, batched)
    for matrix, result in zip(matrices, results, strict=True):
        bound = 4 * BF16_ROUNDING if batched else 0  # entries below 1; a batch may add up in another order
        torch.testing.assert_close(result, newton_schulz(matrix, 5), rtol=0, atol=bound)


def test_sgd_decay_follows_its_formula():
    param = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer, expected = SGDDecay([param], lr=0.5), torch.tensor([1.0, -2.0], dtype=torch.float64)
    for step in range(5):
        param.grad = torch.tensor([1.0, 3.0], dtype=torch.float64) * (step + 1)
        optimizer.step()
        expected = expected - 0.5 / math.sqrt(step + 1) * param.grad
    torch.testing.assert_close(param.detach(), expected, rtol=1e-12, atol=0)


NAMED_SHAPES = {
    "embedding.weight": (20, 8),
    "blocks.0.attention.q_proj.weight": (8, 8),
    "blocks.0.attention.q_proj.bias": (8,),
    "blocks.0.attention_norm.weight": (8,),
    "blocks.0.feed_forward.gate_proj": (2, 12, 8),
    "norm.weight": (8,),
    "output.weight": (20, 8),
}
HIDDEN = ["blocks.0.attention.q_proj.weight", "blocks.0.feed_forward.gate_proj"]
VECTORS = ["blocks.0.attention.q_proj.bias", "blocks.0.attention_norm.weight", "norm.weight"]
TABLES = ["embedding.weight", "output.weight"]


def make_named():
    return dict(zip(NAMED_SHAPES, make_params(NAMED_SHAPES.values()), strict=True))


def describe(optimizer):
    return [(g["algorithm"], g["param_names"], g["weight_decay"], g["base_lr"]) for g in optimizer.param_groups]


def test_adamw_decays_matrices_only():
    optimizer = build_optimizer(make_named().items(), OptimizerConfig(lr=0.1, weight_decay=0.2))
    matrices = [name for name in NAMED_SHAPES if name not in VECTORS]
    assert describe(optimizer) == [("adamw", matrices, 0.2, 0.1), ("adamw", VECTORS, 0.0, 0.1)]


def test_muon_takes_hidden_matrices_and_adamw_the_rest():
    config = OptimizerConfig(name="muon", lr=0.1, adamw_lr=0.01, weight_decay=0.2)
    optimizer = build_optimizer(make_named().items(), config)
    expected = [("muon", HIDDEN, 0.2, 0.1), ("adamw", TABLES, 0.2, 0.01), ("adamw", VECTORS, 0.0, 0.01)]
    assert describe(optimizer) == expected


def test_a_frozen_parameter_and_an_empty_group_are_left_out():
    named = {"norm.weight": nn.Parameter(torch.ones(3)), "output.weight": nn.Parameter(torch.ones(2, 2), False)}
    assert [g["param_names"] for g in build_optimizer(named.items(), OptimizerConfig()).param_groups] == [
        ["norm.weight"]
    ]


def test_the_mixture_matches_torchs_two_optimizers():
    named, other = make_named(), make_named()
    for params in (named, other):
        del params["blocks.0.feed_forward.gate_proj"]  # torch's Muon takes no stacks
    config = OptimizerConfig(name="muon", lr=0.1, adamw_lr=0.01, weight_decay=0.2)
    optimizer = build_optimizer(named.items(), config)
    muon = torch.optim.Muon([other[HIDDEN[0]]], lr=0.1, weight_decay=0.2)
    betas = {"lr": 0.01, "betas": (0.9, 0.95)}
    tables = torch.optim.AdamW([other[name] for name in TABLES], weight_decay=0.2, **betas)
    vectors = torch.optim.AdamW([other[name] for name in VECTORS], weight_decay=0.0, **betas)
    generator = torch.Generator().manual_seed(5)
    for _ in range(10):
        for name, param in named.items():
            param.grad = torch.randn(param.shape, generator=generator)
            other[name].grad = param.grad.clone()
        for each in (optimizer, muon, tables, vectors):
            each.step()
    assert_equal_params(named.values(), other.values())
    optimizer.zero_grad()
    assert all(param.grad is None for param in named.values())


def test_set_learning_rate_multiplies_each_groups_own_base():
    optimizer = build_optimizer(make_named().items(), OptimizerConfig(name="muon", lr=0.1, adamw_lr=0.01))
    for factor in (0.5, 0.25):
        set_learning_rate(optimizer, factor)
        assert [group["lr"] for group in optimizer.param_groups] == [0.1 * factor, 0.01 * factor, 0.01 * factor]


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_ten_steps_equal_five_saved_loaded_and_five_more(name):
    config = OptimizerConfig(name=name, weight_decay=0.0)
    straight, broken = make_named(), make_named()
    for params in (straight, broken):
        for name in ("output.weight", HIDDEN[0]):  # a load must not round their state to the parameter's dtype
            params[name] = nn.Parameter(params[name].detach().bfloat16())

    def advance(params, optimizer, seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(5):
            for param in params.values():
                param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            optimizer.step()

    first = build_optimizer(straight.items(), config)
    advance(straight, first, 0)
    advance(straight, first, 1)
    second = build_optimizer(broken.items(), config)
    advance(broken, second, 0)
    third = build_optimizer(broken.items(), config)
    third.load_state_dict(second.state_dict())
    advance(broken, third, 1)
    assert all(torch.equal(straight[key], broken[key]) for key in straight)


def test_gradient_norm_and_clipping_match_torch():
    ours, theirs = make_params(SHAPES), make_params(SHAPES)
    for one, other in zip(ours[:-1], theirs[:-1], strict=True):  # the last has no gradient
        one.grad, other.grad = one.detach() * 3, other.detach() * 3
    norm = clip_gradients(ours, 0.7)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs, 0.7), rtol=OPTIMIZER_STEPS, atol=0)
    for one, other in zip(ours[:-1], theirs[:-1], strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=OPTIMIZER_STEPS, atol=0)
    assert ours[-1].grad is None
    torch.testing.assert_close(gradient_norm(ours), torch.tensor(0.7), rtol=1e-5, atol=0)


def test_gradients_below_the_bound_stay_as_they_are():
    params = make_params(SHAPES)
    for param in params:
        param.grad = param.detach().clone()
    norm = clip_gradients(iter(params), 1e3)
    assert norm < 1e3 and all(torch.equal(param.grad, param.detach()) for param in params)


def test_the_norm_of_bfloat16_gradients_is_taken_in_float32():
    param = nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))
    param.grad = torch.full_like(param, 0.1)
    exact = param.grad.double().norm().item()
    assert gradient_norm([param]).dtype == torch.float32
    assert gradient_norm([param]).item() == pytest.approx(exact, rel=1e-5)


def test_no_gradient_at_all_has_norm_zero_and_a_nan_stays_visible():
    params = make_params(SHAPES)
    assert clip_gradients(params, 1.0).item() == 0 and clip_gradients([], 1.0).item() == 0
    for param in params:
        param.grad = torch.ones_like(param)
    params[0].grad[0, 0] = math.nan
    norm = gradient_norm(params)
    scale_gradients(params, norm, 1.0)
    assert norm.isnan() and all(param.grad.isnan().all() for param in params)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "adam"}, "optimizer.name='adam' is unknown; use one of adamw, muon, sgd"),
        ({"lr": 0.0}, "optimizer.lr=0.0 must be positive"),
        ({"beta2": 1.0}, "optimizer.beta2=1.0 must lie in 0..1"),
        ({"momentum": -0.1}, "optimizer.momentum=-0.1 must lie in"),
        ({"clip_norm": 0.0}, "optimizer.clip_norm=0.0 must be positive; use null"),
        ({"adamw_lr": -1.0}, "optimizer.adamw_lr=-1.0 must be positive"),
        ({"weight_decay": -1.0}, "optimizer.weight_decay=-1.0 must not be negative"),
        ({"name": "sgd"}, "optimizer.weight_decay=0.1 has no meaning for sgd"),
        ({"ns_steps": 0}, "optimizer.ns_steps=0 must be positive"),
        ({"adjust_lr": "x"}, "optimizer.adjust_lr='x' is unknown"),
    ],
)
def test_bad_values_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        OptimizerConfig(**fields)


@pytest.mark.parametrize("group", ["optimizer", "schedule"])
def test_every_group_file_fits_its_schema_and_names_itself(group):
    schema = {"optimizer": OptimizerConfig, "schedule": ScheduleConfig}[group]
    paths = sorted(Path(CONFIG_DIR, group).glob("*.yaml"))
    assert len(paths) == 3
    for path in paths:
        assert load_config(schema, yaml.safe_load(path.read_text())).name == path.stem
