"""What lies near what in the embedding table: neighbours by cosine, and its principal components. V ids, C d_model."""

from dataclasses import dataclass

import torch
from torch import Tensor


def nearest(table: Tensor, token_ids: list[int], count: int) -> list[list[tuple[int, float]]]:
    """For each id its `count` nearest others in table (V, C), as (id, cosine), best first."""
    unit = torch.nn.functional.normalize(table.float(), dim=-1)  # (V, C)
    cosines = unit[token_ids] @ unit.T  # (n, V)
    cosines[torch.arange(len(token_ids)), token_ids] = float("-inf")  # not itself
    values, ids = cosines.topk(min(count, table.shape[0] - 1), dim=-1)
    return [list(zip(row_ids, row, strict=True)) for row_ids, row in zip(ids.tolist(), values.tolist(), strict=True)]


@dataclass(frozen=True)
class PrincipalComponents:
    """coordinates (V, k) of the rows along the first k directions (C, k), and each direction's share of variance."""

    coordinates: Tensor
    directions: Tensor
    shares: list[float]


def principal_components(table: Tensor, count: int) -> PrincipalComponents:
    """PCA of a table (V, C), rows centred; a direction's sign is such that its largest entry is positive."""
    rows = table.double() - table.double().mean(0)  # (V, C)
    variances, directions = torch.linalg.eigh(rows.T @ rows)  # ascending
    variances, directions = variances.flip(0), directions.flip(1)[:, :count]  # (C, k)
    largest = directions.abs().argmax(0)  # (k,)
    directions = directions * directions[largest, torch.arange(directions.shape[1])].sign()
    shares = (variances / variances.sum())[:count].tolist()
    return PrincipalComponents((rows @ directions).float(), directions.float(), shares)
