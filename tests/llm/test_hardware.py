"""Which device a run stands on, its peaks, its calibration; and the probe that fills its memory."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from configs.errors import UserError
from configs.loader import compose_config
from llm.args import HardwareConfig
from llm.hardware import detect_hardware, known_hardware, match_gpu, rates_of
from llm.hardware_calibration import Grid, Rates, calibrate
from llm.training_probe import ProbeConfig, probe, search_largest

RATES = Rates((), (), (), (), (), 0.0, 0.0)
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def fresh_calibration():
    """What a test pretends to have measured is neither found nor left in the process's cache."""
    rates_of.cache_clear()
    yield
    rates_of.cache_clear()


@pytest.fixture
def gpu(monkeypatch):
    """Pretend to have a GPU of a given name."""

    def pretend(name: str) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        properties = SimpleNamespace(total_memory=5_000_000_000)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr("llm.hardware.calibrate", lambda device, dtype: RATES)

    return pretend


@pytest.mark.parametrize(
    ("name", "file", "bf16_flops"),
    [
        ("NVIDIA H200", "h200", 989e12),
        ("NVIDIA H100 80GB HBM3", "h100", 989e12),
        ("NVIDIA A100-SXM4-80GB", "a100", 312e12),
        ("NVIDIA L40S", "l40s", 362e12),
        ("NVIDIA GeForce RTX 4090", "rtx4090", 165.2e12),
    ],
)
def test_a_known_gpu_is_found_by_its_name(gpu, name, file, bf16_flops):
    gpu(name)
    hardware = detect_hardware(HardwareConfig(), CUDA)
    assert (hardware.name, hardware.peak_flops("bfloat16"), hardware.note) == (file, bf16_flops, "")
    assert hardware.memory_bytes == 5_000_000_000, "the device's own memory counts, not the datasheet's"


def test_an_unknown_gpu_has_no_peak_and_says_how_to_add_it(gpu):
    gpu("NVIDIA B9000")
    hardware = detect_hardware(HardwareConfig(), CUDA)
    assert (hardware.name, hardware.peak_flops("bfloat16"), hardware.peak_flops("float32")) == ("unknown", None, None)
    assert "NVIDIA B9000" in hardware.note and "configs/hardware/" in hardware.note and "\n" not in hardware.note


def test_a_named_gpu_overrides_detection(gpu):
    gpu("NVIDIA B9000")
    config = HardwareConfig(name="mine", bf16_flops=1e15)
    assert detect_hardware(config, CUDA).peak_flops("bfloat16") == 1e15


def test_a_gpu_config_on_a_cpu_is_refused():
    with pytest.raises(UserError, match=r"hardware=h200 is a GPU.*use hardware=auto"):
        detect_hardware(HardwareConfig(name="h200"), torch.device("cpu"))


def test_every_gpu_file_is_whole_and_names_its_source():
    known = known_hardware()
    assert {config.name for config in known} == {"h200", "h100", "a100", "l40s", "rtx4090"}
    for config in known:
        assert config.source and config.bf16_flops > config.fp32_flops > 0
        assert config.memory_bytes > 0 and config.memory_bytes_per_s > 0


def test_the_longest_match_wins(tmp_path: Path):
    for name, matches in [("a", "L4"), ("b", "L40S")]:
        (tmp_path / f"{name}.yaml").write_text(f"name: {name}\nmatches: {matches}\n")
    assert match_gpu("NVIDIA L40S", known_hardware(tmp_path)).name == "b"
    assert match_gpu("NVIDIA L4", known_hardware(tmp_path)).name == "a"


def test_a_cpu_is_measured(monkeypatch):
    small = Grid((16, 32), 64, (1024, 4096), (16,), (32,), 2, 64)
    monkeypatch.setattr("llm.hardware_calibration.GRIDS", {"cpu": small})
    hardware = detect_hardware(HardwareConfig(), torch.device("cpu"))
    assert hardware.peak_flops("float32") == max(rate for _, rate in hardware.rates.matmul)
    assert hardware.peak_flops("bfloat16") is None
    assert all(seconds > 0 for _, seconds in hardware.rates.new_pass) and hardware.rates.op_overhead_s > 0
    assert 0 < hardware.memory_bytes < 1e15
    assert set(hardware.rates.other_passes) == {"broadcast", "join", "sum"}  # no second dtype in float32
    narrow = calibrate(torch.device("cpu"), torch.bfloat16)
    assert {kind: points[0][0] for kind, points in narrow.other_passes.items()} == {
        "broadcast": 32768.0, "widen": 24576.0, "mixed": 24576.0, "join": 24576.0, "sum": 16384.0,
    }  # fmt: skip


@pytest.mark.parametrize("border", [0, 1, 2, 7, 63, 100])
@pytest.mark.parametrize("guess", [1, 8, 64, 100])
def test_the_search_finds_the_border_from_any_guess(border, guess):
    tried = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= border

    assert search_largest(fits, guess, most=100) == border
    assert len(tried) == len(set(tried)) and all(1 <= size <= 100 for size in tried)


def probe_config(*overrides: str) -> ProbeConfig:
    small = ["model.d_model=32", "model.num_layers=1", "model.d_ff=64", "vocab_size=64", "seq_len=32", "device=cpu"]
    return compose_config(ProbeConfig, "training_probe", [*small, *overrides])


def test_the_probe_finds_on_a_cpu_what_was_predicted():
    found = probe(probe_config("limit_bytes=8e6"))
    assert found["largest"] == pytest.approx(found["predicted_largest"], rel=0.1)
    assert found["largest"] > 8


def test_the_probe_refuses_a_limit_below_one_sequence():
    with pytest.raises(UserError, match="not one sequence of seq_len=32 fits"):
        probe(probe_config("limit_bytes=1e4"))
