"""Initial weights that know no layout: each parameter is drawn from (seed, its name) alone.

Any split of the model over devices therefore starts from the same weights. Matrices are normal with std 0.02; those
that write to the residual stream have 0.02 / sqrt(2 L), so that its variance does not grow with depth (GPT-2). A
fresh model's loss is then ln V + 0.0002 C: the logits have variance 0.0004 C, of which half adds to the loss.
"""

import hashlib
import math

import torch
from torch import Tensor, nn

STD = 0.02
RESIDUAL_OUTPUTS = ("o_proj", "down_proj")


def parameter_std(name: str, num_layers: int) -> float:
    """The standard deviation of a matrix's initial weights, by its name."""
    return STD / math.sqrt(2 * num_layers) if any(part in RESIDUAL_OUTPUTS for part in name.split(".")) else STD


def parameter_generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator for one parameter, the same on every rank and device."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@torch.no_grad()
def initialise_parameter(name: str, parameter: Tensor, seed: int, num_layers: int) -> None:
    """Fill one parameter in place: norms 1, biases 0, matrices normal."""
    if name.endswith("bias"):
        parameter.zero_()
    elif parameter.ndim == 1:
        parameter.fill_(1.0)
    else:
        values = torch.empty(parameter.shape, dtype=torch.float32)
        values.normal_(0.0, parameter_std(name, num_layers), generator=parameter_generator(seed, name))
        parameter.copy_(values)


def initialise(model: nn.Module, seed: int) -> None:
    """Fill every parameter of a Transformer in place."""
    for name, parameter in model.named_parameters():
        initialise_parameter(name, parameter, seed, model.config.num_layers)
