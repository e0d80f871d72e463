"""Ranks with two roles: the first ones train, the last ones do something else (write completions), weights go across.

Every rank of the run makes the same process groups in the same order; each then sees the meshes that it belongs to.
"""

from dataclasses import dataclass

from torch import distributed as dist

from configs.errors import UserError
from parallel.mesh import Mesh, MeshAxis
from parallel.mesh_degrees import AXES, EXPERT_AXES, Degrees


@dataclass
class RoleMeshes:
    """The meshes of one rank; None where it has no part.

    world: all ranks (axis "world"). train: the training ranks with their degrees, the run's first. workers: the other
    ranks, along the axis "world" of their own mesh. sync: rank 0 and the workers, along the axis "sync".
    """

    world: Mesh
    train: Mesh | None
    workers: Mesh | None
    sync: Mesh | None

    @property
    def is_split(self) -> bool:
        return self.world is not self.train


def share_roles(world: Mesh) -> RoleMeshes:
    """Every rank trains and works."""
    return RoleMeshes(world, world, world, None)


def split_roles(world: Mesh, num_workers: int, degrees: Degrees) -> RoleMeshes:
    """The last `num_workers` ranks work, the others train with `degrees`; called by every rank of `world`.

    Raises UserError when no rank is left to train or the degrees do not fill those that are.
    """
    num_train = world.world_size - num_workers
    if num_train < 1 or num_workers < 1:
        raise UserError(
            f"{num_workers} of {world.world_size} ranks cannot have a role of their own and leave one to train; start "
            f"at least {num_workers + 1} ranks with torchrun --nproc-per-node"
        )
    degrees = degrees.resolve(num_train)
    made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    train_axes = {axis: own_axis(degrees.groups(axis), world.rank, made) for axis in (*AXES, *EXPERT_AXES)}
    work_ranks = list(range(num_train, world.world_size))
    work_axis = own_axis([work_ranks], world.rank, made)
    sync_axis = own_axis([[0, *work_ranks]], world.rank, made)
    shared = (world.device, world.backend)
    train = workers = sync = None
    if world.rank < num_train:
        train = Mesh(world.rank, world.local_rank, num_train, *shared, train_axes, degrees=degrees)
    else:
        place = world.rank - num_train
        # Never rank 0, so that nobody but a training rank writes the run directory.
        workers = Mesh(place + 1, world.local_rank, num_workers, *shared, {"world": work_axis})
    if sync_axis is not None:
        sync = Mesh(sync_axis.rank, world.local_rank, sync_axis.size, *shared, {"sync": sync_axis})
    return RoleMeshes(world, train, workers, sync)


def own_axis(
    groups: list[list[int]], rank: int, made: dict[tuple[int, ...], dist.ProcessGroup | None]
) -> MeshAxis | None:
    """The axis that `rank` lies on among groups of ranks, None where it is in none; groups not `made` yet are made."""
    own = None
    for ranks in groups:
        key = tuple(ranks)
        if key not in made:
            made[key] = dist.new_group(ranks) if len(ranks) > 1 else None
        if rank in ranks:
            own = MeshAxis(len(ranks), ranks.index(rank), made[key], ranks)
    return own
