"""Which pieces of the model and of the optimizer's state this rank holds, under the names that a checkpoint gives them.

Under plain or no data parallelism every rank holds all of everything. A sharding strategy says what it holds by two
methods, pieces() for parameters and optimizer_pieces() for what the optimizer updates on this rank, both under the
names of the single-device model.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from parallel.mesh import Mesh
from parallel.sharded_checkpoint_pieces import Piece, scalar, whole

MODEL_PREFIX, OPTIMIZER_PREFIX = "model/", "optimizer/"


class Sharding(Protocol):
    """A strategy under which a rank holds parts of parameters."""

    def pieces(self) -> list[Piece]: ...

    def optimizer_pieces(self) -> list[Piece]: ...


@dataclass
class Held:
    """One rank's share of a run's tensors.

    `model` pieces are named "model/<name>"; `updated` are the optimizer's parameters here, by plain name: `local` is
    the key of its state.
    """

    model: list[Piece]
    updated: list[Piece]
    algorithms: dict[str, str]  # of each updated parameter: a key of STATE_KEYS
    state: dict[Tensor, dict[str, Tensor]]  # the optimizer's own

    def pieces(self) -> Iterator[Piece]:
        """Everything to be saved: parameters, persistent buffers, and the optimizer's state as it stands."""
        yield from self.model
        for piece in self.updated:
            for key, value in sorted(self.state.get(piece.local, {}).items()):  # in one order on all ranks
                name = state_name(piece.name, key)
                saved = scalar(name, value, piece) if value.ndim == 0 else piece.of(name, value)
                if saved is not None:
                    yield saved


def state_name(name: str, key: str) -> str:
    return f"{OPTIMIZER_PREFIX}{name}/{key}"


def held_pieces(
    model: nn.Module, optimizer: Optimizer, mesh: Mesh | None = None, sharding: Sharding | None = None
) -> Held:
    """What this rank holds; without a sharding strategy all of it, as every rank of the mesh does."""
    replicas, replica = (mesh.world_size, mesh.rank) if mesh is not None else (1, 0)
    own = {name: whole(name, tensor, replicas, replica) for name, tensor in model_tensors(model).items()}
    algorithms = {name: group["algorithm"] for group in optimizer.param_groups for name in group["param_names"]}
    if sharding is None:
        named = named_parameters_of(optimizer)
        updated = [whole(name, parameter, replicas, replica) for name, parameter in named]
        return Held(list(own.values()), updated, algorithms, optimizer.state)
    parameters = {MODEL_PREFIX + name for name, _ in model.named_parameters()}
    buffers = {name: piece for name, piece in own.items() if name not in parameters}
    shards = [replace(piece, name=MODEL_PREFIX + piece.name) for piece in sharding.pieces()]
    kept = [piece for name, piece in buffers.items() if name not in {shard.name for shard in shards}]
    return Held(shards + kept, sharding.optimizer_pieces(), algorithms, optimizer.state)


def named_parameters_of(optimizer: Optimizer) -> list[tuple[str, Any]]:
    """(name, parameter) of everything that the optimizer updates."""
    return [
        (name, parameter)
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    ]


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and persistent buffer, named "model/<name>"; tied ones once, under their first name."""
    named = dict(model.named_parameters())
    persistent = model.state_dict(keep_vars=True).keys()
    named |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {MODEL_PREFIX + name: tensor.detach() for name, tensor in named.items()}
