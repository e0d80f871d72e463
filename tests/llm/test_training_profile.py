"""profile=true: the files of a real run, ranges, memory by category, and nothing left behind."""

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from configs.errors import UserError
from configs.loader import compose_config
from configs.run_dir import read_jsonl
from llm.args import ModelConfig, TrainConfig
from llm.loss import CrossEntropyLoss
from llm.training import train
from llm.training_profile import StepProfiler
from llm.training_profile_allocator import Mark, Replay
from llm.training_profile_breakdown import backward_track, breakdown
from llm.training_profile_memory import Block, MemoryTrace, TensorRecorder
from llm.training_profile_ranges import StepRanges, named_parts
from llm.training_profile_timeline import memory_summary
from llm.training_setup import Trainer, set_up
from llm.transformer import Transformer
from llm.transformer_init import initialise
from parallel.activation_checkpointing import make_checkpoint
from parallel.mesh import init_mesh

MODULES = ["embedding", "blocks.0.attention.q_proj", "blocks.0.attention.rope", "blocks.1.ffn.down_proj", "output"]


def configure(tiny_corpus, runs: Path, *more: str) -> TrainConfig:
    steps = ["max_steps=8", "profile_start=2", "log_every=1"]
    return compose_config(TrainConfig, "training", [*tiny_corpus.overrides(runs), *steps, *more])


def read_gzip(path: Path) -> dict:
    return json.loads(gzip.decompress(path.read_bytes()))


def parameter_bytes(run: Path) -> int:
    return 4 * json.loads((run / "report.json").read_text())["run"]["parameters"]


def kept_recorders(monkeypatch) -> list[TensorRecorder]:
    """A list that every recorder joins when it is read."""
    recorders, trace = [], TensorRecorder.trace
    monkeypatch.setattr(TensorRecorder, "trace", lambda self: recorders.append(self) or trace(self))
    return recorders


@pytest.fixture(scope="module")
def profiled(tiny_corpus, tmp_path_factory) -> Path:
    """The directory of a run of eight steps, of which 3 is a warm-up, 4 and 5 are traced, and 6 is recorded."""
    runs = tmp_path_factory.mktemp("profiled")
    train(configure(tiny_corpus, runs, "profile=true"))
    return runs / "tiny"


def test_the_trace_names_steps_phases_and_modules(profiled):
    events = read_gzip(profiled / "profile" / "trace.json.gz")["traceEvents"]
    annotations = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert annotations >= {"step 4", "step 5", "forward", "backward", "optimizer", "communication", "loss", *MODULES}
    assert "step 3" not in annotations and "step 6" not in annotations
    backward = [event for event in events if event.get("cat") == "backward"]
    assert {event["name"] for event in backward} >= {"loss", *MODULES}
    backward.sort(key=lambda event: event["ts"])
    for one, following in pairwise(backward):
        assert one["ts"] + one["dur"] <= following["ts"] + 1e-3, "ranges of one track do not overlap"
    names = [event["name"] for event in backward]
    order = [names.index(name) for name in ("loss", "output", "blocks.1.ffn.down_proj", "embedding")]
    assert order == sorted(order)


def test_times_by_module_add_up_to_the_step(profiled):
    found = json.loads((profiled / "profile" / "breakdown.json").read_text())
    rows = {row["module"]: row["host_ms"] for row in found["rows"]}
    assert found["steps"] == 2 and found["device"] == "cpu"
    assert sum(sum(times.values()) for times in rows.values()) == pytest.approx(found["step_ms"], rel=1e-6)
    for module in ("loss", "embedding", "output", "norm", "blocks.*.ffn.down_proj", "blocks.*.attention_norm"):
        assert rows[module]["forward"] > 0 and rows[module]["backward"] > 0, module
    assert "aten::mm" in {operation["name"] for operation in found["operations"]}


def test_memory_equals_the_metrics_peak_and_holds_what_the_model_does(profiled):
    memory = json.loads((profiled / "profile" / "memory.json").read_text())
    report = json.loads((profiled / "report.json").read_text())
    assert memory["peak"]["bytes"] == report["measured"]["memory_peak_bytes"]
    assert sum(memory["peak"]["categories"].values()) == memory["peak"]["bytes"]
    parameters, series = parameter_bytes(profiled), memory["categories"]
    buffers = series["weights"][0] - parameters  # RoPE's frequencies
    assert set(series["weights"]) == {parameters + buffers} and 0 < buffers < 100
    assert 2 * parameters <= series["optimizer"][0] < 2.1 * parameters and len(set(series["optimizer"])) == 1
    assert max(series["gradients"]) >= parameters and series["gradients"][0] == series["gradients"][-1] == 0
    assert max(series["activations"]) > 0 and series["activations"][0] == 0
    blocks = [memory["blocks"][place] for place in memory["table"]]
    assert len(blocks) == 20 and [b["bytes"] for b in blocks] == sorted((b["bytes"] for b in blocks), reverse=True)
    assert {"output", "loss"} <= {block["module"] for block in blocks[:4]}, "logits and their gradient are the largest"
    held = {block["name"] for block in blocks if block["category"] == "optimizer"}
    assert held and held <= {"embedding.weight", "output.weight"}
    assert [phase["name"] for phase in memory["phases"]][:4] == ["communication", "data", "forward", "backward"]


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_categories_add_up_to_the_counted_bytes_at_every_change(tiny_corpus, tmp_path, monkeypatch, zero):
    recorders = kept_recorders(monkeypatch)
    layout = [f"parallel.zero={zero}", f"parallel.force={zero > 0}"]
    report = train(configure(tiny_corpus, tmp_path, "profile=true", *layout))
    (recorder,) = recorders
    by_category = recorder.trace().totals()
    assert [sum(values) for values in zip(*by_category.values(), strict=True)] == recorder.counted
    assert max(recorder.counted) == report["measured"]["memory_peak_bytes"] and len(recorder.counted) > 500
    parameters = 4 * report["run"]["parameters"]
    assert max(by_category["weights"]) >= parameters and max(by_category["gradients"]) > parameters / 3
    if zero == 0:  # the second micro-batch's gradient comes beside the first one's
        assert max(by_category["gradients"]) > parameters
    weights = by_category["weights"]
    assert weights[0] == weights[-1] and (max(weights) > weights[0]) == (zero == 3), "units come and go under FSDP"


def hooks_of(trainer: Trainer) -> int:
    """How much of a profile is on a run: hooks, wrapped seams, hooks of parameters, the step's phases."""
    modules = [*trainer.model.modules(), trainer.loss]
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules)
    wrapped = sum(getattr(value, "__name__", "") == "ranged" for module in modules for value in vars(module).values())
    on_parameters = sum(len(param._backward_hooks or ()) for param in trainer.model.parameters())
    return hooks + wrapped + on_parameters + (trainer.training_step.phase.__name__ != "nullcontext")


@pytest.mark.parametrize("profile", [False, True])
def test_hooks_are_there_for_the_profiled_steps_alone(tiny_corpus, tmp_path, profile):
    trainer = set_up(configure(tiny_corpus, tmp_path, f"profile={profile}"), init_mesh("cpu"))
    counts, losses = [], []
    with StepProfiler(trainer) as profiler:
        for step in range(8):
            with profiler.step():
                counts.append(hooks_of(trainer))
                losses.append(trainer.training_step.run(step, trainer.micro_batches()).loss_sum.item())
            profiler.count()
            trainer.step += 1
    assert [count > 0 for count in counts] == [False, False, *([profile] * 4), False, False]
    assert hooks_of(trainer) == 0 and (tmp_path / "tiny" / "profile").exists() == profile
    if profile:
        plain = set_up(configure(tiny_corpus, tmp_path, "name=plain"), init_mesh("cpu"))
        for step, loss in enumerate(losses):
            assert plain.training_step.run(step, plain.micro_batches()).loss_sum.item() == loss
            plain.step += 1


def test_profiled_steps_do_not_count_as_throughput(profiled):
    lines = {line["step"]: line for line in read_jsonl(profiled / "metrics.jsonl") if "loss" in line}
    assert [step for step, line in lines.items() if line["tokens_per_s"] is None] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["max_steps=5"], "takes profile_start . profile_steps . 2 = 6 steps, but 5 are left"),
        (["profile_start=1"], "must be at least 2"),
        (["profile_steps=0"], "must be positive"),
        (["profile_tool=nsys"], "needs a CUDA device"),
        (["profile_tool=perf"], "profile_tool"),
    ],
)
def test_what_cannot_be_profiled_is_refused(tiny_corpus, tmp_path, change, words):
    with pytest.raises(UserError, match=words) as caught:
        train(configure(tiny_corpus, tmp_path, "profile=true", *change))
    assert "\n" not in str(caught.value)


class Heard:
    """A sink that writes down what it is told."""

    def __init__(self) -> None:
        self.open, self.calls, self.phases = [], [], set()
        self.ranges: StepRanges | None = None

    def push(self, name: str) -> None:
        self.open.append(name)
        self.calls.append("/".join(self.open))
        self.phases.add(self.ranges.where[0])

    def pop(self) -> None:
        self.open.pop()

    def backward(self, module: str | None) -> None:
        self.calls.append(f"<{module}>")


def heard_in_a_step(model: Transformer, compile_mode: str = "none", sink: Heard | None = None) -> list[str]:
    sink, loss = sink or Heard(), CrossEntropyLoss()
    ranges = sink.ranges = StepRanges([sink])
    ranges.attach(named_parts(model, loss), compile_mode)
    token_ids = torch.arange(8).view(1, 8)
    with ranges.phase("forward"):
        sums = loss(model(token_ids), token_ids)
    with ranges.phase("backward"):
        sums.loss_sum.backward()
    ranges.detach()
    assert not sink.open and not ranges.modules and not ranges.phases, "every range that began has ended"
    return sink.calls


@pytest.fixture
def model() -> Transformer:
    model = Transformer(ModelConfig(vocab_size=16, max_seq_len=8, d_model=8, num_layers=2, num_heads=2, d_ff=8))
    initialise(model, seed=0)
    return model


def test_a_compiled_block_is_one_range(model):
    for block in model.blocks.values():
        block.compile(backend="aot_eager")
    calls = heard_in_a_step(model, "block")
    assert [call for call in calls if "blocks." in call] == [
        "forward/model/blocks.0", "forward/model/blocks.1", "<blocks.1>", "<blocks.0>",
    ]  # fmt: skip
    assert calls[-2:] == ["<embedding>", "<None>"]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_modules_are_ranges_within_backward(model, mode):
    sinks = Heard(), Heard()
    plain = heard_in_a_step(model, sink=sinks[0])
    for block in model.blocks.values():
        block.checkpoint = make_checkpoint(mode)
    calls = heard_in_a_step(model, sink=sinks[1])
    assert sinks[0].phases == {"forward", "backward"} and sinks[1].phases == {"forward", "backward", "recomputation"}
    forward = [call for call in plain if call.startswith("forward")]
    assert [call for call in calls if call.startswith("forward")] == forward
    assert "backward/blocks.0.attention/blocks.0.attention.project/blocks.0.attention.q_proj" in calls
    assert not any(call.startswith("backward/") for call in plain)


def test_backward_comes_to_the_modules_in_the_opposite_order(model):
    calls = heard_in_a_step(model)
    backward = [call[1:-1] for call in calls if call.startswith("<blocks.1.")]
    first = [name for place, name in enumerate(backward) if name not in backward[:place]]
    assert first == [
        f"blocks.1.{name}" for name in (
            "ffn.down_proj", "ffn.activate", "ffn.up_proj", "ffn.gate_proj", "ffn_norm", "attention.o_proj",
            "attention", "attention.attend", "attention.rope", "attention.v_proj", "attention.k_proj",
            "attention.q_proj", "attention_norm",
        )
    ]  # fmt: skip


def event(action: str, address: int, size: int, time_us: float) -> dict:
    return {"action": action, "addr": address, "size": size, "time_us": time_us}


def test_a_replay_gives_blocks_their_module_and_owner():
    live = [(1000, 100), (5000, 40)]  # address and bytes; held before
    places = [(7, ("forward", "blocks.0")), (8, ("forward", "output")), (9, ("backward", "output"))]
    marks = [
        Mark(7, 1050, "weights", "w"),
        Mark(8, 2000, "optimizer", "s"),
        Mark(9, 2000, "gradients", "w"),
        Mark(9, 9999, "weights", "nobody"),
    ]
    replay = Replay(live, 7, places, marks)
    for one in (
        event("alloc", 2000, 64, 10.0), event("free_requested", 2000, 64, 11.0), event("alloc", 2000, 30, 12.0),
        event("free_requested", 777, 8, 13.0), event("alloc", 3000, 5, 14.0), event("free_requested", 5000, 40, 15.0),
    ):  # fmt: skip
        replay.take(one)
    described = [(b.nbytes, b.category, b.where[1], b.born, b.died) for b in replay.blocks]
    assert described == [
        (100, "weights", None, 0, None), (40, "other", None, 0, 5), (64, "optimizer", "blocks.0", 1, 2),
        (30, "gradients", "output", 3, None), (5, "backward", "output", 4, None),
    ]  # fmt: skip
    assert replay.allocations == 10
    totals = MemoryTrace("test", replay.blocks, [0.0, *replay.times_us]).totals()
    assert [sum(values) for values in zip(*totals.values(), strict=True)] == [140, 204, 140, 170, 175, 135]


def test_a_long_timeline_keeps_its_peak():
    blocks = [Block(10, 0, owner="weights", name="w")]
    blocks += [Block(1 + index % 7, index, ("forward", "m"), died=index + 1) for index in range(1, 20_000)]
    blocks.append(Block(500, 12_345, ("backward", "spike"), died=12_346))
    summary = memory_summary(MemoryTrace("test", blocks, [float(index) for index in range(20_001)]))
    totals = [sum(values) for values in zip(*summary["categories"].values(), strict=True)]
    assert len(totals) <= 602 and max(totals) == summary["peak"]["bytes"] == 510 + 1 + 12_345 % 7
    place = totals.index(max(totals))
    assert summary["times_ms"][place] == 12_345_000 == summary["peak"]["ms"]
    assert [summary["blocks"][block]["module"] for block in summary["largest"][place]] == ["spike", None, "m"]


def host(name: str, ts: float, dur: float, cat: str = "user_annotation", tid: int = 1, **args) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": args}


def test_kernels_count_for_the_range_that_launched_them():
    events = [
        host("step 1", 0, 1000), host("forward", 0, 300), host("blocks.0", 10, 100), host("blocks.1", 120, 100),
        host("aten::mm", 20, 50, "cpu_op"), host("cudaLaunchKernel", 30, 10, "cuda_runtime", correlation=1),
        host("cuLaunchKernelEx", 130, 10, "cuda_driver", correlation=2),
        host("backward", 300, 500),  # the host waits, and autograd's thread works
        host("autograd::engine::evaluate_function: Mm", 310, 100, "cpu_op", tid=2),
        host("backward of blocks.1", 312, 1, tid=2),
        host("cudaLaunchKernel", 320, 10, "cuda_runtime", tid=2, correlation=3),
        host("cudaLaunchKernel", 500, 10, "cuda_runtime", tid=2, correlation=4),
        host("backward of -", 600, 1, tid=2), host("optimizer", 850, 100),
        host("cudaLaunchKernel", 860, 10, "cuda_runtime", correlation=5),
        host("gemm", 100, 200, "kernel", 7, correlation=1), host("gemm", 300, 50, "kernel", 7, correlation=2),
        host("gemm", 350, 100, "kernel", 7, correlation=3), host("ncclDevKernel", 400, 100, "kernel", 8, correlation=4),
        host("adamw", 900, 90, "kernel", 7, correlation=5), host("stray", 900, 90, "kernel", 7, correlation=6),
    ]  # fmt: skip
    found = breakdown(events, ["blocks.0", "blocks.1"])
    device = {row["module"]: row["device_ms"] for row in found["rows"]}
    assert device["blocks.*"] == pytest.approx({"forward": 0.25, "backward": 0.1})
    assert device["(communication)"] == pytest.approx({"communication": 0.1})
    assert device["(optimizer)"] == pytest.approx({"optimizer": 0.09})
    assert found["busy_ms"] == pytest.approx(0.49) and found["step_ms"] == 1.0 and found["device"] == "cuda"
    assert sum(sum(row["host_ms"].values()) for row in found["rows"]) == pytest.approx(1.0)
    assert found["operations"][0] == {"name": "gemm", "calls": 3, "ms": pytest.approx(0.35)}
    drawn = [e for e in backward_track(events, ["blocks.0", "blocks.1"]) if e["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"]) for e in drawn] == [("blocks.1", 312, 288)]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["none", "block"])
def test_a_profile_on_the_gpu(tiny_corpus, tmp_path, mode):
    config = configure(tiny_corpus, tmp_path, "profile=true", "device=cuda", f"compile={mode}")
    train(config)
    profile = tmp_path / "tiny" / "profile"
    events = read_gzip(profile / "trace.json.gz")["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
    block = "blocks.0" if mode == "block" else "blocks.0.ffn.down_proj"
    annotations = {e["name"] for e in events if e.get("cat") == "user_annotation"}
    assert annotations >= {"forward", "backward", "optimizer", block}
    assert block in {e["name"] for e in events if e.get("cat") == "backward"}
    found = json.loads((profile / "breakdown.json").read_text())
    rows = {row["module"]: row["device_ms"] for row in found["rows"]}
    kind = "blocks.*" if mode == "block" else "blocks.*.ffn.down_proj"
    assert found["device"] == "cuda" and rows[kind]["forward"] > 0 and rows[kind]["backward"] > 0
    assert 0 < found["busy_ms"] <= 1.01 * found["step_ms"]
    memory = json.loads((profile / "memory.json").read_text())
    assert memory["peak"]["bytes"] == memory["measured"]["requested_peak_bytes"]
    assert memory["peak"]["bytes"] <= memory["measured"]["allocated_peak_bytes"]
    parameters, series = parameter_bytes(tmp_path / "tiny"), memory["categories"]
    assert parameters <= min(series["weights"]) and max(series["weights"]) < 1.1 * parameters
    assert 2 * parameters <= series["optimizer"][0] < 2.1 * parameters
    assert parameters <= max(series["gradients"]) and series["gradients"][-1] == 0
    modules = {block["module"] for block in memory["blocks"]}
    assert modules & {"output", "loss"}, f"the logits are among the largest blocks; here are those of {modules}"
    assert (profile / "memory_snapshot.pickle").stat().st_size > 0
    assert read_gzip(profile / "memory_snapshot.json.gz")["segments"]


@pytest.mark.gpu
def test_ranges_for_nsight_systems_leave_no_trace(tiny_corpus, tmp_path):
    report = train(configure(tiny_corpus, tmp_path, "profile=true", "device=cuda", "profile_tool=nsys"))
    assert report["state"] == "finished"
    assert not (tmp_path / "tiny" / "profile" / "trace.json.gz").exists()
    assert (tmp_path / "tiny" / "profile" / "memory.json").exists()
