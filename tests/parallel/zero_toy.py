"""A small float64 model with what makes sharding hard, its steps on one process, and the same steps on ranks.

Parameters of 7, 13, 1 and 91 elements, a tied embedding, stacked experts, one parameter without any gradient, one whose
gradient is missing on all ranks but the first, one that is frozen; as many targets as it happens, by rank and
micro-batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llm.optimizer import OptimizerConfig, build_optimizer, set_learning_rate
from parallel.clipping import gradient_norm, scale_gradients

VOCAB, WIDTH, STEPS, MICRO_BATCHES, CLIP_NORM = 7, 13, 5, 2, 0.5
TARGETS = (11, 3, 6, 2)  # of each rank's micro-batches


@dataclass(frozen=True)
class Case:
    """One run: which optimizer, and what of the strategy it is about."""

    optimizer: str = "adamw"
    steps: int = STEPS
    clip_norm: float = CLIP_NORM
    dtype: torch.dtype = torch.float64


class Block(nn.Module):
    """x (T, C) -> (T, C), through matrices of both orientations, a vector, and experts (E, F, C)."""

    def __init__(self, parameter):
        super().__init__()
        self.q_proj = nn.Linear(1, 1, bias=False)
        self.q_proj.weight = parameter(WIDTH, WIDTH)
        self.up_proj, self.down_proj = parameter(5, WIDTH), parameter(WIDTH, 5)
        self.scale, self.experts = parameter(WIDTH), parameter(3, 4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.q_proj(x)) * self.scale
        x = x + torch.tanh(x @ self.up_proj.T) @ self.down_proj.T
        mixed = [torch.tanh(x @ self.experts[index].T) @ self.experts[index] for index in range(3)]
        return x + 0.1 * sum(mixed)


class Toy(nn.Module):
    """token ids (T,) -> logits (T, V)."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))

        self.embedding = nn.Embedding(1, 1)
        self.output = nn.Linear(1, 1, bias=False)
        self.embedding.weight = self.output.weight = parameter(VOCAB, WIDTH)
        self.blocks = nn.ModuleDict({str(layer): Block(parameter) for layer in range(3)})
        self.one, self.never, self.sometimes = parameter(1), parameter(7), parameter(WIDTH)
        self.frozen = parameter(VOCAB, 2).requires_grad_(False)
        self.register_buffer("counter", torch.full((3,), float(seed)))

    def forward(self, token_ids: Tensor, use_sometimes: bool) -> Tensor:
        x = self.embedding(token_ids)
        for block in self.blocks.values():
            x = block(x)
        x = x + self.sometimes if use_sometimes else x
        return self.output(x) * self.one + self.frozen.sum()


def share_of_loss(model: nn.Module, rank: int, world_size: int, micro_batch: int) -> Tensor:
    """A micro-batch's share of the mean over the global batch's targets."""
    generator = torch.Generator().manual_seed(100 * rank + micro_batch)
    token_ids, targets = torch.randint(VOCAB, (2, TARGETS[(rank + micro_batch) % 4]), generator=generator)
    counts = [TARGETS[(r + m) % 4] for r in range(world_size) for m in range(MICRO_BATCHES)]
    logits = model(token_ids, use_sometimes=rank == 0)
    return nn.functional.cross_entropy(logits, targets, reduction="sum") / sum(counts)


def optimizer_config(name: str) -> OptimizerConfig:
    return OptimizerConfig(name=name, lr=0.05, weight_decay=0.0 if name == "sgd" else 0.1)


def train_reference(case: Case, world_size: int) -> tuple[dict[str, Tensor], dict[str, Tensor | None], list[float]]:
    """One process on the data of all ranks: parameters at the end, gradients of the first step, norms."""
    model = Toy(dtype=case.dtype)
    optimizer = build_optimizer(model.named_parameters(), optimizer_config(case.optimizer))
    norms, gradients = [], {}
    for step in range(case.steps):
        for rank in range(world_size):
            for micro_batch in range(MICRO_BATCHES):
                share_of_loss(model, rank, world_size, micro_batch).backward()
        norm = gradient_norm(model.parameters())
        if step == 0:
            gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        norms.append(norm.item())
        scale_gradients(model.parameters(), norm, case.clip_norm)
        set_learning_rate(optimizer, 1 / (1 + step))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {name: param.detach() for name, param in model.named_parameters()}, gradients, norms


def train_rank(mesh, strategy, optimizer, case: Case) -> dict:
    """The same steps under a strategy; what `train_reference` gives, and the log of the second step."""
    norms, gradients, log = [], {}, []
    for step in range(case.steps):
        mesh.log.drain(0)
        for micro_batch in range(MICRO_BATCHES):
            strategy.begin_micro_batch(last=micro_batch == MICRO_BATCHES - 1)
            place, ranks = mesh.rank_in("dp"), mesh.size("dp")
            share_of_loss(strategy.model, place, ranks, micro_batch).backward()
        strategy.finish_gradients()
        norm = strategy.gradient_norm()
        if step == 0:
            gradients = {n: None if g is None else g.clone() for n, g in strategy.full_gradients().items()}
        norms.append(norm.item())
        scale_gradients(strategy.parameters, norm, case.clip_norm)
        set_learning_rate(optimizer, 1 / (1 + step))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == 1:
            log = mesh.log.drain(0)
    return {"parameters": strategy.full_parameters(), "gradients": gradients, "norms": norms, "log": log}


def calls_and_bytes(log: list[dict]) -> dict[tuple[str, str, str], tuple[int, int]]:
    """{(op, axis, dtype): (calls, bytes)}."""
    return {(line["op"], line["axis"], line["dtype"]): (line["calls"], line["bytes"]) for line in log}


def assert_equal_to_reference(results: list[dict], case: Case, tolerance: float) -> None:
    """Gradients and norms first, then parameters, all equal on every rank bit for bit."""
    parameters, gradients, norms = train_reference(case, len(results))
    for result in results:
        for name, gradient in gradients.items():
            if gradient is None:
                assert result["gradients"].get(name) is None, name
            else:
                atol = tolerance * gradient.abs().max().item()
                torch.testing.assert_close(result["gradients"][name], gradient, rtol=tolerance, atol=atol)
        torch.testing.assert_close(torch.tensor(result["norms"]), torch.tensor(norms), rtol=tolerance, atol=0)
        for name, value in result["parameters"].items():
            assert torch.equal(value, results[0]["parameters"][name]), name
            torch.testing.assert_close(value, parameters[name], rtol=tolerance, atol=tolerance)
        assert result["norms"] == results[0]["norms"]
