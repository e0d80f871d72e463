"""New weights to the engines, in place: from the trainer on the same rank, or by broadcast to ranks that only write.

Tensors travel in the engine's dtype. Every sync has a number, the count of batches learned, which each token of a
completion carries; the engine forgets the prefixes that it computed with older weights.
"""

from typing import TYPE_CHECKING

import torch

from llm.args import ModelConfig
from llm.model_loading import choose_dtype
from llm.transformer import Transformer
from parallel.collectives import broadcast
from parallel.mesh_roles import RoleMeshes

if TYPE_CHECKING:
    from alignment.train_rl_setup import RolloutSide, TrainingSide

SYNC_AXIS = "sync"


class WeightSync:
    """`send(training, rollout, version)` is called by every rank of the run after the updates of a batch."""

    def __init__(self, roles: RoleMeshes, model_config: ModelConfig, engine_dtype: str):
        self.roles, self.model_config = roles, model_config
        self.wire_dtype = choose_dtype(engine_dtype, roles.world.device)
        self.buffers: dict[str, torch.Tensor] = {}  # of a rank that only writes

    def send(self, training: "TrainingSide | None", rollout: "RolloutSide | None", version: int) -> None:
        if training is not None:
            with training.parts.strategy.gathered():  # by every training rank, although one alone may send
                tensors = training.model.state_dict()
                if self.roles.sync is not None:
                    for tensor in tensors.values():
                        broadcast(tensor.detach().to(self.wire_dtype), self.roles.sync, SYNC_AXIS)
                elif rollout is not None:
                    rollout.engine.load_weights(tensors, version)
        elif rollout is not None:
            rollout.engine.load_weights(self.receive(), version)

    def receive(self) -> dict[str, torch.Tensor]:
        """The tensors of rank 0, by name, in buffers that stay."""
        if not self.buffers:
            with torch.device("meta"):
                shapes = Transformer(self.model_config).state_dict()
            device = self.roles.world.device
            self.buffers = {
                name: torch.empty(tensor.shape, dtype=self.wire_dtype, device=device) for name, tensor in shapes.items()
            }
        for buffer in self.buffers.values():
            broadcast(buffer, self.roles.sync, SYNC_AXIS)
        return self.buffers
