"""Mixture of experts: a router sends each token to a few of E stacked SwiGLU experts (Shazeer et al. 2017).

Routing as in Mixtral and Qwen3-MoE: softmax over all experts in float32, the top k kept and, by config, their weights
scaled to sum to 1. Nothing is dropped: each expert takes all tokens that chose it. Balancing losses and expert
parallelism come with roadmap phase 6.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llm.args import ModelConfig
from llm.transformer_layers import Linear, at_least_float32


class MixtureOfExperts(nn.Module):
    """x (B, T, C) -> (B, T, C); expert weights gate_proj and up_proj (E, F, C), down_proj (E, C, F).

    After a forward pass `tokens_per_expert` (E,) int64 holds the load, for the metrics.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        E, F_, C = config.moe.num_experts, config.moe.d_ff, config.d_model
        self.experts_per_token = config.moe.experts_per_token
        self.normalise_top_k = config.moe.normalise_top_k
        self.router = Linear(C, E)
        self.gate_proj = nn.Parameter(torch.empty(E, F_, C))
        self.up_proj = nn.Parameter(torch.empty(E, F_, C))
        self.down_proj = nn.Parameter(torch.empty(E, C, F_))
        self.tokens_per_expert: Tensor | None = None

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (N, C) -> the chosen experts (N, k) int64 and their weights (N, k) float32."""
        probabilities = torch.softmax(at_least_float32(self.router(x)), dim=-1)  # (N, E)
        weights, experts = probabilities.topk(self.experts_per_token, dim=-1)
        if self.normalise_top_k:
            weights = weights / weights.sum(-1, keepdim=True)
        return experts, weights

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        x = x.reshape(-1, C)  # (N, C)
        experts, weights = self.route(x)
        order = torch.argsort(experts.flatten(), stable=True)  # (N*k,), choices grouped by expert
        tokens = order // self.experts_per_token  # the token that each choice came from
        self.tokens_per_expert = torch.bincount(experts.flatten(), minlength=self.router.weight.shape[0])
        inputs = x[tokens].split(self.tokens_per_expert.tolist())
        # Unbound once: the backward of weight[i] fills a gradient as large as all experts, E times over.
        matrices_of_experts = zip(self.gate_proj.unbind(), self.up_proj.unbind(), self.down_proj.unbind(), strict=True)
        outputs = [expert(chunk, *matrices) for chunk, matrices in zip(inputs, matrices_of_experts, strict=True)]
        weighted = torch.cat(outputs) * weights.flatten()[order, None].to(x.dtype)  # (N*k, C)
        return torch.zeros_like(x).index_add(0, tokens, weighted.to(x.dtype)).view(B, T, C)


def expert(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """One expert's SwiGLU on its tokens (n, C), with gate and up (F, C), down (C, F)."""
    hidden = F.silu(F.linear(x, gate)) * F.linear(x, up)  # (n, F)
    return F.linear(hidden, down)  # (n, C)
