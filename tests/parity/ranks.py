"""What each rank of a layout runs: the strategies through llm.parallelize, the step through TrainingStep."""

import hashlib
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from llm.args import ParallelConfig
from llm.loss import CrossEntropyLoss
from llm.parallelize import make_forward_loss, parallelize
from llm.training_step import TrainingStep, rows_of_rank
from parallel.mesh import Mesh
from tests.parallel.pool import pool_of
from tests.parity.cases import ROWS, Case, global_batch, make_model, micro_batches_of
from tests.parity.layouts import Layout
from tests.parity.mutants import Mutant, applied
from tests.parity.reference import Result


@dataclass
class RankResult:
    """A rank's view of a run; tensors only from the first rank, from the others their digests."""

    result: Result | None
    digests: dict[str, str]
    tied: bool  # where embeddings are tied: both tables are equal in every bit
    comm: list[list[dict[str, Any]]] = field(default_factory=list)  # what each step sent


def run_on_pool(
    layout: Layout, case: Case, accumulation: int | str = 1, mutant: Mutant | None = None, device: str = "cpu"
) -> list[RankResult]:
    """Train `case` on the ranks of a layout, in rank order."""
    config = layout.config()
    answers = pool_of(layout.world_size, device).run(
        run_layout, case, config, accumulation, mutant, degrees=layout.degrees(), force=config.force
    )
    return [
        RankResult(Result.of(answer.pop("tensors")) if "tensors" in answer else None, **answer) for answer in answers
    ]


def run_layout(
    mesh: Mesh, case: Case, parallel: ParallelConfig, accumulation: int | str = 1, mutant: Mutant | None = None
) -> dict[str, Any]:
    """On a rank: train `case` under a layout and return what there is to compare, as plain containers."""
    with applied(mutant) if mutant is not None else nullcontext():
        return train_case(mesh, case, parallel, accumulation)


def train_case(mesh: Mesh, case: Case, parallel: ParallelConfig, accumulation: int | str) -> dict[str, Any]:
    config = case.train_config(parallel)
    parts = parallelize(make_model(case, mesh.device), config, mesh)
    step = TrainingStep(
        config, mesh, parts, make_forward_loss(parts.head_model, CrossEntropyLoss(), parts.compile, parts.shards)
    )
    seen = keep_first_gradients(parts.strategy)
    result, comm = Result({}, [], [], {}), []
    mesh.log.drain(0)
    for number in range(case.steps):
        batch = global_batch(number)
        own = micro_batches_of(batch, rows_of_rank(ROWS, mesh), accumulation, mesh.rank_in("dp"))
        taken = step.run(number, own)
        comm.append(mesh.log.drain(number))
        if number == 0:
            comm[0] = []  # its full gradients were gathered for this comparison
        result.norms.append(taken.gradient_norm)
        result.losses.append(taken.mean_losses(mesh)[0])
        mesh.log.drain(number)
    result.gradients = seen
    result.parameters = {name: value.clone() for name, value in parts.strategy.full_parameters().items()}
    with parts.strategy.gathered():
        tied = torch.equal(parts.model.output.weight, parts.model.embedding.weight)
    tensors = result.tensors()
    digests = {name: digest_of(value) for name, value in tensors.items()}
    return {"digests": digests, "tied": tied, "comm": comm} | ({"tensors": tensors} if mesh.rank == 0 else {})


def keep_first_gradients(strategy: Any) -> dict[str, Tensor | None]:
    """A dict that the first step fills with the full gradients, just before their norm is taken."""
    kept: dict[str, Tensor | None] = {}
    gradient_norm = strategy.gradient_norm

    def norm_and_keep() -> Tensor:
        if not kept:
            full = strategy.full_gradients()
            kept.update({name: None if value is None else value.clone() for name, value in full.items()})
        return gradient_norm()

    strategy.gradient_norm = norm_and_keep
    return kept


def digest_of(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
