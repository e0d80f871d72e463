"""Steps that all ranks take together: when one fails, every rank learns of it and stops, and none waits in vain.

A rank that failed alone would leave the others in their next collective until its timeout. So each step ends in a
small reduction that says whether anyone failed, and only then is the reason sent round. At one rank nothing is sent.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

from configs.errors import UserError
from parallel.collectives import all_gather_json, all_reduce_max, broadcast
from parallel.mesh import Mesh

AXIS = "world"
Result = TypeVar("Result")


class SharedFault(UserError):
    """What went wrong on some rank, raised on every rank in the same words."""


def rank_of(mesh: Mesh | None) -> tuple[int, int]:
    """(rank, world size); one process alone when there is no mesh."""
    return (mesh.rank, mesh.world_size) if mesh is not None else (0, 1)


def together(mesh: Mesh | None, body: Callable[..., Result], *arguments: object) -> Result:
    """Run `body` on every rank; if it raised on any, raise SharedFault with the first rank's reason on all.

    What is no fault of the input or the disk (ValueError, OSError) keeps its type and traceback where it arose.
    """
    error, result = None, None
    try:
        result = body(*arguments)
    except Exception as caught:
        error = caught
    reason = first_reason(mesh, None if error is None else describe(error))
    if reason is None:
        return result
    if error is not None and not isinstance(error, ValueError | OSError):
        raise error
    raise SharedFault(reason) from error


def describe(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"


def first_reason(mesh: Mesh | None, reason: str | None) -> str | None:
    """The reason of the lowest rank that has one, on every rank; None when no rank has one."""
    rank, world_size = rank_of(mesh)
    if world_size == 1:
        return reason
    failed = torch.tensor([reason is not None], dtype=torch.int32)  # on the host: the device is not disturbed
    if not all_reduce_max(failed, mesh, AXIS).item():
        return None
    reasons = all_gather_json(None if reason is None else f"rank {rank}: {reason}", mesh, AXIS)
    return next(text for text in reasons if text is not None)


def broadcast_numbers(mesh: Mesh | None, numbers: list[int]) -> list[int]:
    """Rank 0's list of integers, on every rank."""
    if rank_of(mesh)[1] == 1:
        return numbers
    count = broadcast(torch.tensor(len(numbers)), mesh, AXIS).item()
    sent = torch.zeros(count, dtype=torch.int64)
    if mesh.rank == 0:
        sent.copy_(torch.tensor(numbers, dtype=torch.int64))
    return broadcast(sent, mesh, AXIS).tolist()
