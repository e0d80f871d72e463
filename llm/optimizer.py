"""Optimizers written out: SGDDecay, AdamW, Muon, and Muon for the hidden matrices with AdamW for the rest.

All are one class of optimizer: a parameter group names its algorithm, and the algorithm is a function of the group and
the state. So a mixture is only a list of groups, with one step and one state. Names stay with the parameters
("param_names"), because checkpoints key optimizer state by name.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from configs.errors import UserError, check_choice, check_positive
from llm.optimizer_adamw import adamw_step, fused_adamw_step
from llm.optimizer_muon import ADJUSTMENTS, muon_step
from parallel.clipping import gradient_norm, scale_gradients

OPTIMIZERS = ("adamw", "muon", "sgd")


@dataclass
class OptimizerConfig:
    """Which optimizer and its rates; learning rates are base rates that the schedule multiplies."""

    name: str = "adamw"
    lr: float = 6e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1  # decoupled, and only on parameters with at least two dimensions
    clip_norm: float | None = 1.0  # null: no clipping
    momentum: float = 0.95  # muon
    nesterov: bool = True  # muon
    ns_steps: int = 5  # muon: Newton-Schulz iterations
    adjust_lr: str = "original"  # muon: "original", or "match_rms_adamw" so that lr is of AdamW's size
    adamw_lr: float | None = None  # muon: the rate of its AdamW part; null: lr

    def __post_init__(self) -> None:
        check_choice("optimizer.name", self.name, OPTIMIZERS)
        check_choice("optimizer.adjust_lr", self.adjust_lr, ADJUSTMENTS)
        check_positive(**{"optimizer.lr": self.lr, "optimizer.eps": self.eps, "optimizer.ns_steps": self.ns_steps})
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise UserError(f"optimizer.clip_norm={self.clip_norm} must be positive; use null for no clipping")
        if self.adamw_lr is not None and self.adamw_lr <= 0:
            raise UserError(f"optimizer.adamw_lr={self.adamw_lr} must be positive; use null for optimizer.lr")
        for field in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, field) < 1:
                raise UserError(f"optimizer.{field}={getattr(self, field)} must lie in 0..1, 1 excluded")
        if self.weight_decay < 0:
            raise UserError(f"optimizer.weight_decay={self.weight_decay} must not be negative; use 0 for no decay")
        if self.name == "sgd" and self.weight_decay > 0:
            raise UserError(f"optimizer.weight_decay={self.weight_decay} has no meaning for sgd; use 0")


def sgd_decay_step(group: dict[str, Any], state: dict[Tensor, dict[str, Tensor]]) -> None:
    """w <- w - lr / sqrt(t + 1) g, where t counts the parameter's own updates from 0."""
    for param in group["params"]:
        if param.grad is None:
            continue
        if not state[param]:
            state[param]["step"] = torch.zeros((), dtype=torch.float32)
        param.add_(param.grad, alpha=-group["lr"] / math.sqrt(state[param]["step"].item() + 1))
        state[param]["step"] += 1


STATE_KEYS = {"sgd": {"step"}, "adamw": {"step", "exp_avg", "exp_avg_sq"}, "muon": {"momentum_buffer"}}
ALGORITHMS: dict[str, Callable[[dict[str, Any], dict[Tensor, dict[str, Tensor]]], None]] = {
    "sgd": sgd_decay_step,
    "adamw": adamw_step,
    "muon": muon_step,
}


class MixedOptimizer(Optimizer):
    """Groups of (name, parameter) pairs or of parameters, each with the keys of its "algorithm".

    State is float32 also over bfloat16 parameters; a parameter without a gradient is skipped. Each group keeps its
    base rate as "base_lr". fused: AdamW's groups are updated by the kernel of kernel/adamw.py.
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any] | None = None, fused: bool = False):
        super().__init__(params, defaults or {})
        for group in self.param_groups:
            group.setdefault("base_lr", group["lr"])
        self.kernel = make_kernel() if fused else None
        self.counted: list[Tensor] = []  # parameters of the fused groups that the last step counted

    @property
    def skips_nan(self) -> bool:
        """Whether a gradient_scale of nan makes a step update nothing: all groups go through the kernel."""
        return self.kernel is not None and all(group["algorithm"] == "adamw" for group in self.param_groups)

    def uncount(self) -> None:
        """Take the last step out of the counts: it turned out to have updated nothing."""
        for param in self.counted:
            self.state[param]["step"] -= 1
            if self.state[param]["step"] == 0:
                del self.state[param]
        self.counted = []

    @torch.no_grad()
    def step(self, gradient_scale: Tensor | None = None) -> None:
        """Update all parameters; gradients count `gradient_scale` (a scalar on their device) times."""
        self.counted = []
        for group in self.param_groups:
            self.update(group, gradient_scale)

    @torch.no_grad()
    def update(self, group: dict[str, Any], gradient_scale: Tensor | None = None) -> None:
        """The step of one group, or of a copy of it with only some of its parameters."""
        if self.kernel is not None and group["algorithm"] == "adamw":
            self.counted += fused_adamw_step(group, self.state, self.kernel, gradient_scale)
            return
        gradients = [param.grad for param in group["params"] if param.grad is not None]
        if gradient_scale is not None and gradients:
            torch._foreach_mul_(gradients, gradient_scale)
        ALGORITHMS[group["algorithm"]](group, self.state)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch's, except that state keeps its dtype: torch would round it to that of the parameter."""
        super().load_state_dict(state_dict)
        params = [param for group in self.param_groups for param in group["params"]]
        for index, values in state_dict["state"].items():
            param = params[index]
            for key, value in values.items():
                device = "cpu" if key == "step" else param.device
                self.state[param][key] = value.detach().clone().to(device)


def make_kernel() -> Any:
    """The kernel of the fused update, imported here because Triton is not there on every platform."""
    from kernel.adamw import FusedAdamW

    return FusedAdamW()


class SGDDecay(MixedOptimizer):
    """Gradient descent with rate lr / sqrt(t + 1)."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2):
        super().__init__(params, {"algorithm": "sgd", "lr": lr})


class AdamW(MixedOptimizer):
    """Adam with decoupled weight decay, equal to torch.optim.AdamW (state: exp_avg, exp_avg_sq, step)."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ):
        super().__init__(
            params, {"algorithm": "adamw", "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )


class Muon(MixedOptimizer):
    """Orthogonalised momentum for matrices (rows, columns) or stacks of them, equal to torch.optim.Muon."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr: str = "original",
    ):
        defaults = {"algorithm": "muon", "lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(params, defaults | {"nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr": adjust_lr})
        for group in self.param_groups:
            for param in group["params"]:
                assert param.ndim in (2, 3), f"Muon takes (rows, columns) or (E, rows, columns), got {param.shape}"


def is_hidden_matrix(name: str, param: Tensor) -> bool:
    """Whether Muon takes it: a matrix inside the blocks, or the stacked matrices (E, F, C) of experts."""
    return name.startswith("blocks.") and param.ndim in (2, 3)


def build_optimizer(
    named_parameters: Iterable[tuple[str, Parameter]], config: OptimizerConfig, fused: bool = False
) -> MixedOptimizer:
    """Sort parameters into groups by algorithm and decay; names must be those of the single-device model."""
    named = [(name, param) for name, param in named_parameters if param.requires_grad]
    if config.name == "sgd":
        return SGDDecay(named, lr=config.lr)
    adamw = {"algorithm": "adamw", "lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
    groups = []
    if config.name == "muon":
        hidden = [(name, param) for name, param in named if is_hidden_matrix(name, param)]
        groups.append(
            {"params": hidden, "algorithm": "muon", "lr": config.lr, "momentum": config.momentum,
             "nesterov": config.nesterov, "ns_steps": config.ns_steps, "adjust_lr": config.adjust_lr,
             "weight_decay": config.weight_decay}
        )  # fmt: skip
        named = [(name, param) for name, param in named if not is_hidden_matrix(name, param)]
        adamw["lr"] = config.lr if config.adamw_lr is None else config.adamw_lr
    matrices = [(name, param) for name, param in named if param.ndim >= 2]
    vectors = [(name, param) for name, param in named if param.ndim < 2]
    groups.append({"params": matrices, "weight_decay": config.weight_decay} | adamw)
    groups.append({"params": vectors, "weight_decay": 0.0} | adamw)
    return MixedOptimizer([group for group in groups if group["params"]], fused=fused)


def set_learning_rate(optimizer: Optimizer, factor: float) -> None:
    """Set every group's rate to its base rate times the schedule's factor."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor


def clipped_step(optimizer: Any, params: Iterable[Tensor], norm: Tensor, max_norm: float | None) -> None:
    """optimizer.step() with gradients scaled by min(1, max_norm / norm), inside the update where it is fused.

    A fused update of all parameters changes nothing when the norm is not finite; others must not be asked to.
    """
    if getattr(optimizer, "skips_nan", False):
        factor = torch.ones_like(norm) if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)
        optimizer.step(torch.where(norm.isfinite(), factor, torch.nan).float())
        return
    if max_norm is not None:
        scale_gradients(params, norm, max_norm)
    optimizer.step()


def clip_gradients(params: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients so that their norm is at most max_norm; return the norm before (Pascanu et al. 2013)."""
    params = list(params)
    norm = gradient_norm(params)
    scale_gradients(params, norm, max_norm)
    return norm
