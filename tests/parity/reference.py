"""The run that every layout is compared with: one process, the whole global batch at once, torch's own optimizers.

It shares the model with what is tested and nothing else: the loop, the loss, clipping and updates are written out.
Runs are saved under build/parity, keyed by everything they depend on, so that one run serves all layouts and sessions.
"""

import hashlib
import math
import os
from dataclasses import dataclass

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from llm.loss import IGNORE_INDEX
from llm.optimizer import build_optimizer
from llm.schedule import learning_rate_factor
from tests.conftest import ROOT
from tests.parity.cases import Case, ParityModel, global_batch, make_model

SOURCES = ("llm/transformer*.py", "llm/schedule.py", "llm/optimizer*.py", "tests/parity/[cr]*.py")
# Read when the code is loaded: sources that are edited while tests run must not name what the old code computed.
LOADED = b"".join(path.read_bytes() for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)))


@dataclass
class Result:
    """What a run leaves to compare: the first step's gradients, all norms and losses, the last parameters."""

    gradients: dict[str, Tensor | None]  # full, unclipped, of the first step
    norms: list[float]  # before clipping
    losses: list[float]
    parameters: dict[str, Tensor]  # after the last step

    def tensors(self) -> dict[str, Tensor]:
        present = {f"gradient/{name}": value for name, value in self.gradients.items() if value is not None}
        parameters = {f"parameter/{name}": value.clone() for name, value in self.parameters.items()}
        numbers = {"norms": self.norms, "losses": self.losses}
        return present | parameters | {name: torch.tensor(x, dtype=torch.float64) for name, x in numbers.items()}

    @staticmethod
    def of(tensors: dict[str, Tensor]) -> "Result":
        parameters = {key.removeprefix("parameter/"): t for key, t in tensors.items() if key.startswith("parameter/")}
        gradients = {name: tensors.get(f"gradient/{name}") for name in parameters}
        return Result(gradients, tensors["norms"].tolist(), tensors["losses"].tolist(), parameters)


def saved_reference(case: Case, device: str = "cpu") -> Result:
    """The reference run of a case, read from disk, or run and saved there."""
    processor = torch.cuda.get_device_name() if device == "cuda" else torch.backends.cpu.get_cpu_capability()
    digest = hashlib.sha256(f"{case} {torch.__version__} {processor}".encode())
    digest.update(LOADED)
    name = case.name.replace(",", "").replace(" ", "_")
    path = ROOT / "build" / "parity" / f"{name}-{digest.hexdigest()[:16]}.safetensors"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        save_file(run_reference(case, device).tensors(), partial)
        os.replace(partial, path)
    return Result.of(load_file(path))


def run_reference(case: Case, device: str = "cpu") -> Result:
    model = make_model(case, device)
    config = case.train_config()
    optimizer = reference_optimizer(model, case)
    result = Result({}, [], [], {})
    for step in range(case.steps):
        batch = global_batch(step).to(torch.device(device))
        with torch.autocast(device, torch.bfloat16, enabled=case.dtype == "bfloat16"):
            logits = model(batch.token_ids)
            if case.dtype == "bfloat16":
                logits = logits.float()
            loss = F.cross_entropy(
                logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
            )
        loss = loss / batch.num_targets
        loss.backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        result.norms.append(math.sqrt(sum(grad.double().square().sum().item() for grad in grads)))
        result.losses.append(loss.item())
        if step == 0:
            gradients = {name: param.grad for name, param in model.named_parameters()}
            result.gradients = {name: None if g is None else g.cpu().clone() for name, g in gradients.items()}
        if case.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
        factor = learning_rate_factor(step, config.schedule, config.max_steps)
        if optimizer is None:
            sgd_step(model, config.optimizer.lr * factor / math.sqrt(step + 1))
        else:
            for group in optimizer.param_groups:
                group["lr"] = config.optimizer.lr * factor
            optimizer.step()
        model.zero_grad(set_to_none=True)
    result.parameters = {name: param.detach().cpu() for name, param in model.named_parameters()}
    return result


@torch.no_grad()
def sgd_step(model: ParityModel, rate: float) -> None:
    """Gradient descent: parameters that have a gradient at one step have it at every step here."""
    for param in model.parameters():
        if param.grad is not None:
            param -= rate * param.grad


def reference_optimizer(model: ParityModel, case: Case) -> torch.optim.Optimizer | None:
    """torch's AdamW, decay on matrices alone; for Muon our own on one device, which is tested beside torch's."""
    config = case.train_config().optimizer
    if case.optimizer == "sgd":
        return None
    if case.optimizer == "muon":
        return build_optimizer(model.named_parameters(), config)
    groups = [
        {"params": [param for param in model.parameters() if param.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [param for param in model.parameters() if param.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), eps=config.eps, foreach=False)
