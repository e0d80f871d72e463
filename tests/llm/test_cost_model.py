"""The cost model against the built module, torch's FLOP counter, autograd's saved tensors and measured memory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.flop_counter import FlopCounterMode

from configs.loader import CONFIG_DIR, compose_config, load_config
from llm.args import ModelConfig, MoeConfig, TrainConfig
from llm.cost_model import (
    Workload,
    count_parameters,
    forward_flops_per_token,
    predict_memory,
    predict_run,
    predict_step_time,
    train_flops_per_token,
)
from llm.cost_model_counts import attention_flops_per_token, workload_of
from llm.cost_model_memory import block_activation_bytes
from llm.hardware import Hardware
from llm.hardware_calibration import Rates, interpolate, pass_time
from llm.loss import CrossEntropyLoss
from llm.metrics_memory import PeakMemory, held_tensors
from llm.optimizer import OptimizerConfig, build_optimizer, clip_gradients
from llm.transformer import Transformer
from llm.transformer_context import make_context
from llm.transformer_init import initialise
from tests.tolerances import MEMORY_RATIO

MODEL_FILES = sorted(Path(CONFIG_DIR, "model").glob("*.yaml"))
# The models' cards and their safetensors metadata.
PUBLISHED = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-math-1.5b": 1_543_714_304,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
}
BASE = ModelConfig(vocab_size=512, max_seq_len=64, d_model=64, num_layers=3, num_heads=4, d_ff=160)
SHAPES = {
    "plain": BASE,
    "gqa": replace(BASE, num_kv_heads=2),
    "tied": replace(BASE, tie_embeddings=True),
    "qwen": replace(BASE, num_kv_heads=2, qkv_bias=True, qk_norm=True, head_dim=32),
    "moe": replace(BASE, moe=MoeConfig(num_experts=4, experts_per_token=2, d_ff=48)),
    "eager": replace(BASE, attention="eager"),
    "eager gqa": replace(BASE, attention="eager", num_kv_heads=2),
}


def read_model(name: str) -> ModelConfig:
    return load_config(ModelConfig, OmegaConf.load(f"{CONFIG_DIR}/model/{name}.yaml")).with_vocab_of(2)


@pytest.mark.parametrize("path", MODEL_FILES, ids=lambda path: path.stem)
def test_every_model_file_composes_and_counts_as_the_built_module(path):
    overrides = [f"model={path.stem}", "name=x", "data.tokens=x", "data.tokenizer=x", "data.seq_len=64"]
    model = compose_config(TrainConfig, "training", overrides).model.with_vocab_of(2)
    with torch.device("meta"):
        built = Transformer(model)
    assert count_parameters(model).total == sum(parameter.numel() for parameter in built.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_match_the_published_counts(name):
    assert count_parameters(read_model(name)).total == PUBLISHED[name]


def test_active_parameters_match_the_published_counts():
    assert round(count_parameters(read_model("mixtral-8x7b")).active / 1e9, 1) == 12.9
    assert round(count_parameters(read_model("qwen3-30b-a3b")).active / 1e9, 1) == 3.4  # "3.3B", embeddings included
    assert count_parameters(BASE).active == count_parameters(BASE).total


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_by_part_match_the_module(name):
    model = SHAPES[name]
    built, count = Transformer(model), count_parameters(model)
    parts = {"embedding": 0, "attention": 0, "ffn": 0, "norms": 0, "output": 0}
    for parameter_name, parameter in built.named_parameters():
        last = parameter_name.split(".")[-2]
        inside = parameter_name.split(".")[2:3]
        part = "norms" if last.endswith("norm") else inside[0] if parameter_name.startswith("blocks") else last
        parts[part] += parameter.numel()
    assert parts == {part: getattr(count, part) for part in parts}


@pytest.mark.parametrize("name", SHAPES)
def test_flops_match_torch_flop_counter(name):
    model = replace(SHAPES[name], attention="eager")  # whose products torch counts whole: twice the causal half
    built = Transformer(model)
    initialise(built, seed=0)
    batch, seq_len = 2, 32
    token_ids = torch.randint(model.vocab_size, (batch, seq_len))
    with FlopCounterMode(display=False) as forward:
        loss = CrossEntropyLoss()(built(token_ids), token_ids).loss_sum
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    masked_half = model.num_layers * attention_flops_per_token(model, seq_len)
    tokens = batch * seq_len
    assert forward.get_total_flops() == tokens * (forward_flops_per_token(model, seq_len) + masked_half)
    total = forward.get_total_flops() + backward.get_total_flops()
    assert total == tokens * (train_flops_per_token(model, seq_len) + 3 * masked_half)


def forward_sums(work: Workload, model: Transformer, token_ids: torch.Tensor):
    doc_ids = positions = None
    if work.document_masking:
        doc_ids = (torch.arange(work.seq_len) // 16).int().expand(work.micro_batch_size, -1)
        positions = (torch.arange(work.seq_len) % 16).expand(work.micro_batch_size, -1)
    with torch.autocast("cpu", torch.bfloat16, enabled=work.dtype == "bfloat16"):
        return CrossEntropyLoss()(model(token_ids, make_context(token_ids, positions, doc_ids)), token_ids)


def saved_bytes(work: Workload, num_layers: int) -> int:
    """Bytes of every storage that autograd keeps for backward, parameters excepted."""
    model = Transformer(replace(work.model, num_layers=num_layers))
    initialise(model, seed=0)
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address comes twice
        return tensor

    token_ids = torch.randint(work.model.vocab_size, (work.micro_batch_size, work.seq_len))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward_sums(work, model, token_ids)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_block_saves_what_autograd_saves(name, dtype):
    work = Workload(SHAPES[name], micro_batch_size=2, seq_len=64, dtype=dtype)
    assert saved_bytes(work, 2) - saved_bytes(work, 1) == pytest.approx(block_activation_bytes(work), rel=0.01)


WORKLOADS = {name: Workload(model, micro_batch_size=8, seq_len=64) for name, model in SHAPES.items()} | {
    "accumulation": Workload(BASE, 8, 64, grad_accum_steps=3),
    "muon": Workload(BASE, 1, 16, optimizer="muon"),
    "sgd": Workload(BASE, 2, 16, optimizer="sgd"),
    "small batch": Workload(BASE, 1, 16),
    "tied small batch": Workload(SHAPES["tied"], 1, 16),
    "tied accumulation": Workload(replace(SHAPES["tied"], vocab_size=4096), 1, 8, grad_accum_steps=2, optimizer="sgd"),
    "experts": Workload(replace(BASE, moe=MoeConfig(8, 2, 64)), 1, 32),
    "documents": Workload(BASE, 8, 64, document_masking=True),
    "bfloat16": Workload(BASE, 8, 64, dtype="bfloat16"),
    "wide ffn": Workload(replace(BASE, vocab_size=64, d_ff=512), 8, 64),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_peak_memory_matches_the_measured_peak(name):
    work = WORKLOADS[name]
    model = Transformer(work.model)
    initialise(model, seed=0)
    optimizer = build_optimizer(model.named_parameters(), OptimizerConfig(name=work.optimizer, weight_decay=0.0))
    token_ids = torch.randint(work.model.vocab_size, (work.micro_batch_size, work.seq_len))

    def step() -> None:
        for _ in range(work.grad_accum_steps):
            sums = forward_sums(work, model, token_ids)
            (sums.loss_sum / sums.num_targets).backward()
            del sums
        clip_gradients(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    with PeakMemory(torch.device("cpu"), [*held_tensors(model, optimizer), token_ids]) as memory:
        step()
    predicted = predict_memory(work).peak_bytes
    assert abs(memory.peak_bytes / predicted - 1) < MEMORY_RATIO, f"{memory.peak_bytes} measured, {predicted} predicted"


def test_memory_of_a_device_grows_with_bfloat16_copies_and_shrinks_compiled():
    work = Workload(read_model("gpt-124m"), 8, 1024, device="cuda", dtype="bfloat16")
    compiled = replace(work, compile="model")
    assert predict_memory(compiled).peak_bytes < predict_memory(work).peak_bytes
    two_ranks = predict_memory(replace(work, world_size=2, micro_batch_size=1, seq_len=8))
    assert two_ranks.phases_bytes["gradient all-reduce"] == pytest.approx(
        two_ranks.phases_bytes["optimizer"], rel=1e-3
    )  # a flat buffer as large as the gradients, AdamW's denominators as large as the parameters


# A device with round numbers: every product 1 GFLOP/s, every pass 1 GB/s.
FLAT = ((1.0, 1e9),)
PASS = ((1.0, 1e-9), (1e9, 1.0))
RATES = Rates(FLAT, PASS, PASS, PASS, ((32, FLAT, FLAT),), bf16_matmul=1e9, op_overhead_s=1e-5)


def test_matmul_and_attention_time_are_flops_over_the_rate():
    work = Workload(BASE, 2, 64, device="cuda", dtype="bfloat16", grad_accum_steps=3)
    step = predict_step_time(work, RATES)
    assert step.matmul_s + step.attention_s == pytest.approx(step.flops / 1e9)
    assert step.flops == 3 * 128 * train_flops_per_token(BASE, 64)
    assert step.tokens_per_s == pytest.approx(3 * 128 / step.step_s)


def test_a_gpu_waits_for_its_host_when_the_batch_is_small():
    work = Workload(BASE, 1, 4, device="cuda", dtype="bfloat16")
    slow_host = predict_step_time(work, replace(RATES, op_overhead_s=1.0))
    assert slow_host.bound == "host" and slow_host.step_s == slow_host.host_s
    assert predict_step_time(replace(work, device="cpu"), RATES).host_s == 0.0


def test_interpolation_is_straight_on_logarithmic_axes():
    points = ((10.0, 1.0), (1000.0, 100.0))
    assert interpolate(points, 100.0) == pytest.approx(10.0)
    assert interpolate(points, 1.0) == 1.0 and interpolate(points, 1e6) == 100.0
    assert pass_time(points, 10_000.0) == pytest.approx(1000.0)  # ten times the largest size takes ten times as long


def test_predict_run_says_everything_in_json_numbers():
    import json

    overrides = ["name=x", "data.tokens=x", "data.tokenizer=x", "data.seq_len=128", "global_batch_tokens=8192"]
    config = compose_config(TrainConfig, "training", [*overrides, "model.vocab_size=512"])
    hardware = Hardware("cpu", "cpu", "test", None, 2e9, 1e10, None, "", RATES)
    predicted = json.loads(json.dumps(predict_run(config, hardware, world_size=2)))
    work = workload_of(config, "cpu", world_size=2)
    assert (work.tokens, work.grad_accum_steps, work.global_tokens) == (8 * 128, 4, 8192)
    flops = train_flops_per_token(config.model, 128)
    assert predicted["mfu"] == pytest.approx(flops * predicted["tokens_per_s"] / 4e9)
    unknown = predict_run(config, replace(hardware, fp32_flops=None, note="add it"), world_size=2)
    assert unknown["mfu"] is None and unknown["notes"]["mfu"] == "add it"
