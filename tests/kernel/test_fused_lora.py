"""Adapters over frozen weights with the fused kernels: gradients as with plain PyTorch, and none for what is frozen."""

import torch

from llm.args import KernelsConfig
from llm.lora import LoraConfig, apply_lora, is_adapter
from tests.kernel.fused_reference import relative_error
from tests.kernel.test_fused_model import FUSED, batches, loss_of, make
from tests.tolerances import FP32_GRADIENT


def adapted(kernels: KernelsConfig, variant: str, attention: str):
    model = make(kernels, variant, attention=attention)
    apply_lora(model, LoraConfig(rank=4))
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def test_gradients_of_adapters_match_plain_pytorch():
    batch = batches(2)[1]  # packed documents
    for variant in ("plain", "qwen3"):
        models = [adapted(KernelsConfig(), variant, "sdpa"), adapted(FUSED, variant, "triton")]
        for model, kernels in zip(models, (KernelsConfig(), FUSED), strict=True):
            loss_of(model, kernels, batch).backward()
        for (name, fused), plain in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
            if is_adapter(name):
                assert relative_error(fused.grad, plain.grad.double()) < 10 * FP32_GRADIENT, f"{variant} {name}"
            else:
                assert fused.grad is None and plain.grad is None, f"{variant} {name}"
