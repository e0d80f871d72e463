"""What the run stands on: the device's dense peaks from configs/hardware/, and its speed at generic work.

MFU is taken against the datasheet's dense peak; a CPU's peak is the fastest matrix product of the calibration. A GPU
that no file knows has no peak, so its MFU is null, and a note says how to add it.
"""

import os
import platform
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from omegaconf import OmegaConf

from configs.errors import UserError
from configs.loader import CONFIG_DIR, load_config
from llm.args import HardwareConfig
from llm.hardware_calibration import Rates, calibrate

AUTO = "auto"
CPU = "cpu"


@dataclass(frozen=True)
class Hardware:
    """One device: peaks in FLOP/s (None when unknown), memory in bytes, bandwidth in bytes/s, measured rates."""

    name: str  # the file in configs/hardware/, or "unknown"
    device: str  # "cpu" or "cuda"
    description: str  # what the device calls itself
    bf16_flops: float | None
    fp32_flops: float | None
    memory_bytes: float
    memory_bytes_per_s: float | None
    source: str
    rates: Rates
    note: str = ""  # a line for the user, when something is unknown

    def peak_flops(self, dtype: str) -> float | None:
        """The dense peak of matrix products whose inputs are "bfloat16" or "float32"."""
        return self.bf16_flops if dtype == "bfloat16" else self.fp32_flops


def known_hardware(directory: str | Path | None = None) -> list[HardwareConfig]:
    """Every file of configs/hardware/ that names a GPU, longest `matches` first."""
    paths = sorted(Path(directory or f"{CONFIG_DIR}/hardware").glob("*.yaml"))
    configs = [load_config(HardwareConfig, OmegaConf.load(path)) for path in paths]
    return sorted((config for config in configs if config.matches), key=lambda config: -len(config.matches))


def match_gpu(device_name: str, known: list[HardwareConfig]) -> HardwareConfig | None:
    """The config whose `matches` stands in the GPU's name, such as H200 in "NVIDIA H200"."""
    return next((config for config in known if config.matches.lower() in device_name.lower()), None)


def how_to_add(device_name: str) -> str:
    """The line for a GPU without a file."""
    return (
        f"{device_name!r} is not in configs/hardware/, so MFU is null; add a file there with name, matches, "
        "bf16_flops, fp32_flops, memory_bytes, memory_bytes_per_s and source (configs/hardware/h200.yaml shows one)"
    )


def detect_hardware(
    config: HardwareConfig, device: torch.device, threads: int | None = None, dtype: str = "auto"
) -> Hardware:
    """The device as the config or its own name says, calibrated in `dtype` (auto: bfloat16 on a GPU).

    Takes about three seconds. `threads` is only told; set it with torch.set_num_threads. UserError when the config
    names a GPU and the device is a CPU.
    """
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    if device.type == "cpu":
        if config.name not in (AUTO, CPU):
            raise UserError(f"hardware={config.name} is a GPU, but the run is on the CPU; use hardware=auto")
        return detect_cpu(threads or torch.get_num_threads(), dtype)
    return detect_gpu(config, device, dtype)


@lru_cache(maxsize=8)
def rates_of(device: torch.device, dtype: torch.dtype, threads: int) -> Rates:
    """The calibration, once a process for each device, dtype and number of threads."""
    rates = calibrate(device, dtype)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the calibration took is for the model
    return rates


def detect_cpu(threads: int, dtype: str) -> Hardware:
    """A CPU's peak is the best product of the calibration: no datasheet knows its clock and its share of cores."""
    rates = rates_of(torch.device("cpu"), getattr(torch, dtype), threads)
    peak = max(rate for _, rate in rates.matmul)
    bandwidth = rates.new_pass[-1][0] / rates.new_pass[-1][1]
    peaks = {"bfloat16": (peak, None), "float32": (None, peak)}[dtype]
    description = f"{platform.processor() or platform.machine()} CPU, {threads} threads"
    return Hardware(
        CPU, "cpu", description, *peaks, available_memory_bytes(), bandwidth, "measured at start", rates
    )  # fmt: skip


def detect_gpu(config: HardwareConfig, device: torch.device, dtype: str) -> Hardware:
    description = torch.cuda.get_device_name(device)
    found = match_gpu(description, known_hardware()) if config.name == AUTO else config
    note = how_to_add(description) if found is None else ""
    found = replace(found or HardwareConfig(), name=found.name if found else "unknown")
    return Hardware(
        found.name, "cuda", description, found.bf16_flops, found.fp32_flops,
        float(torch.cuda.get_device_properties(device).total_memory), found.memory_bytes_per_s, found.source,
        rates_of(device, getattr(torch, dtype), 0), note,
    )  # fmt: skip


def available_memory_bytes() -> float:
    """Memory that new tensors of this process can take: MemAvailable on Linux, elsewhere all physical pages."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return 1024.0 * int(lines["MemAvailable"].split()[0])
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
