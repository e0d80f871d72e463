"""Initial weights that know no layout: each element is drawn from (seed, its parameter's name, its place) alone.

Any split of the model over devices therefore starts from the same weights, and a rank draws only the part that it
holds. Matrices are normal with std 0.02; those that write to the residual stream have 0.02 / sqrt(2 L), so that its
variance does not grow with depth (GPT-2). A fresh model's loss is then ln V + 0.0002 C: the logits have variance
0.0004 C, of which half adds to the loss.
"""

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from llm.args import ModelConfig
from llm.transformer import RoPE, Transformer

STD = 0.02
RESIDUAL_OUTPUTS = ("o_proj", "down_proj")
BLOCK_ELEMENTS = 1 << 18  # drawn by one generator; a part of a parameter costs at most two blocks more than it holds


def parameter_std(name: str, num_layers: int) -> float:
    """The standard deviation of a matrix's initial weights, by its name."""
    return STD / math.sqrt(2 * num_layers) if any(part in RESIDUAL_OUTPUTS for part in name.split(".")) else STD


def parameter_generator(seed: int, name: str, block: int = 0) -> torch.Generator:
    """A CPU generator for one block of one parameter, the same on every rank and device."""
    digest = hashlib.sha256(f"{seed}/{name}".encode() + (f"/{block}".encode() if block else b"")).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@torch.no_grad()
def initialise_range(name: str, shape: tuple[int, ...], start: int, flat: Tensor, seed: int, num_layers: int) -> None:
    """Fill `flat` (n,) with elements start .. start + n of the flattened parameter: norms 1, biases 0, matrices normal.

    Nothing larger than a block is held besides.
    """
    if name.endswith(("bias", "lora_b")):
        flat.zero_()
        return
    if len(shape) == 1:
        flat.fill_(1.0)
        return
    total, stop, std = math.prod(shape), start + flat.numel(), parameter_std(name, num_layers)
    if name.endswith("lora_a"):
        std = 1.0 / math.sqrt(3.0 * shape[1])  # the variance that Hu et al.'s code draws it with
    for block in range(start // BLOCK_ELEMENTS, -(-stop // BLOCK_ELEMENTS)):
        begin = block * BLOCK_ELEMENTS
        values = torch.empty(min(BLOCK_ELEMENTS, total - begin), dtype=torch.float32)
        values.normal_(0.0, std, generator=parameter_generator(seed, name, block))
        first, last = max(start, begin), min(stop, begin + values.numel())
        flat[first - start : last - start].copy_(values[first - begin : last - begin])


@torch.no_grad()
def initialise_parameter(name: str, parameter: Tensor, seed: int, num_layers: int) -> None:
    """Fill one whole parameter in place."""
    assert parameter.is_contiguous(), f"{name} has strides {parameter.stride()} of shape {tuple(parameter.shape)}"
    initialise_range(name, tuple(parameter.shape), 0, parameter.view(-1), seed, num_layers)


def initialise(model: nn.Module, seed: int) -> None:
    """Fill every parameter of a Transformer in place, several at a time: no draw depends on another."""

    def draw(named: tuple[str, Tensor]) -> None:
        initialise_parameter(*named, seed, model.config.num_layers)

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # drawing leaves Python's lock
        list(threads.map(draw, model.named_parameters()))


def transformer_on_meta(config: ModelConfig) -> Transformer:
    """The model with shapes but without memory, for a strategy that makes each part where it belongs."""
    with torch.device("meta"):
        model = Transformer(config)
    model.rope = RoPE(config.head_dim, config.rope_theta, config.rope_scaling)  # its table is computed, not loaded
    return model
