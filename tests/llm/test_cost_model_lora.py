"""What a step with adapters needs, beside what torch counts and what it is seen to take."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from llm.args import ModelConfig
from llm.cost_model_counts import Workload, attention_flops_per_token
from llm.cost_model_lora import count_adapters, flops_per_trained_token, lora_memory
from llm.lora import LoraConfig, apply_lora, is_adapter
from llm.loss import CrossEntropyLoss
from llm.metrics_memory import PeakMemory, held_tensors
from llm.optimizer import OptimizerConfig, build_optimizer, clip_gradients
from llm.plan_shapes import meta_params
from llm.transformer import Transformer
from llm.transformer_context import make_context
from llm.transformer_init import initialise, initialise_parameter
from tests.tolerances import MEMORY_RATIO

BASE = ModelConfig(vocab_size=512, max_seq_len=256, d_model=128, num_layers=3, num_heads=4, num_kv_heads=2, d_ff=320)


def build(model: ModelConfig, lora: LoraConfig) -> Transformer:
    built = Transformer(model)
    initialise(built, seed=0)
    apply_lora(built, lora)
    for name, parameter in built.named_parameters():
        if is_adapter(name):
            initialise_parameter(name, parameter, 0, model.num_layers)
    return built


@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"]])
def test_adapters_are_counted(targets):
    lora = LoraConfig(rank=8, targets=targets)
    built = build(BASE, lora)
    counted = sum(parameter.numel() for parameter in built.parameters() if parameter.requires_grad)
    assert counted == count_adapters(BASE, lora)
    params = meta_params(BASE, lora=lora)
    assert [p.name for p in params] == [name for name, _ in built.named_parameters()]
    assert {p.name for p in params if p.trainable} == {p.name for p in params if is_adapter(p.name)}


def test_flops_match_what_torch_counts():
    model, lora, batch, seq_len = replace(BASE, attention="eager"), LoraConfig(rank=8), 2, 32
    built = build(model, lora)
    ids = torch.randint(model.vocab_size, (batch, seq_len))
    with FlopCounterMode(display=False) as counter:
        CrossEntropyLoss()(built(ids), ids).loss_sum.backward()
    masked_half = model.num_layers * attention_flops_per_token(model, seq_len)  # eager computes all of T x T
    wanted = batch * seq_len * (flops_per_trained_token(model, lora, seq_len) + 3 * masked_half)
    assert counter.get_total_flops() == wanted


WORKLOADS = {
    "activations": Workload(BASE, 16, 128),
    "packed, tied": Workload(replace(BASE, tie_embeddings=True), 8, 256, document_masking=True),
    "weights, accumulated": Workload(replace(BASE, d_model=256, d_ff=700), 1, 32, grad_accum_steps=2),
    "bfloat16": Workload(BASE, 16, 128, dtype="bfloat16"),
    "logits": Workload(replace(BASE, vocab_size=8192), 8, 64),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_peak_memory_matches_the_measured_peak(name):
    work, lora = WORKLOADS[name], LoraConfig(rank=8)
    built = build(work.model, lora)
    optimizer = build_optimizer(built.named_parameters(), OptimizerConfig(weight_decay=0.0))
    shape = (work.micro_batch_size, work.seq_len)
    ids = torch.randint(work.model.vocab_size, shape)
    docs = (torch.arange(work.seq_len) // 40).int().expand(shape).contiguous() if work.document_masking else None
    trainable = [parameter for parameter in built.parameters() if parameter.requires_grad]

    def step() -> None:
        for _ in range(work.grad_accum_steps):
            with torch.autocast("cpu", torch.bfloat16, enabled=work.dtype == "bfloat16"):
                sums = CrossEntropyLoss()(built(ids, make_context(ids, None, docs)), ids)
            (sums.loss_sum / sums.num_targets).backward()
            del sums
        clip_gradients(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    with PeakMemory(torch.device("cpu"), [*held_tensors(built, optimizer), ids]) as memory:
        step()
    predicted = lora_memory(work, lora).peak_bytes
    assert abs(memory.peak_bytes / predicted - 1) < MEMORY_RATIO, f"{memory.peak_bytes} measured, {predicted} predicted"
