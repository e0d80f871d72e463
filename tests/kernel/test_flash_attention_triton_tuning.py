"""The choice of tiles with a scripted timer: what is timed, what is kept, and what a bad file does."""

import json
from dataclasses import asdict, dataclass, replace

import pytest
import torch
from torch.testing import assert_close

from kernel.flash_attention_triton_decode import (
    DecodeCache,
    DecodeCall,
    choose_config,
    default_decode_config,
    run_decode,
)
from kernel.flash_attention_triton_launch import Attention, TileConfig, default_config, run_forward
from kernel.flash_attention_triton_tuning import (
    CANDIDATES,
    Tuner,
    TuningKey,
    candidates_of,
    make_key,
    may_time,
    time_call,
    tuned_tile,
)
from tests.tolerances import FP16_TILES, KERNEL_BF16

DEFAULT = TileConfig(128, 64, 8, 2)
KEY = TuningKey("a device sm9", "forward", 128, "bfloat16", "causal", 4096)


@dataclass
class ScriptedTimer:
    """Milliseconds by the order of the calls; each is really made. An exception among them is raised."""

    times: list

    def __call__(self, call) -> float:
        call()
        outcome = self.times.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def make_tuner(path, times: list, allowed: bool = True) -> Tuner:
    """The candidates after the scripted ones are slow; without a script the timer must not be called."""
    slow = [9.0] * 20 if times else []
    return Tuner(path, ScriptedTimer([*times, *slow]), lambda: allowed)


def test_the_fastest_candidate_is_chosen_once_and_found_by_the_next_process(tmp_path):
    path, ran = tmp_path / "cache" / "tiles.json", []
    tuner = make_tuner(path, [3.0, 2.0, 1.0, 2.5])
    with tuner.timing():
        chosen = tuner.choose(KEY, DEFAULT, ran.append)
        assert tuner.choose(KEY, DEFAULT, ran.append) == chosen
    assert ran == candidates_of(KEY, DEFAULT) and ran[0] == DEFAULT and len(ran) >= 4
    assert chosen == ran[2]
    again = make_tuner(path, [])  # a timer that would fail
    assert again.choose(KEY, DEFAULT, ran.append) == chosen
    with again.timing():
        assert again.choose(KEY, DEFAULT, ran.append) == chosen
    other = KEY._replace(device="another device sm9")
    assert again.choose(other, DEFAULT, ran.append) == DEFAULT


def test_the_default_stays_within_the_spread_of_runs(tmp_path):
    tuner = make_tuner(tmp_path / "tiles.json", [1.0, 0.99, 0.98, 1.2])
    with tuner.timing():
        assert tuner.choose(KEY, DEFAULT, lambda config: None) == DEFAULT
    assert json.loads((tmp_path / "tiles.json").read_text())["choices"].popitem()[1] == asdict(DEFAULT)


@pytest.mark.parametrize("asked, allowed", [(False, True), (True, False)])
def test_nothing_is_timed_or_written_without_being_asked_or_allowed(tmp_path, asked, allowed):
    tuner = make_tuner(tmp_path / "tiles.json", [], allowed)
    tuner.times_calls = asked
    assert tuner.choose(KEY, DEFAULT, lambda config: pytest.fail("ran")) == DEFAULT
    assert not (tmp_path / "tiles.json").exists()


def test_timing_may_be_turned_on_after_a_call_without_a_choice(tmp_path):
    tuner = make_tuner(tmp_path / "tiles.json", [4.0, 3.0, 2.0, 1.0])
    assert tuner.choose(KEY, DEFAULT, lambda config: None) == DEFAULT
    with tuner.timing():
        assert tuner.choose(KEY, DEFAULT, lambda config: None) == candidates_of(KEY, DEFAULT)[3]
    assert not tuner.times_calls


def test_a_tile_that_does_not_fit_is_left_out_and_another_fault_is_not_hidden(tmp_path, capsys):
    from triton.runtime.errors import OutOfResources

    tuner = make_tuner(tmp_path / "tiles.json", [3.0, OutOfResources(300000, 232448, "shared memory"), 2.0, 2.5])
    with tuner.timing():
        assert tuner.choose(KEY, DEFAULT, lambda config: None) == candidates_of(KEY, DEFAULT)[2]
    assert capsys.readouterr().err.count("\n") == 1
    broken = make_tuner(tmp_path / "others.json", [RuntimeError("illegal memory access")])
    with broken.timing(), pytest.raises(RuntimeError, match="illegal memory access"):
        broken.choose(KEY, DEFAULT, lambda config: None)


BAD_FILES = {
    "cut off": '{"format": 1, "choi',
    "another format": '{"format": 99, "choices": {}}',
    "a list": "[1, 2]",
    "no choices": '{"format": 1}',
    "choices that are no objects": '{"format": 1, "choices": {"key": 3}}',
    "choices that are a list": '{"format": 1, "choices": [3]}',
    "bytes": b"\x80\xff\x00",
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_ignored_with_one_line_and_replaced(tmp_path, capsys, name):
    path, content = tmp_path / "tiles.json", BAD_FILES[name]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    tuner = make_tuner(path, [4.0, 3.0, 2.0, 1.0])
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and str(path) in printed
    assert tuner.choose(KEY, DEFAULT, lambda config: None) == DEFAULT
    with tuner.timing():
        chosen = tuner.choose(KEY, DEFAULT, lambda config: None)
    assert make_tuner(path, []).choose(KEY, DEFAULT, lambda config: None) == chosen != DEFAULT


def test_a_choice_that_is_no_candidate_any_more_is_not_used(tmp_path):
    path = tmp_path / "tiles.json"
    stale = asdict(replace(DEFAULT, block_m=1024))
    path.write_text(json.dumps({"format": 1, "choices": {"|".join(map(str, KEY)): stale}}))
    assert make_tuner(path, []).choose(KEY, DEFAULT, lambda config: None) == DEFAULT


def test_two_processes_keep_each_others_choices(tmp_path):
    path = tmp_path / "tiles.json"
    first, second = (make_tuner(path, [4.0, 3.0, 2.0, 1.0]) for _ in range(2))
    for tuner, key in ((first, KEY), (second, KEY._replace(length=8192))):
        with tuner.timing():
            tuner.choose(key, DEFAULT, lambda config: None)
    assert len(make_tuner(path, []).stored) == 2


def test_keys_tell_apart_what_matters():
    x = torch.zeros(1, 1, 1, 96, dtype=torch.float16)
    key = make_key("key", x, "causal", 1025)
    assert key == ("cpu", "key", 96, "float16", "causal", 2048)
    assert make_key("key", x, "causal", 2048) == key != make_key("key", x, "causal", 1024)
    assert candidates_of(key._replace(dtype="float32"), DEFAULT) == [DEFAULT]
    assert any(config.consumers for config in candidates_of(KEY, DEFAULT))
    assert not any(config.consumers for config in candidates_of(KEY._replace(device="another sm8"), DEFAULT))
    for (kind, _), rows in CANDIDATES.items():
        assert len(set(rows)) == len(rows), kind


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_the_real_timer_is_not_allowed_without_a_gpu(tmp_path):
    assert not may_time()
    tuner = Tuner(tmp_path / "tiles.json")
    with tuner.timing():
        assert tuner.choose(KEY, DEFAULT, lambda config: pytest.fail("ran")) == DEFAULT


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's tiles")
def test_decode_runs_with_the_choice_of_its_tuner(tmp_path):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 1, 2, 64).half(), *torch.randn(2, 2, 40, 1, 64).half()
    cache = DecodeCache(k, v, torch.tensor([40, 9], dtype=torch.int32), None)
    call = DecodeCall(0.125, 0.0, 0, 40)
    default = default_decode_config(q)
    candidates = candidates_of(make_key("decode", q, "", 80), default)
    tuner = make_tuner(tmp_path / "tiles.json", [5.0, 4.0, 1.0, *[3.0] * (len(candidates) - 3)])
    with tuner.timing():
        chosen = choose_config(q, cache, call, tuner)
    assert chosen == candidates[2] != default
    for x, y in zip(run_decode(q, cache, call, chosen), run_decode(q, cache, call, default), strict=True):
        assert_close(x, y, atol=FP16_TILES, rtol=FP16_TILES)


@pytest.mark.gpu
def test_gpu_tuning_keeps_a_candidate_and_does_nothing_during_capture(tmp_path):
    torch.manual_seed(0)
    q = torch.randn(4, 1, 8, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 4, 2048, 2, 128, device="cuda", dtype=torch.bfloat16)
    lens = torch.tensor([2048, 5, 900, 0], dtype=torch.int32, device="cuda")
    cache, call = DecodeCache(k, v, lens, None), DecodeCall(128**-0.5, 0.0, 0, 2048)
    default = default_decode_config(q)
    expected = run_decode(q, cache, call, default)
    tuner = Tuner(tmp_path / "tiles.json")
    with tuner.timing(), torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert choose_config(q, cache, call, tuner) == default
    assert not tuner.stored
    with tuner.timing():
        chosen = choose_config(q, cache, call, tuner)
    key = make_key("decode", q, "", 1)
    assert chosen in candidates_of(key, default) and len(Tuner(tmp_path / "tiles.json").stored) == 1
    for x, y in zip(run_decode(q, cache, call, chosen), expected, strict=True):
        assert_close(x, y, atol=KERNEL_BF16, rtol=KERNEL_BF16)


@pytest.mark.gpu
def test_gpu_training_passes_are_timed_once_and_then_looked_up(tmp_path):
    torch.manual_seed(0)
    q = torch.randn(1, 1024, 4, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 1024, 2, 128, device="cuda", dtype=torch.bfloat16)
    call, calls = Attention(scale=128**-0.5), []
    default = default_config("forward", q, call)
    tuner = Tuner(tmp_path / "tiles.json", lambda run: (calls.append(1), time_call(run))[1])
    for _ in range(2):
        with tuner.timing():
            tile = tuned_tile("forward", (q, k), call, default, lambda t: run_forward(q, k, v, call, t), tuner)
    assert len(calls) == len(candidates_of(make_key("forward", q, "causal", 1024), default))
    out, _ = run_forward(q, k, v, call, tile)
    default_out, _ = run_forward(q, k, v, call, default)
    assert_close(out, default_out, atol=KERNEL_BF16, rtol=KERNEL_BF16)
