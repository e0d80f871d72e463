"""Decoding steps on a CPU in one call: the engine's side of kernel/decode_cpu.

The model's own layers compute the same, operation by operation; they stay in charge of prompts, of experts, of other
dtypes than float32, of swapped products (LoRA, FP8), of ranks that share a layer, and of machines without a compiler.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llm.engine_sampling import Sampled, SamplingMode
from llm.engine_scheduler import Request, StepPlan
from llm.engine_weights import JoinedProjection, torch_normalise
from llm.transformer import RmsNorm, Transformer, TransformerBlock, look_up, normalise, rotate_both
from llm.transformer_layers import Linear, SwiGlu, project_each, silu_times

Place = tuple[nn.Module | None, str]  # a parameter by its module, whose storage may change


def runs_host(model: Transformer, dtype: torch.dtype) -> bool:
    """Whether every layer is one that the library replaces, and the library can be had."""
    weight, config = model.output.weight, model.config
    if weight.device.type != "cpu" or not weight.dtype == dtype == torch.float32 or not has_plain_layers(model):
        return False
    from kernel.decode_cpu import decode_runs

    return decode_runs([config.d_model, config.d_ff, config.num_heads * config.head_dim], config.head_dim)


def has_plain_layers(model: Transformer) -> bool:
    """Whether the model is what its config says: dense blocks without strategies or kernels in their seams."""
    if model.config.moe.num_experts or model.embedding.lookup is not look_up:
        return False
    for module in model.modules():
        if isinstance(module, RmsNorm) and module.normalise not in (normalise, torch_normalise):
            return False
        if isinstance(module, TransformerBlock) and not has_plain_seams(module):
            return False
    return all(layer.matmul is F.linear for layer in linear_layers(model))


def has_plain_seams(block: TransformerBlock) -> bool:
    attention, ffn = block.attention, block.ffn
    together = all(
        module.project is project_each or isinstance(module.project, JoinedProjection) for module in (attention, ffn)
    )
    return together and attention.rotate is rotate_both and isinstance(ffn, SwiGlu) and ffn.activate is silu_times


def linear_layers(model: Transformer) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear)]


class HostSteps:
    """The decoding steps of one EngineRunner."""

    def __init__(self, runner: Any, cos: Tensor, sin: Tensor):
        """cos and sin (max_len, D/2) float32."""
        from kernel.decode_cpu import CpuDecoder, Sizes

        self.runner, self.rope = runner, (cos, sin)
        model, config = runner.model, runner.model.config
        self.decoder = CpuDecoder(Sizes(
            layers=config.num_layers, C=config.d_model, F=config.d_ff, H=config.num_heads, K=config.num_kv_heads,
            D=config.head_dim, V=runner.config.num_ids or config.vocab_size, page_size=runner.config.page_size,
            columns=runner.tables.shape[1], longest=runner.max_len, eps=config.norm_eps,
        ))  # fmt: skip
        self.linears = linear_layers(model)
        self.places = [place for block in model.blocks.values() for place in block_places(block)]
        self.places += [(model.embedding, "weight"), (model.norm, "weight"), (model.output, "weight")]
        self.addresses: list[int] = []
        self.readable = False  # whether what lies at the addresses is float32 and contiguous
        self.model_pointers = self.layer_pointers = np.zeros(0, dtype=np.int64)

    def takes(self, plan: StepPlan) -> bool:
        """Whether a step is one token each, no product has been swapped since and no parameter has another dtype."""
        if plan.segments or not all(layer.matmul is F.linear for layer in self.linears):
            return False
        self.follow_weights()
        return self.readable

    def run(self, requests: list[Request], rows: Tensor) -> Sampled:
        """The next token of each request of a plan that it takes; rows (3, B) as engine_runner.row_numbers has them."""
        mode = SamplingMode.of([request.params.sampling for request in requests])
        on_host = any(r.ngrams is not None or r.params.sampling.repetition_penalty != 1.0 for r in requests)
        temperatures = None
        if not mode.truncates and not on_host:
            temperatures = self.runner.settings.temperature[rows[0]] if mode.draws else torch.zeros(len(requests))
        decoded = self.decoder.step(self.model_pointers, self.layer_pointers, rows, temperatures)
        if temperatures is None:
            return self.runner.sample(decoded.scores, requests, rows)
        return Sampled(decoded.packed, decoded.scores, temperatures, decoded.log_norms)

    def follow_weights(self) -> None:
        """Take the addresses anew where a parameter's storage has changed."""
        addresses = [0 if module is None else module._parameters[name].data_ptr() for module, name in self.places]
        if addresses == self.addresses:
            return
        self.addresses, cache = addresses, self.runner.cache
        tensors = [module._parameters[name] for module, name in self.places if module is not None]
        self.readable = all(tensor.is_contiguous() and tensor.dtype == torch.float32 for tensor in tensors)
        layers = np.array(addresses[:-3], dtype=np.int64).reshape(len(cache.keys), -1)
        pages = [[keys.data_ptr(), values.data_ptr()] for keys, values in zip(cache.keys, cache.values, strict=True)]
        self.layer_pointers = np.concatenate((layers, np.array(pages, dtype=np.int64)), axis=1)
        tables = [tensor.data_ptr() for tensor in (*self.rope, self.runner.tables, self.runner.last_tokens)]
        self.model_pointers = np.array([*addresses[-3:], *tables], dtype=np.int64)


def block_places(block: TransformerBlock) -> list[Place]:
    """Where a block's parameters are, in the order of kernel.decode_cpu.LAYER_POINTERS without the cache."""
    attention, ffn = block.attention, block.ffn
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    biases = [(layer if layer.bias is not None else None, "bias") for layer in projections]
    norms = [(attention.q_norm, "weight"), (attention.k_norm, "weight")]
    return [
        (block.attention_norm, "weight"), *((layer, "weight") for layer in projections), *biases, *norms,
        (attention.o_proj, "weight"), (block.ffn_norm, "weight"),
        *((layer, "weight") for layer in (ffn.gate_proj, ffn.up_proj, ffn.down_proj)),
    ]  # fmt: skip
