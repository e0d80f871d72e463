"""The policy's batches, log-probs and gradients against single rows and closed forms (PARITY, post-training)."""

import math
from dataclasses import replace

import pytest
import torch

from alignment.grpo import AlgorithmConfig
from alignment.train_rl_batch import MicroBatching, cut_micro_batches, make_policy_batch, share_of_rank
from alignment.train_rl_clock import Clock
from alignment.train_rl_policy import Policy
from alignment.train_rl_samples import Group, Sample, groups_from_json, groups_to_json, sample_advantages
from alignment.train_rl_setup import set_up
from configs.run_dir import read_jsonl
from llm.data_loader import IGNORED
from llm.model_loading import load_model, resolve_checkpoint
from parallel.mesh import Mesh, init_mesh
from parallel.mesh_roles import share_roles
from tests.alignment.rl_start import rl_config, rl_start
from tests.tolerances import FP32_GRADIENT, POLICY_LOG_PROBS, TEMPERATURE_LOG_PROBS


@pytest.fixture(scope="module")
def start():
    model, tokenizer, _ = load_model(resolve_checkpoint(str(rl_start()), None), torch.device("cpu"))
    return model, tokenizer


@pytest.fixture
def mesh() -> Mesh:
    return init_mesh("cpu")


def sample(prompt: list[int], tokens: list[int], reward: float = 0.0, log_prob: float = -1.0) -> Sample:
    return Sample(prompt, tokens, [log_prob] * len(tokens), "", "stop", reward, 1.0, reward)


def some_samples(tokenizer) -> list[Sample]:
    """Prompts and completions of unequal lengths; two end with the end-of-text token, one was cut."""
    eot = tokenizer.eot_id
    rows = [("What is 3 + 5?", " 3 + 5 = 8.", True), ("Sum", " 9", False), ("Compute 1 + 1 please.", " 2", True)]
    return [
        sample([eot, *tokenizer.encode(question)], tokenizer.encode(text) + [eot] * ends, float(index % 2))
        for index, (question, text, ends) in enumerate(rows)
    ]


def policy_of(model, tokenizer, temperature: float = 1.0, **algorithm) -> Policy:
    return Policy(model, AlgorithmConfig(**algorithm), temperature, tokenizer.vocab_size, 16)


def log_probs_of(policy: Policy, samples: list[Sample]) -> list[torch.Tensor]:
    """Of each sample's tokens, from one batch of all."""
    batch = make_policy_batch(samples, [0.0] * len(samples), "token_mean")
    found = policy.log_probs(policy.model, batch, torch.no_grad)
    return [row[mask] for row, mask in zip(found, batch.responses.mask, strict=True)]


def test_targets_are_the_engines_ids_and_nothing_else(start):
    _, tokenizer = start
    samples = some_samples(tokenizer)
    batch = make_policy_batch(samples, [1.0, 2.0, 3.0], "token_mean")
    for row, one in enumerate(samples):
        first = len(one.prompt_ids) - 1
        targets = batch.targets[row]
        assert targets[first : first + len(one.token_ids)].tolist() == one.token_ids
        assert (targets[:first] == IGNORED).all() and (targets[first + len(one.token_ids) :] == IGNORED).all()
        ends = int(one.token_ids[-1] == tokenizer.eot_id)
        assert int((targets == tokenizer.eot_id).sum()) == ends, "the end that was sampled is learned, once"
        assert int((batch.token_ids[row] == tokenizer.eot_id).sum()) == 1, "one begin, and padding is not an end"
        assert batch.advantages[row][targets != IGNORED].tolist() == [float(row + 1)] * len(one.token_ids)
    assert batch.num_targets == sum(len(one.token_ids) for one in samples)
    assert make_policy_batch(samples, [0.0] * 3, "constant").num_targets == 3


def test_ids_that_do_not_survive_their_text_are_learned_as_they_are(start):
    _, tokenizer = start
    whole = tokenizer.encode(" answer")
    pieces = [token for byte in " answer" for token in tokenizer.encode(byte)]
    assert tokenizer.decode(pieces) == " answer" and tokenizer.encode(tokenizer.decode(pieces)) == whole != pieces
    batch = make_policy_batch([sample([tokenizer.eot_id, 5], pieces)], [0.0], "token_mean")
    assert batch.targets[batch.responses.mask].tolist() == pieces


def test_a_log_prob_is_that_of_the_next_token(start):
    model, tokenizer = start
    prompt, unique = [tokenizer.eot_id, *tokenizer.encode("What is 3 + 5?")], 300
    assert unique not in prompt
    (found,) = log_probs_of(policy_of(model, tokenizer), [sample(prompt, [unique])])
    with torch.no_grad():
        logits = model(torch.tensor([prompt]))[0, -1, : tokenizer.vocab_size]
    assert found.item() == pytest.approx(logits.log_softmax(-1)[unique].item(), abs=POLICY_LOG_PROBS)


def test_rows_alone_and_together_have_the_same_log_probs(start):
    model, tokenizer = start
    policy, samples = policy_of(model, tokenizer), some_samples(tokenizer)
    together = log_probs_of(policy, samples)
    for one, expected in zip(samples, together, strict=True):
        (alone,) = log_probs_of(policy, [one])
        assert torch.allclose(alone, expected, rtol=0, atol=POLICY_LOG_PROBS)


def gradients(policy: Policy, batches: list, units: int) -> dict[str, torch.Tensor]:
    policy.model.zero_grad()
    for batch in batches:
        (policy.forward_loss(batch).loss_sum / units).backward()
    return {name: parameter.grad.clone() for name, parameter in policy.model.named_parameters()}


@pytest.mark.parametrize("aggregation", ("token_mean", "sequence_mean", "constant"))
def test_micro_batches_do_not_change_the_gradient(aggregation, start):
    model, tokenizer = start
    policy = policy_of(model, tokenizer, aggregation=aggregation)
    samples, advantages = some_samples(tokenizer) * 2, [1.0, -0.5, 2.0, -1.0, 0.3, -1.5]
    whole = MicroBatching(aggregation, 10_000).make(samples, advantages)
    single = MicroBatching(aggregation, 1).make(samples, advantages)
    assert (len(whole), len(single)) == (1, 6)
    units = sum(batch.num_targets for batch in whole)
    assert units == sum(batch.num_targets for batch in single)
    expected, found = gradients(policy, whole, units), gradients(policy, single, units)
    for name, gradient in found.items():
        assert (gradient - expected[name]).norm() <= 10 * FP32_GRADIENT * expected[name].norm(), name


def test_the_gradient_is_the_policy_gradient_written_out(start):
    model, tokenizer = start
    samples, advantages = some_samples(tokenizer), [1.0, -0.5, 2.0]
    policy = policy_of(model, tokenizer, temperature=0.7)
    batch = make_policy_batch(samples, advantages, "sequence_mean")
    found = gradients(policy, [batch], batch.num_targets)
    model.zero_grad()
    loss = torch.zeros(())
    for one, advantage in zip(samples, advantages, strict=True):
        ids = torch.tensor([one.prompt_ids + one.token_ids])
        logits = model(ids)[0, len(one.prompt_ids) - 1 : -1, : tokenizer.vocab_size] / 0.7
        log_probs = logits.log_softmax(-1).gather(1, torch.tensor(one.token_ids)[:, None])
        loss = loss - advantage * log_probs.mean() / len(samples)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad - found[name]).norm() <= 10 * FP32_GRADIENT * parameter.grad.norm(), name


def test_every_sample_is_dealt_once_and_micro_batches_keep_their_bound():
    lengths = [5, 9, 2, 9, 7, 1, 30]
    shares = [share_of_rank(len(lengths), lengths, rank, 3) for rank in range(3)]
    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    for share in shares:
        groups = cut_micro_batches(share, lengths, 20)
        assert [index for group in groups for index in group] == share
        assert all(len(group) == 1 or len(group) * max(lengths[i] for i in group) <= 20 for group in groups)


def test_completions_without_tokens_are_left_out(start):
    _, tokenizer = start
    empty = replace(some_samples(tokenizer)[0], token_ids=[], log_probs=[])
    assert MicroBatching("token_mean", 100).make([empty], [1.0]) == []
    (batch,) = MicroBatching("sequence_mean", 10_000).make([empty, *some_samples(tokenizer)], [9.0, 1.0, 2.0, 3.0])
    assert batch.num_targets == 3 and 9.0 not in batch.advantages


def test_groups_survive_json_to_the_last_bit(start):
    _, tokenizer = start
    exact = replace(some_samples(tokenizer)[0], log_probs=[-1 / 3, math.nextafter(-0.1, 0)] * 4, reward=0.1)
    groups = [Group(3, "id", "q", "7", 2, [exact, replace(exact, reward=0.3)])]
    assert groups_from_json(groups_to_json(groups)) == groups
    assert groups[0].is_informative and not replace(groups[0], samples=[exact, exact]).is_informative


def test_advantages_are_those_of_the_whole_batch():
    groups = [Group(i, "", "", "", 0, [sample([1], [2, 3], reward) for reward in (1.0, 0.0)]) for i in range(2)]
    config = AlgorithmConfig(scale="none")
    assert sample_advantages(groups, config, 8) == [0.5, -0.5, 0.5, -0.5]
    late = [replace(groups[0], samples=[sample([1], [2] * 8, 1.0), sample([1], [2], 1.0)])]
    shaped = sample_advantages(late, replace(config, overlong_tokens=4), 8)  # 8 tokens of 8: the reward is 1 - 1
    assert shaped == [-0.5, 0.5]


def learner_of(tmp_path, mesh, *overrides: str):
    run = set_up(rl_config(tmp_path, *overrides), share_roles(mesh))
    return run, run.training.learner


def test_a_reward_for_stopping_makes_stopping_likelier(tmp_path, mesh):
    """One step: the sign of the advantage, the shift by one and the mask of the end-of-text token at once."""
    run, learner = learner_of(tmp_path, mesh)
    eot = run.tokenizer.eot_id
    prompt = run.rollout.collector.task.prompts[0]
    stop, go_on = sample(prompt, [eot], 1.0), sample(prompt, run.tokenizer.encode(" 3")[:1], 0.0)
    before = log_probs_of(learner.policy, [stop, go_on])
    learner.learn([Group(0, "", "", "", 0, [stop, go_on])], 0, Clock(mesh.device))
    after = log_probs_of(learner.policy, [stop, go_on])
    assert after[0].item() > before[0].item() + 0.01 and after[1].item() < before[1].item()


def test_equal_rewards_have_no_gradient(tmp_path, mesh):
    run, learner = learner_of(tmp_path, mesh)
    before = {name: tensor.clone() for name, tensor in run.training.model.state_dict().items()}
    prompt = run.rollout.collector.task.prompts[0]
    learner.learn([Group(0, "", "", "", 0, [sample(prompt, [5, 6], 0.7), sample(prompt, [9], 0.7)])], 0, run.clock)
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.training.model.state_dict().items())


def test_weights_are_float32_under_a_bfloat16_policy(tmp_path, mesh):
    """100 steps of a one-signed gradient at a rate of 1e-6 move a weight of 1.0; in bfloat16 none would."""
    run, _ = learner_of(tmp_path, mesh, "dtype=bfloat16", "optimizer.lr=1e-6")
    parameter = run.training.model.norm.weight
    with torch.no_grad():
        parameter.fill_(1.0)
    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        run.training.parts.optimizer.step()
    assert parameter.dtype == torch.float32
    assert parameter.detach().tolist() == pytest.approx(
        [1.0 - 1e-4] * len(parameter), abs=5e-6
    )  # 100 roundings of 6e-8


def test_the_trainer_applies_the_samplers_temperature(tmp_path, mesh):
    run, learner = learner_of(tmp_path, mesh, "temperature=0.6")
    groups = run.rollout.collector.collect().groups
    learned = learner.learn(groups, 0, run.clock)
    assert learned.metrics["max_sampler_mismatch"] < TEMPERATURE_LOG_PROBS
    learner.policy.temperature = 1.0
    assert learner.learn(groups, 1, run.clock).metrics["max_sampler_mismatch"] > 0.1


def test_truncation_is_a_bias_of_the_kept_mass_and_nothing_else(tmp_path, mesh):
    """The trainer's p over the sampler's q is the kept mass: importance weights then undo the truncation."""
    run, learner = learner_of(tmp_path, mesh, "top_p=0.8")
    engine, task = run.rollout.engine, run.rollout.collector.task
    completions = engine.generate(task.prompts[:4], [task.params] * 4)
    rewards = dict(reward=0.0, format_reward=0.0, answer_reward=0.0)
    samples = [Sample.of(one, rewards) for one in completions]
    trainer = log_probs_of(learner.policy, samples)
    biases, rest = [], []
    for one, own, found in zip(completions, samples, trainer, strict=True):
        masses = torch.tensor(one.kept_masses)
        bias = found - torch.tensor(own.log_probs)
        biases.append((bias.mean() - masses.log().mean()).item())
        rest.append((bias - masses.log()).abs().max().item())
        assert masses.min() < 0.999
    assert max(map(abs, biases)) < TEMPERATURE_LOG_PROBS and max(rest) < TEMPERATURE_LOG_PROBS


def test_prompts_begin_once_and_draws_never_repeat(tmp_path, mesh):
    run, _ = learner_of(tmp_path, mesh)
    collector, eot = run.rollout.collector, run.tokenizer.eot_id
    assert all(prompt[0] == eot and prompt.count(eot) == 1 for prompt in collector.task.prompts)
    count = len(collector.task.problems)
    epochs = [[collector.problem_of(draw) for draw in range(e * count, (e + 1) * count)] for e in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(count)) and epochs[0] != epochs[1]
    groups = collector.collect().groups + collector.collect().groups
    assert [group.draw for group in groups] == list(range(8))
    texts = [tuple(one.token_ids) for one in groups[0].samples]
    assert len(set(texts)) > 1, "the members of a group have dice of their own"


def test_completions_jsonl_says_what_each_earned(tmp_path, mesh):
    from alignment.train_rl_record import RlRecord

    run, learner = learner_of(tmp_path, mesh)
    record = RlRecord(run)
    record.begin({})
    groups = run.rollout.collector.collect()
    run.batch, run.step = 1, 1
    learned = learner.learn(groups.groups, 0, run.clock)
    record.batch(groups, learned, run.clock.take())
    lines = read_jsonl(tmp_path / "rl" / "completions.jsonl")
    assert len(lines) == 16 and {line["version"] for line in lines} == {0}
    samples = [(group, one) for group in groups.groups for one in group.samples]
    for line, (group, one), advantage in zip(lines, samples, learned.advantages, strict=True):
        assert (line["question"], line["reward"], line["advantage"]) == (group.question, one.reward, advantage)
