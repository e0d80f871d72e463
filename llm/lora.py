"""Low-rank adaptation (Hu et al. 2021): a frozen Linear and a product of two thin matrices beside it, which learn.

    y = x W^T + (alpha / rank) (x A^T) B^T        A (rank, in), B (out, rank), B = 0 at the start

A and B are parameters of the Linear itself (`q_proj.lora_a`, `q_proj.lora_b`), so names of other parameters stay, and
the product goes through the seam `matmul`, around whatever stands in it. The first strategy that llm/parallelize
applies. `merge` makes plain weights of a model's tensors again, W + (alpha / rank) B A: what generates, evaluates or
exports never sees adapters. No dropout: a step must be the same in every layout.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configs.errors import UserError, check_positive
from llm.transformer_layers import Linear

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FACTORS = ("lora_a", "lora_b")


@dataclass
class LoraConfig:
    """rank 0: no adapters, every weight learns. targets: the projections of a block that get one."""

    rank: int = 0
    alpha: float = 32.0  # the adapters' product counts alpha / rank times
    targets: list[str] = field(default_factory=lambda: list(PROJECTIONS))

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise UserError(f"lora.rank={self.rank} must not be negative; use 0 for no adapters")
        check_positive(**{"lora.alpha": self.alpha})
        unknown = sorted(set(self.targets) - set(PROJECTIONS))
        if unknown or not self.targets:
            raise UserError(f"lora.targets={self.targets} must name some of {', '.join(PROJECTIONS)}")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class LowRank:
    """What stands in a Linear's `matmul`: the product that stood there, and the adapters' beside it."""

    def __init__(self, inner: Callable, layer: Linear, scale: float):
        self.inner, self.layer, self.scale = inner, layer, scale

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        narrow = self.scale * F.linear(x, self.layer.lora_a)  # (..., rank): scaled where it is thin
        return self.inner(x, weight, bias) + F.linear(narrow, self.layer.lora_b)


def apply_lora(model: nn.Module, config: LoraConfig) -> nn.Module:
    """Freeze a Transformer and give the target projections adapters, in place; their values are not written yet.

    UserError when no module is a target (experts are no Linear of their own).
    """
    if config.rank == 0:
        return model
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    layers = [layer for name, layer in model.blocks.named_modules() if name.rpartition(".")[2] in config.targets]
    layers = [layer for layer in layers if isinstance(layer, Linear)]
    if not layers:
        raise UserError(f"lora.targets={config.targets} names no projection of this model; attention has q_proj, ...")
    for layer in layers:
        out_features, in_features = layer.weight.shape
        if config.rank > min(out_features, in_features):
            raise UserError(
                f"lora.rank={config.rank} is more than a projection of {in_features} to {out_features} features has; "
                f"lower it"
            )
        layer.lora_a = nn.Parameter(layer.weight.new_empty(config.rank, in_features))
        layer.lora_b = nn.Parameter(layer.weight.new_empty(out_features, config.rank))
        layer.matmul = LowRank(layer.matmul, layer, config.scale)
    return model


def is_adapter(name: str) -> bool:
    return name.rpartition(".")[2] in FACTORS


@torch.no_grad()
def merge(tensors: Mapping[str, Tensor], config: LoraConfig) -> dict[str, Tensor]:
    """Named tensors of a model with adapters -> those of the plain model, in the weights' dtypes.

    Names may have a prefix (a checkpoint's "model/"). The product is made in float32 or better. Without adapters among
    them they come back as they are.
    """
    plain = {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}
    for name, a in tensors.items():
        layer, _, factor = name.rpartition(".")
        if factor == "lora_a":
            weight, b = tensors[f"{layer}.weight"], tensors[f"{layer}.lora_b"]
            wide = torch.promote_types(weight.dtype, torch.float32)
            update = config.scale * (b.to(wide) @ a.to(wide))  # (out, in)
            plain[f"{layer}.weight"] = (weight.to(wide) + update).to(weight.dtype)
    return plain
