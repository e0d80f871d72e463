"""How many ranks lie along each axis, and which ranks share a group: plain numbers, for any world size.

Axes, outermost first: pp, dp_replicate, dp_shard, cp, tp. So tp neighbours are neighbours on a host, and a rank is
(((pp * R + replicate) * S + shard) * C + cp) * T + tp. Experts have no axis of their own: ep folds over dp x cp.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from configs.errors import UserError, check_positive

BASE_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# Each name that code may ask for, and the base axes it runs over. Gradients are summed and tokens counted over dp_cp,
# FSDP shards over dp_shard_cp.
AXES = {axis: (axis,) for axis in BASE_AXES} | {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
    "world": BASE_AXES,
}
EXPERT_AXES = ("ep", "ep_replicate")  # ranks that hold different experts; ranks that hold the same ones


@dataclass(frozen=True)
class Degrees:
    """Degrees as a config gives them; `dp` is dp_replicate x dp_shard, null for what the other axes leave over."""

    dp: int | None = None
    dp_shard: int | None = 1  # null: dp
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("dp", "dp_shard", "cp", "tp", "pp", "ep"):
            if getattr(self, name) is not None:
                check_positive(**{f"parallel.{name}": getattr(self, name)})

    @property
    def dp_replicate(self) -> int:
        return self.dp // self.dp_shard

    def resolve(self, world_size: int) -> "Degrees":
        """These degrees with no null left; UserError where they do not fill `world_size` ranks exactly."""
        others = self.cp * self.tp * self.pp
        if self.dp is None and world_size % others:
            raise UserError(
                f"parallel.pp x cp x tp = {self.pp} x {self.cp} x {self.tp} = {others} must divide "
                f"the world size {world_size}; start a multiple of {others} ranks with torchrun --nproc-per-node"
            )
        dp = self.dp if self.dp is not None else world_size // others
        if dp * others != world_size:
            raise UserError(
                f"parallel.dp={dp} times pp x cp x tp = {self.pp} x {self.cp} x {self.tp} must equal the world size "
                f"{world_size}; start torchrun with --nproc-per-node={dp * others} or leave parallel.dp null"
            )
        dp_shard = self.dp_shard if self.dp_shard is not None else dp
        if dp % dp_shard:
            raise UserError(f"parallel.dp_shard={dp_shard} must divide dp={dp}; use a divisor or null for all of it")
        if (dp * self.cp) % self.ep:
            raise UserError(f"parallel.ep={self.ep} must divide dp x cp = {dp} x {self.cp}; use a divisor")
        return replace(self, dp=dp, dp_shard=dp_shard)

    def grid(self) -> np.ndarray:
        """Every rank at its place: (pp, dp_replicate, dp_shard, cp, tp)."""
        shape = (self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp)
        return np.arange(int(np.prod(shape))).reshape(shape)

    def groups(self, axis: str) -> list[list[int]]:
        """All groups of ranks along an axis, each in axis order; together they hold every rank once."""
        grid = self.grid()
        if axis in EXPERT_AXES:
            rows = self.groups("dp_cp")
            blocks = np.array(rows).reshape(len(rows), -1, self.ep)  # (pp x tp, dp x cp / ep, ep)
            blocks = blocks if axis == "ep" else blocks.transpose(0, 2, 1)
            return blocks.reshape(-1, blocks.shape[-1]).tolist()
        along = [BASE_AXES.index(name) for name in AXES[axis]]
        across = [dim for dim in range(grid.ndim) if dim not in along]
        size = int(np.prod([grid.shape[dim] for dim in along]))
        return grid.transpose(across + along).reshape(-1, size).tolist()


@lru_cache(maxsize=256)
def known_groups(degrees: Degrees, axis: str) -> tuple[tuple[int, ...], ...]:
    """`degrees.groups(axis)`, of which a plan asks for the same ones again and again."""
    return tuple(map(tuple, degrees.groups(axis)))
