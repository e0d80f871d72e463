"""Throughput, MFU, peak memory, comparison rows and the tracker."""

import builtins

import pytest
import torch

from configs.errors import UserError
from llm.args import TrackingConfig
from llm.metrics import Throughput, Tracker, comparison_rows, mfu
from llm.metrics_memory import LiveTensorBytes, PeakMemory, free_in_private_pools, graph_bytes

CPU = torch.device("cpu")


class Clock:
    """A clock that moves only when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("llm.metrics.time.perf_counter", clock)
    return clock


def test_mfu_matches_its_definition():
    # PaLM's: 6e9 FLOPs a token at 1,000 tokens/s on a 12 TFLOP/s device is half of its peak.
    assert mfu(6e9, 1000.0, 12e12) == pytest.approx(0.5)
    assert mfu(6e9, 1000.0, None) is None


def test_throughput_leaves_out_pauses(clock):
    throughput = Throughput(CPU)
    throughput.resume()
    clock.now_s += 2.0
    throughput.add_step(1000)
    with throughput.paused():
        clock.now_s += 50.0  # validation
    clock.now_s += 2.0
    throughput.add_step(1000)
    window = throughput.read()
    assert (window.tokens, window.steps, window.elapsed_s) == (2000, 2, 4.0)
    assert (window.tokens_per_s, window.step_s) == (500.0, 2.0)
    clock.now_s += 1.0
    throughput.add_step(1000)
    assert throughput.read().tokens_per_s == 1000.0
    assert throughput.total.tokens_per_s == 600.0


def test_throughput_forgets_the_warm_up(clock):
    throughput = Throughput(CPU)
    throughput.resume()
    clock.now_s += 30.0  # compilation
    throughput.add_step(1000)
    throughput.forget()
    clock.now_s += 1.0
    throughput.add_step(1000)
    assert throughput.read().elapsed_s == 1.0
    assert throughput.total.tokens == 1000


def test_a_pause_within_a_pause_does_not_start_the_clock(clock):
    throughput = Throughput(CPU)
    with throughput.paused():
        clock.now_s += 1.0
    clock.now_s += 1.0
    assert throughput.read().elapsed_s == 0.0


def test_live_bytes_count_storages_once_and_forget_freed_ones():
    held = torch.zeros(1000)
    with LiveTensorBytes([held]) as live:
        assert live.bytes == 4000
        a = torch.zeros(500)
        view, inplace = a.view(5, 100), a.add_(1)
        assert live.bytes == 6000
        b = a + a
        assert (live.bytes, live.peak_bytes) == (8000, 8000)
        del a, b
        assert live.bytes == 6000  # the views keep one storage
        del view, inplace
        assert (live.bytes, live.peak_bytes) == (4000, 8000)


def test_live_bytes_see_what_autograd_keeps():
    x = torch.ones(1000, requires_grad=True)
    with PeakMemory(CPU, [x]) as memory:
        y = x.exp().exp()  # each result is saved for backward
        assert memory.mode.bytes == 12000
        y.sum().backward()
        del y
        assert memory.mode.bytes == 8000  # x and its gradient
    assert memory.peak_bytes >= 16000
    torch.zeros(100_000)
    assert memory.peak_bytes < 100_000, "nothing counts after the region"


def test_free_memory_of_private_pools_alone_is_the_graphs():
    def segment(pool, total, allocated):
        return {"segment_pool_id": pool, "total_size": total, "allocated_size": allocated}

    segments = [segment((0, 0), 1000, 10), segment((0, 1), 200, 50), segment((1, 0), 30, 0), segment((0, 2), 4, 4)]
    assert free_in_private_pools(segments) == 150 + 30
    assert graph_bytes(CPU) == 0


@pytest.mark.gpu
def test_a_replayed_graph_needs_its_pool():
    """What a capture made and let go of again is free to the allocator's count and needed by every replay."""
    device, megabyte = torch.device("cuda", 0), 2**20
    x, out = torch.ones(16 * megabyte // 4, device=device), torch.empty((), device=device)
    (x * 2).exp().sum()
    before, graph = graph_bytes(device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_((x * 2).exp().sum())  # two of 16 MB are there at once
    with PeakMemory(device) as memory:
        graph.replay()
    held = graph_bytes(device) - before
    assert memory.peak_bytes < torch.cuda.memory_allocated(device) + megabyte
    assert 32 * megabyte <= held < 64 * megabyte
    del graph
    torch.cuda.empty_cache()
    assert graph_bytes(device) == before


def test_comparison_rows_hold_ratio_and_note():
    rows = comparison_rows({"step_s": 0.5, "mfu": None, "notes": {"mfu": "unknown GPU"}}, {"step_s": 0.6, "mfu": None})
    by_name = {row["quantity"]: row for row in rows}
    assert by_name["step time"]["ratio"] == pytest.approx(1.2)
    unknown = {"predicted": None, "measured": None, "ratio": None, "note": "unknown GPU"}
    assert by_name["MFU"] == {"quantity": "MFU", "unit": "fraction"} | unknown
    assert by_name["peak memory"]["unit"] == "bytes"


def test_tracker_off_needs_no_wandb(monkeypatch):
    forbid_wandb(monkeypatch)
    tracker = Tracker(TrackingConfig(wandb="off"), "run", {})
    tracker.log({"step": 1, "loss": 2.0})
    tracker.finish()


def test_tracker_without_wandb_names_the_extra(monkeypatch, tmp_path):
    forbid_wandb(monkeypatch)
    with pytest.raises(UserError, match=r"pip install -e '\.\[track\]'"):
        Tracker(TrackingConfig(wandb="offline"), "run", {}, tmp_path)


def forbid_wandb(monkeypatch):
    real_import = builtins.__import__

    def guarded(name, *args, **kwargs):
        if name == "wandb":
            raise ImportError("no wandb")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", guarded)
