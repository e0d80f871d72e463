"""The prediction of a batch against closed forms, on a device whose rates are given."""

from dataclasses import replace
from pathlib import Path

import pytest

from alignment.cost_model import (
    CACHE_MOVES,
    CALLS_PER_REQUEST,
    CALLS_PER_STEP,
    CALLS_PER_TOKEN,
    SAMPLING_BYTES,
    Lengths,
    predict_batch,
)
from llm.args import ModelConfig
from llm.cost_model_counts import count_parameters
from llm.cost_model_decode import (
    DecodeRates,
    cache_bytes_per_token,
    decode_step_flops,
    decode_weight_bytes,
    prefill_time,
)
from llm.hardware import Hardware
from llm.hardware_calibration import Rates
from tests.alignment.rl_start import rl_config

FLAT = ((1.0, 1e15), (1e9, 1e15))  # FLOP/s at any width
INSTANT = ((1.0, 1e-15), (1e12, 1e-15))
RATES = Rates(FLAT, INSTANT, INSTANT, INSTANT, ((64, FLAT, FLAT),), 1e15, 0.0)
MODEL = ModelConfig(vocab_size=2048, d_model=512, num_layers=8, num_heads=8, d_ff=1536, max_seq_len=512)
LENGTHS = Lengths(prompt=50.0, response=100.0, longest=100)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    made = rl_config(Path(tmp_path_factory.mktemp("rl")), "prompts_per_batch=8", "group_size=8", start="nowhere")
    return replace(made, dtype="float32")


def hardware(device: str = "cpu", memory_bytes_per_s: float = 1e11, rates: Rates = RATES) -> Hardware:
    return Hardware("x", device, "x", 1e15, 1e15, 1e12, memory_bytes_per_s, "given", rates)


def test_a_memory_bound_rollout_reads_all_weights_once_a_step(config):
    found = predict_batch(config, MODEL, hardware("cuda"), LENGTHS, call_s=0.0)
    cache = 64 * 101 * cache_bytes_per_token(MODEL, 2)
    steps = 100 * (decode_weight_bytes(MODEL, 2) + cache) / 1e11
    prefill = (decode_weight_bytes(MODEL, 2) + 64 * 50 * cache_bytes_per_token(MODEL, 2)) / 1e11
    assert found.rollout_s == pytest.approx(steps + prefill, rel=1e-3)
    assert found.sync_s == pytest.approx(count_parameters(MODEL).total * 6 / 1e11)


def test_on_a_cpu_products_caches_and_sampling_come_one_after_the_other(config):
    slow = replace(RATES, matmul=((1.0, 1e11), (1e9, 1e11)))
    found = predict_batch(config, MODEL, hardware(rates=slow), LENGTHS, call_s=0.0)
    moved = decode_weight_bytes(MODEL, 4) + 64 * 2048 * SAMPLING_BYTES
    moved += CACHE_MOVES * 64 * 101 * cache_bytes_per_token(MODEL, 4)
    products = decode_step_flops(MODEL, 64, 100.0) / 1e11
    prefill = prefill_time(MODEL, [50] * 64, DecodeRates(1e11, 1e11), 4).seconds
    assert found.rollout_s == pytest.approx(100 * (moved / 1e11 + products) + prefill, rel=1e-3)


def test_python_counts_for_every_step_and_token(config):
    quick = hardware(memory_bytes_per_s=1e18)
    found = predict_batch(config, MODEL, quick, LENGTHS, call_s=1e-6)
    expected = 100 * (CALLS_PER_STEP + 64 * CALLS_PER_TOKEN) + 64 * CALLS_PER_REQUEST
    assert found.rollout_s == pytest.approx(expected * 1e-6, rel=0.02)
    on_gpu = predict_batch(config, MODEL, hardware("cuda", 1e18), LENGTHS, call_s=1e-6)
    assert on_gpu.rollout_s == pytest.approx(found.rollout_s, rel=0.02), "Python is the longer of the two"


def test_rows_beyond_the_engines_wait_for_a_free_one(config):
    whole = predict_batch(config, MODEL, hardware("cuda"), LENGTHS, 0.0)
    halved = replace(config, rollout=replace(config.rollout, max_running=32))
    found = predict_batch(halved, MODEL, hardware("cuda"), LENGTHS, 0.0)
    again = 100 * decode_weight_bytes(MODEL, 2) / 1e11  # two waves read the weights twice and the caches once
    assert found.rollout_s - whole.rollout_s == pytest.approx(again, rel=1e-3)


def test_updates_scale_with_tokens_and_epochs(config):
    one = predict_batch(config, MODEL, hardware(), LENGTHS, 0.0)
    assert one.log_prob_s == 0.0, "with one update there is no pass before it"
    twice = predict_batch(replace(config, epochs_per_batch=2), MODEL, hardware(), LENGTHS, 0.0)
    assert twice.update_s == pytest.approx(2 * one.update_s) and twice.log_prob_s == pytest.approx(one.update_s / 3)
    split = predict_batch(replace(config, updates_per_batch=2), MODEL, hardware(), LENGTHS, 0.0)
    assert split.update_s == pytest.approx(one.update_s, rel=0.01)
    referenced = replace(config, algorithm=replace(config.algorithm, kl_coef=0.1))
    assert predict_batch(referenced, MODEL, hardware(), LENGTHS, 0.0).log_prob_s == pytest.approx(one.update_s / 3)


def test_the_parts_make_the_whole_and_the_share(config):
    found = predict_batch(config, MODEL, hardware(), LENGTHS, 1e-7)
    fields = found.fields()
    parts = ("rollout_s", "log_prob_s", "update_s", "sync_s")
    assert fields["step_time_s"] == pytest.approx(sum(fields[name] for name in parts))
    assert fields["rollout_share"] == pytest.approx(fields["rollout_s"] / fields["step_time_s"])
    assert "100 tokens" in fields["notes"]["rollout_s"]
