"""The prediction of a batch against closed forms, on a device whose constants are given."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from alignment.cost_model import OPERATIONS_PER_SAMPLE, OPERATIONS_PER_TENSOR, padded_tokens, predict_batch
from alignment.cost_model_calibration import EngineRates, Setting, calibrate_engine, prompt_flops
from alignment.cost_model_rollout import (
    ATTENTION_SHARE,
    LAYER_S,
    STEP_S,
    Device,
    Lengths,
    alive_by_step,
    draw_lengths,
    predict_rollout,
    prompt_tokens,
    step_seconds,
)
from llm.args import ModelConfig
from llm.cost_model_counts import count_parameters
from llm.cost_model_decode import cache_bytes_per_token, decode_step_flops, decode_weight_bytes
from llm.hardware import Hardware
from llm.hardware_calibration import Rates
from tests.alignment.rl_start import rl_config

FLAT = ((1.0, 1e15), (1e9, 1e15))  # FLOP/s at any width
INSTANT = ((1.0, 1e-15), (1e12, 1e-15))
RATES = Rates(FLAT, INSTANT, INSTANT, INSTANT, ((64, FLAT, FLAT),), 1e15, 0.0)
NO_HOST = EngineRates(0.0, 0.0, 0.0, 0.0, 0.0, FLAT, 1e20, 0.0)
MODEL = ModelConfig(vocab_size=2048, d_model=512, num_layers=8, num_heads=8, d_ff=1536, max_seq_len=512)
LENGTHS = Lengths(prompts=[50], responses=[100], group=8)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    made = rl_config(Path(tmp_path_factory.mktemp("rl")), "prompts_per_batch=8", "group_size=8", start="nowhere")
    return replace(made, dtype="float32")


def device(kind: str = "cpu", rates: Rates = RATES, **engine: object) -> Device:
    hardware = Hardware("x", kind, "x", 1e15, 1e15, 1e12, 1e11, "given", rates)
    return Device(hardware, replace(NO_HOST, **engine), 2 if kind == "cuda" else 4)


def test_a_batch_shrinks_as_completions_end_and_waiting_ones_take_their_places():
    assert alive_by_step([3, 1, 2], most=3) == [3, 2, 1]
    assert alive_by_step([3, 1, 2], most=2) == [2, 2, 2]
    assert alive_by_step([2, 2], most=1) == [1, 1, 1, 1]
    for most in (1, 3, 100):
        assert sum(alive_by_step([5, 1, 4, 4, 2], most)) == 16, "every token is one row of one step"


def test_drawn_lengths_are_those_seen():
    seen = [5, 1, 4, 4, 2, 9]
    assert sorted(draw_lengths(seen, 6)) == sorted(seen)
    assert sorted(draw_lengths(seen, 12)) == sorted(seen * 2)
    assert draw_lengths([7], 3) == [7, 7, 7]


def test_a_group_computes_the_whole_pages_of_its_prompt_once():
    lengths = Lengths(prompts=[70], responses=[1], group=4)
    assert prompt_tokens(8, lengths, page=32) == 2 * (70 + 3 * (70 - 64))
    assert prompt_tokens(8, lengths, page=128) == 8 * 70
    assert prompt_tokens(8, replace(lengths, prompts=[64]), page=32) == 2 * (64 + 3 * 32), "the last token is computed"


def test_a_memory_bound_step_on_a_gpu_reads_weights_and_caches_once():
    found = step_seconds(MODEL, 64, 100.0, device("cuda"))
    moved = decode_weight_bytes(MODEL, 2) + 64 * 100 * cache_bytes_per_token(MODEL, 2) / ATTENTION_SHARE
    assert found == pytest.approx(moved / 1e11 + 8 * LAYER_S + STEP_S)


def test_a_gpu_waits_for_a_slow_host_and_a_cpu_is_its_own():
    host = dict(step_s=1.0, row_s=0.5)
    assert step_seconds(MODEL, 4, 1.0, device("cuda", **host)) == 3.0
    alone = step_seconds(MODEL, 4, 1.0, device())
    assert step_seconds(MODEL, 4, 1.0, device(**host)) == pytest.approx(3.0 + alone)


def test_on_a_cpu_products_caches_and_sampling_come_one_after_the_other():
    slow = device(products=((1.0, 1e9), (100.0, 1e9)), cache_bytes_per_s=1e8, score_s=1e-6)
    parts = decode_step_flops(MODEL, 4, 0) / 1e9, 4 * 100 * cache_bytes_per_token(MODEL, 4) / 1e8, 4 * 2048 * 1e-6
    assert step_seconds(MODEL, 4, 100.0, slow) == pytest.approx(sum(parts))
    grouped = replace(MODEL, num_kv_heads=2)  # a quarter of the cache, which each query head reads for itself
    parts = decode_step_flops(grouped, 4, 0) / 1e9, *parts[1:]
    assert step_seconds(grouped, 4, 100.0, slow) == pytest.approx(sum(parts))


def test_the_longest_completion_counts_with_few_rows_and_requests_that_wait_come_later(config):
    host = device(step_s=1.0, row_s=0.1)
    equal = predict_rollout(4, config.rollout, MODEL, host, replace(LENGTHS, responses=[10]))
    uneven = predict_rollout(4, config.rollout, MODEL, host, replace(LENGTHS, responses=[5, 5, 5, 25]))
    assert uneven - equal == pytest.approx(15 * 1.0, rel=2e-3), "as many tokens, 15 steps more"
    halved = predict_rollout(4, replace(config.rollout, max_running=2), MODEL, host, replace(LENGTHS, responses=[10]))
    assert halved - equal == pytest.approx(9 * 1.0, rel=2e-3), "the first token comes with the prompt"


def test_updates_scale_with_tokens_and_epochs(config):
    slow = device(rates=replace(RATES, matmul=((1.0, 1e11), (1e9, 1e11))))
    one = predict_batch(config, MODEL, slow, LENGTHS)
    assert one.log_prob_s == 0.0, "with one update there is no pass before it"
    twice = predict_batch(replace(config, epochs_per_batch=2), MODEL, slow, LENGTHS)
    assert twice.update_s == pytest.approx(2 * one.update_s) and twice.log_prob_s == pytest.approx(one.update_s / 3)
    split = predict_batch(replace(config, updates_per_batch=2), MODEL, slow, LENGTHS)
    assert split.update_s == pytest.approx(one.update_s, rel=0.01)
    referenced = replace(config, algorithm=replace(config.algorithm, kl_coef=0.1))
    assert predict_batch(referenced, MODEL, slow, LENGTHS).log_prob_s == pytest.approx(one.update_s / 3)


def test_batches_and_weights_cost_the_host_operations_by_count(config):
    found = predict_batch(config, MODEL, device(rates=replace(RATES, op_overhead_s=1e-3)), LENGTHS)
    assert found.log_prob_s == pytest.approx(64 * OPERATIONS_PER_SAMPLE * 1e-3)
    tensors = 9 * 8 + 3
    moved = count_parameters(MODEL).total * 8 / 1e11
    assert found.sync_s == pytest.approx(moved + tensors * OPERATIONS_PER_TENSOR * 1e-3)


def test_the_output_layer_and_the_loss_are_paid_for_sampled_tokens_alone(config):
    """Half of the tokens sampled costs what a vocabulary of half the size does."""
    slow = device(rates=replace(RATES, matmul=((1.0, 1e11), (1e9, 1e11)), exp_pass=((1.0, 1e-9), (1e12, 1e3))))
    all_sampled = predict_batch(config, MODEL, slow, Lengths(prompts=[1], responses=[128], group=8))
    half = predict_batch(config, MODEL, slow, Lengths(prompts=[65], responses=[64], group=8))
    smaller = replace(MODEL, vocab_size=1024)
    narrow = predict_batch(config, smaller, slow, Lengths(prompts=[1], responses=[128], group=8))
    assert half.update_s == pytest.approx(narrow.update_s, rel=0.01)
    assert half.update_s < 0.98 * all_sampled.update_s


def test_padding_counts_as_tokens():
    even = padded_tokens(4, max_tokens=1000, lengths=Lengths([33], [32]))
    assert even == (4 * 64, 1)
    uneven = padded_tokens(4, max_tokens=1000, lengths=Lengths([1], [8, 8, 8, 64]))
    assert uneven == (4 * 64, 1), "all rows are as long as the longest"
    assert padded_tokens(4, max_tokens=64, lengths=Lengths([1], [8, 8, 8, 64])) == (64 + 3 * 8, 2)


def test_the_parts_make_the_whole_and_the_share(config):
    fields = predict_batch(config, MODEL, device(step_s=1e-3), LENGTHS).fields()
    parts = ("rollout_s", "log_prob_s", "update_s", "sync_s")
    assert fields["step_time_s"] == pytest.approx(sum(fields[name] for name in parts))
    assert fields["rollout_share"] == pytest.approx(fields["rollout_s"] / fields["step_time_s"])
    assert "100 tokens" in fields["notes"]["rollout_s"]


def test_the_engine_s_constants_are_read_off_a_clock():
    """By a clock that moves one second a look: no machine is timed."""
    looks = iter(range(1_000_000))
    at = Setting(torch.device("cpu"), torch.float32, ((1.0, 1e9), (1e9, 1e9)), None, lambda: float(next(looks)))
    rates = calibrate_engine(at)
    assert (rates.step_s, rates.row_s, rates.prompt_s, rates.request_s) == (1.0, 0.0, 1.0, 0.0)
    assert all(rate > 0 for _, rate in rates.products) and rates.cache_bytes_per_s > 0
    assert 0 <= rates.score_s < 1e-9
    assert prompt_flops(MODEL, 2.0) == 2 * prompt_flops(MODEL, 1.0)
