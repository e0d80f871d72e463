"""Objectives, KL estimators, importance weights and the whole policy loss against closed forms."""

import math

import pytest
import torch

from alignment.grpo import AlgorithmConfig, advantages_of, mean_metrics, policy_loss, shaped_rewards
from alignment.grpo_correction import importance_weights, sampling_log_probs
from alignment.grpo_kl import kl_estimate
from alignment.grpo_log_probs import token_log_probs
from alignment.grpo_objectives import OBJECTIVES, PolicyTokens, token_objective
from alignment.grpo_responses import Responses
from configs.errors import UserError
from configs.loader import CONFIG_DIR, load_config
from tests.tolerances import FP64


def one_token(ratio, advantage, objective, **known):
    """The objective's value and its gradient in log policy, of a single token at this ratio."""
    log_probs = torch.tensor([[math.log(ratio) - 1.0]], dtype=torch.float64, requires_grad=True)
    old = torch.full((1, 1), -1.0, dtype=torch.float64)
    responses = Responses(torch.ones(1, 1, dtype=torch.bool))
    tokens = PolicyTokens(responses, log_probs, old, torch.full((1, 1), advantage, dtype=torch.float64), **known)
    result = token_objective(tokens, objective, 0.2, 0.28)
    result.values.sum().backward()
    return result.values.item(), log_probs.grad.item(), bool(result.clipped)


@pytest.mark.parametrize("objective", ["grpo_clip", "gspo"])
@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient", "clipped"),
    [
        (1.5, 2.0, -2.56, 0.0, True),  # good and already likelier: held at 1.28
        (0.5, 2.0, -1.0, -1.0, False),  # good and less likely: pulled up
        (1.5, -2.0, 3.0, 3.0, False),  # bad and likelier: pushed down
        (0.5, -2.0, 1.6, 0.0, True),  # bad and already less likely: held at 0.8
        (1.0, 2.0, -2.0, -2.0, False),
    ],
)
def test_clipping_acts_on_one_side(objective, ratio, advantage, value, gradient, clipped):
    assert one_token(ratio, advantage, objective) == (pytest.approx(value), pytest.approx(gradient), clipped)


@pytest.mark.parametrize("objective", ["no_baseline", "reinforce_with_baseline"])
def test_reinforce_weighs_the_log_prob(objective):
    assert one_token(1.5, 2.0, objective) == (pytest.approx(-2.0 * (math.log(1.5) - 1.0)), -2.0, False)


@pytest.mark.parametrize(("ratio", "weight"), [(1.5, 1.28), (1.1, 1.1), (0.5, 0.8)])
def test_cispo_weight_has_no_gradient_and_every_token_keeps_its_own(ratio, weight):
    value, gradient, _ = one_token(ratio, 2.0, "cispo")
    assert value == pytest.approx(-weight * 2.0 * (math.log(ratio) - 1.0))
    assert gradient == pytest.approx(-weight * 2.0)  # with the weight differentiated it would have a term more


def sequence(log_ratios, advantage=1.0, pad=0):
    width = len(log_ratios) + pad
    log_ratio = torch.full((1, width), torch.nan, dtype=torch.float64)
    log_ratio[0, : len(log_ratios)] = torch.tensor(log_ratios, dtype=torch.float64)
    log_probs = (log_ratio - 1.0).requires_grad_()
    mask = ~log_ratio.isnan()
    return log_probs, PolicyTokens(
        Responses(mask), log_probs, torch.full_like(log_probs, -1.0).detach(), torch.full_like(log_ratio, advantage)
    )


def test_gspo_ratio_is_a_geometric_mean_whatever_the_length():
    config = AlgorithmConfig(objective="gspo")
    short, tokens = sequence([0.1, -0.04])
    loss = policy_loss(tokens, config)
    (gradient,) = torch.autograd.grad(loss.loss_sum, short)
    twice, tokens = sequence([0.1, -0.04, 0.1, -0.04], pad=2)
    longer = policy_loss(tokens, config)
    (longer_gradient,) = torch.autograd.grad(longer.loss_sum, twice)
    assert loss.loss_sum.item() == pytest.approx(-math.exp(0.03)) == longer.loss_sum.item()
    torch.testing.assert_close(gradient, torch.full((1, 2), -math.exp(0.03) / 2, dtype=torch.float64))
    assert gradient.sum().item() == pytest.approx(longer_gradient.sum().item()) and not longer_gradient[0, 4:].any()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_on_policy_gradient_is_reinforces_and_nothing_is_clipped(objective):
    """At ratio 1 every objective has the policy gradient, and garbage outside the mask reaches nothing."""
    log_probs, tokens = sequence([0.0, 0.0, 0.0], advantage=0.5, pad=2)
    config = AlgorithmConfig(objective=objective)
    loss = policy_loss(tokens, config)
    (gradient,) = torch.autograd.grad(loss.loss_sum, log_probs)
    torch.testing.assert_close(gradient, torch.tensor([[-0.5 / 3] * 3 + [0.0] * 2], dtype=torch.float64))
    metrics = mean_metrics(loss.sums)
    assert metrics["ratio"] == 1.0 and metrics["clip_fraction"] == 0.0 and metrics["old_kl"] == 0.0
    assert loss.maxima["abs_log_ratio"] == 0.0 and metrics["tokens"] == 3 and metrics["advantage"] == 0.5


def test_a_huge_ratio_is_finite():
    log_probs, tokens = sequence([500.0, -500.0], advantage=-1.0)
    loss = policy_loss(tokens, AlgorithmConfig())
    (gradient,) = torch.autograd.grad(loss.loss_sum, log_probs)
    assert loss.loss_sum.isfinite() and gradient.isfinite().all()


def test_two_armed_bandit_learns_the_better_arm():
    """Sign of the advantage: arm 1 pays; a hundred steps of sampled GRPO make it likely."""
    logits = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    generator = torch.Generator().manual_seed(0)
    config = AlgorithmConfig()
    for _ in range(100):
        arms = torch.multinomial(torch.softmax(logits.detach(), 0), 8, replacement=True, generator=generator)
        advantages = advantages_of(config, arms.double(), torch.zeros(8, dtype=torch.int64))[:, None].double()
        log_probs = torch.log_softmax(logits, 0)[arms][:, None]
        tokens = PolicyTokens(Responses(torch.ones(8, 1, dtype=torch.bool)), log_probs, log_probs.detach(), advantages)
        loss = policy_loss(tokens, config)
        (gradient,) = torch.autograd.grad(loss.loss_sum / loss.units, logits)
        logits.data -= 0.3 * gradient
    assert torch.softmax(logits.detach(), 0)[1] > 0.95


def test_reward_for_stopping_at_once_raises_the_end_of_texts_probability():
    """The stop token is among the tokens that learn: one step on it makes it likelier."""
    logits = torch.zeros(2, 3, 5, dtype=torch.float64, requires_grad=True)
    end = 4
    targets = torch.tensor([[end, -100, -100], [1, 2, end]])  # stops at once; stops late
    log_probs = token_log_probs(logits, targets)
    advantages = advantages_of(AlgorithmConfig(), torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))[:, None].double()
    loss = policy_loss(
        PolicyTokens(Responses(targets >= 0), log_probs, log_probs.detach(), advantages), AlgorithmConfig()
    )
    (gradient,) = torch.autograd.grad(loss.loss_sum, logits)
    assert loss.sums["tokens"] == 4  # each end of text once
    after = torch.log_softmax(logits.detach() - 0.1 * gradient, -1)
    assert after[0, 0, end] > math.log(1 / 5) > after[1, 2, end]


def exact_kl_example():
    generator = torch.Generator().manual_seed(2)
    policy = torch.randn(6, dtype=torch.float64, generator=generator).requires_grad_()
    reference = torch.log_softmax(torch.randn(6, dtype=torch.float64, generator=generator), 0)
    log_policy = torch.log_softmax(policy, 0)
    kl = (log_policy.exp() * (log_policy - reference)).sum()
    return policy, log_policy, reference, kl


def test_means_of_k1_and_k3_are_the_kl_and_k3_is_never_negative():
    _, log_policy, reference, kl = exact_kl_example()
    probabilities = log_policy.exp().detach()
    k1, k2, k3 = (kl_estimate(log_policy, reference, name) for name in ("k1", "k2", "k3"))
    torch.testing.assert_close((probabilities * k1).sum(), kl, rtol=FP64, atol=FP64)
    torch.testing.assert_close((probabilities * k3).sum(), kl, rtol=FP64, atol=FP64)
    assert (k3 >= 0).all() and (k1 < 0).any() and not torch.allclose((probabilities * k2).sum(), kl)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_expected_gradients_of_the_estimators(estimator):
    """k2's is that of KL(policy || reference), k3's that of KL(reference || policy), k1's is 0."""
    policy, log_policy, reference, kl = exact_kl_example()
    sampled = (log_policy.exp().detach() * kl_estimate(log_policy, reference, estimator)).sum()
    (gradient,) = torch.autograd.grad(sampled, policy, retain_graph=True)
    reverse = (reference.exp() * (reference - log_policy)).sum()
    wanted = {"k1": torch.zeros(6, dtype=torch.float64)}
    wanted["k2"] = torch.autograd.grad(kl, policy, retain_graph=True)[0]
    wanted["k3"] = torch.autograd.grad(reverse, policy)[0]
    torch.testing.assert_close(gradient, wanted[estimator], rtol=1e-9, atol=FP64)


def test_kl_to_the_reference_joins_loss_and_metrics():
    log_probs, tokens = sequence([0.0, 0.0], advantage=0.0)
    tokens.reference_log_probs = torch.full_like(log_probs, -1.5).detach()
    loss = policy_loss(tokens, AlgorithmConfig(kl="k2", kl_coef=0.4))
    (gradient,) = torch.autograd.grad(loss.loss_sum, log_probs)
    assert loss.loss_sum.item() == pytest.approx(0.4 * 0.125)
    torch.testing.assert_close(gradient, torch.full((1, 2), 0.4 * 0.5 / 2, dtype=torch.float64))
    assert mean_metrics(loss.sums)["kl"] == pytest.approx(0.125)


def test_truncated_sampling_biases_log_probs_by_the_log_mass():
    """Without the correction the mean bias is the mean log kept mass; with it nothing is left."""
    generator = torch.Generator().manual_seed(4)
    logits = 2 * torch.randn(400, 20, dtype=torch.float64, generator=generator)
    log_policy = torch.log_softmax(logits, -1)
    kept, ids = log_policy.topk(5, dim=-1)
    masses = kept.exp().sum(-1)  # (400,)
    engine = torch.log_softmax(kept, -1)  # what a truncating sampler draws from
    chosen = torch.multinomial(engine.exp(), 1, generator=generator)
    log_q, log_p = engine.gather(1, chosen)[:, 0], log_policy.gather(1, ids.gather(1, chosen))[:, 0]
    torch.testing.assert_close((log_p - log_q).mean(), masses.log().mean(), rtol=FP64, atol=FP64)
    assert masses.log().mean() < -0.05
    torch.testing.assert_close(sampling_log_probs(log_p, masses), log_q, rtol=FP64, atol=FP64)


def test_importance_weights_are_unbiased_below_the_cap_and_capped_above():
    """E_q[(p / q) f] = E_p[f], by a whole sum; min(p / q, cap) as Yao et al. define it."""
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    f = torch.tensor([1.0, -2.0, 5.0])
    weights = importance_weights(p.log(), q.log(), cap=100.0)
    torch.testing.assert_close((q * weights * f).sum(), (p * f).sum())
    capped = importance_weights(p.log().requires_grad_(), q.log(), cap=2.0)
    torch.testing.assert_close(capped, torch.tensor([2.0, 2 / 3, 0.25])) and not capped.requires_grad


def test_importance_cap_weighs_the_loss():
    log_probs, tokens = sequence([0.0, 0.0], advantage=1.0, pad=1)
    tokens.sampler_log_probs = torch.tensor([[-1.0 - math.log(4.0), -1.0 + math.log(2.0), math.nan]])
    loss = policy_loss(tokens, AlgorithmConfig(aggregation="token_mean", importance_cap=3.0))
    (gradient,) = torch.autograd.grad(loss.loss_sum, log_probs)
    torch.testing.assert_close(gradient, torch.tensor([[-3.0, -0.5, 0.0]], dtype=torch.float64))
    metrics = mean_metrics(loss.sums)
    assert metrics["importance_weight"] == pytest.approx(1.75) and metrics["importance_capped"] == 0.5
    assert metrics["sampler_mismatch"] == pytest.approx(math.log(8.0) / 2)
    assert loss.maxima["sampler_mismatch"].item() == pytest.approx(math.log(4.0))


def test_sums_and_units_of_micro_batches_give_the_loss_of_the_whole():
    generator = torch.Generator().manual_seed(6)
    log_probs = -torch.rand(6, 7, dtype=torch.float64, generator=generator)
    old = log_probs - 0.3 * torch.randn(6, 7, dtype=torch.float64, generator=generator)
    mask = torch.arange(7) < torch.tensor([7, 1, 3, 5, 2, 6])[:, None]
    advantages = torch.randn(6, 1, dtype=torch.float64, generator=generator).expand(6, 7)
    for name in ("grpo", "dr_grpo", "dapo", "gspo", "cispo"):
        config = load_algorithm(name)

        def share(rows, config=config):
            tokens = PolicyTokens(Responses(mask[rows]), log_probs[rows], old[rows], advantages[rows])
            return policy_loss(tokens, config, max_response_tokens=7)

        whole = share(slice(0, 6))
        parts = [share(slice(0, 1)), share(slice(1, 5)), share(slice(5, 6))]
        assert sum(part.units for part in parts) == whole.units
        torch.testing.assert_close(sum(p.loss_sum for p in parts), whole.loss_sum, rtol=FP64, atol=FP64)
        for key, value in whole.sums.items():
            torch.testing.assert_close(sum(part.sums[key] for part in parts), value, msg=f"{name} {key}")


def load_algorithm(name):
    from omegaconf import OmegaConf

    return load_config(AlgorithmConfig, OmegaConf.load(f"{CONFIG_DIR}/algorithm/{name}.yaml"))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("grpo", ("group_mean", "group_std", "grpo_clip", "sequence_mean")),
        ("dr_grpo", ("group_mean", "none", "grpo_clip", "constant")),
        ("dapo", ("group_mean", "group_std", "grpo_clip", "token_mean")),
        ("gspo", ("group_mean", "group_std", "gspo", "sequence_mean")),
        ("cispo", ("group_mean", "group_std", "cispo", "token_mean")),
        ("reinforce", ("none", "none", "no_baseline", "sequence_mean")),
        ("reinforce_with_baseline", ("group_mean", "none", "reinforce_with_baseline", "sequence_mean")),
        ("rloo", ("leave_one_out", "none", "reinforce_with_baseline", "sequence_mean")),
    ],
)
def test_algorithm_files_name_the_parts_of_their_papers(name, fields):
    config = load_algorithm(name)
    assert (config.baseline, config.scale, config.objective, config.aggregation) == fields


def test_dapo_clips_higher_than_lower_and_shapes_long_completions():
    config = load_algorithm("dapo")
    assert config.clip_high > config.clip_low and config.dynamic_sampling
    shaped = shaped_rewards(config, torch.tensor([1.0, 1.0]), torch.tensor([40, 64]), max_response_tokens=64)
    assert shaped.tolist() == [1.0, 0.0]
    assert shaped_rewards(AlgorithmConfig(), torch.ones(1), torch.tensor([64]), 64).tolist() == [1.0]
    with pytest.raises(UserError, match=r"overlong_tokens=16 must not exceed the 8"):
        shaped_rewards(config, torch.ones(1), torch.tensor([8]), max_response_tokens=8)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("objective", "ppo", "grpo_clip"),
        ("clip_low", 0.0, "clip_low"),
        ("importance_cap", 0.0, "null"),
        ("kl_coef", -1.0, "negative"),
        ("aggregation", "mean", "token_mean"),
    ],
)
def test_wrong_values_are_refused_with_the_fix(field, value, words):
    with pytest.raises(UserError, match=words):
        AlgorithmConfig(**{field: value})


def test_combinations_without_meaning_are_refused():
    with pytest.raises(UserError, match="k2 or k3"):
        AlgorithmConfig(kl="k1", kl_coef=0.1)
    with pytest.raises(UserError, match="sequence_mean"):
        AlgorithmConfig(objective="gspo", aggregation="token_mean")
